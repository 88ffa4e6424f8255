"""The reward `code`: programs in responses, forms of labels, comparison, verdicts, limits, and cancelled calls."""

import asyncio
import functools
import json
import os
import subprocess
import sys

import pytest

from process_testing import descendants, eventually, is_running
from record_testing import make_prompt, make_rollout
from rlhf_data.errors import ConfigError
from rlhf_data.records import VerdictKind
from rlhf_rollout.rewards.code import sandbox as sandbox_module
from rlhf_rollout.rewards.code.code_reward import CodeReward, extract_program, parse_tests, same_text
from rlhf_rollout.rewards.code.sandbox import Bubblewrap, SandboxError, check_sandbox
from rlhf_rollout.rewards.mix import build_reward, check_reward
from rlhf_rollout.rewards.sources import CallOptions, parse_sources
from rlhf_rollout.workers.guarded import WorkerOptions

OK, WRONG, UNPARSABLE, CRASH = VerdictKind.OK, VerdictKind.WRONG, VerdictKind.UNPARSABLE, VerdictKind.CRASH
needs_sandbox = pytest.mark.usefixtures("bubblewrap")
SUM = json.dumps({"inputs": ["1 2\n", "5 -7\n", "10 20\n"], "outputs": ["3\n", "-2\n", "30\n"]})
RIGHT = "print(sum(map(int, input().split())))"


def fenced(program):
    return f"My program:\n```python\n{program}\n```\nDone."


one_sandbox = functools.cache(Bubblewrap)  # each tries a program first


def judge(label, *responses, sandbox=None, **options):
    prompt = make_prompt(label=label)
    reward = CodeReward(sandbox or one_sandbox(), CallOptions(**{"timeout_s": 120, **options}))
    rollouts = [make_rollout(prompt, response, index=index) for index, response in enumerate(responses)]
    return asyncio.run(reward.score(prompt, rollouts))


class Script:
    """A sandbox that answers what it is told, and counts the calls that run at the same time."""

    def __init__(self, *results, error=None):
        self.results, self.error = list(results), error
        self.jobs, self.running, self.most = [], 0, 0

    async def run(self, job):
        self.jobs.append(job)
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0.01)
        self.running -= 1
        if self.error:
            raise self.error
        return self.results


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("a\n```python\nx = 1\n```\nb", "x = 1\n"),
        ("```\nx\n```\n```py\ny\n```", "y\n"),
        ("```python\nx = 1\ny = 2", "x = 1\ny = 2"),
        ("```python\nprint('```')\n```", "print('```')\n"),
        ("```python\n```", ""),
        ("", ""),
    ],
)
def test_program_is_the_last_block_or_all(response, program):
    assert extract_program(response) == program


@pytest.mark.parametrize(
    ("output", "expected", "same"),
    [
        ("3\n", "3", True),
        ("0.5000", "0.5", True),
        ("0.3333333333333333", "0.33333333333", True),
        ("0.3334", "0.3333", False),
        ("1 2.50", "1 2.5", True),
        ("3.0", "3", False),
        ("", "0", False),
        ("x", "1.5", False),
        ("0.0000000005", "0.0", True),
        ("1\n2", "1\n3", False),
    ],
)
def test_outputs_agree_by_line(output, expected, same):
    assert same_text(output, expected) is same


@pytest.mark.parametrize(
    "label",
    ["", "3", "[]", "null", "{}", '{"inputs": [], "outputs": []}', '{"inputs": ["1"], "outputs": []}',
     '{"inputs": "1", "outputs": "1"}', '{"test_list": []}', '{"fn_name": "f", "inputs": ["x"], "outputs": ["1"]}'],
)  # fmt: skip
def test_label_without_tests_is_a_crash_that_says_so(label):
    with pytest.raises(ValueError):  # noqa: PT011
        parse_tests(label)
    (verdict,) = judge(label, fenced(RIGHT), sandbox=Script())
    assert verdict.kind is CRASH and verdict.reward is None and verdict.detail.startswith("the label has no tests")


def test_expected_outputs_are_not_given_to_the_sandbox():
    script = Script({"output": "3", "why": ""})
    for label in (SUM, json.dumps({"fn_name": "f", "inputs": [[1]], "outputs": [777]})):
        judge(label, fenced(RIGHT), sandbox=script)
    assert "777" not in json.dumps(script.jobs) and '"30' not in json.dumps(script.jobs)


@needs_sandbox
def test_standard_input_and_output():
    half = "a, b = map(int, input().split())\nprint(abs(a + b))"
    verdicts = judge(SUM, fenced(RIGHT), fenced(half), fenced("1 / 0"), fenced("x ="), num_workers=2)
    assert [(v.kind, v.reward, round(v.extra["passed"], 4)) for v in verdicts] == [
        (OK, 1.0, 1.0), (WRONG, 0.0, 0.6667), (WRONG, 0.0, 0.0), (WRONG, 0.0, 0.0),
    ]  # fmt: skip
    assert verdicts[1].detail == "1 of 3 tests failed; test 2: got '2\\n', expected '-2\\n'"
    assert verdicts[2].detail == "3 of 3 tests failed; test 1: ZeroDivisionError: division by zero"
    assert "SyntaxError" in verdicts[3].detail


@needs_sandbox
def test_responses_without_a_program():
    verdicts = judge(SUM, "", "```python\n\n```", "I cannot do this.", RIGHT)
    assert [(v.kind, v.reward) for v in verdicts] == [(UNPARSABLE, 0.0)] * 3 + [(OK, 1.0)]


@needs_sandbox
@pytest.mark.parametrize(
    ("label", "program", "kind"),
    [
        ({"fn_name": "f", "inputs": [[1, 2]], "outputs": [3]}, "def f(a, b): return a + b", OK),
        ({"fn_name": "f", "inputs": [[1, 2]], "outputs": [[3]]}, "def f(a, b): return a + b", OK),  # APPS wraps it
        ({"fn_name": "f", "inputs": ["[1, 2]\n3"], "outputs": ["[3, 1]"]},
         "class Solution:\n  def f(self, a, b): return b, a[0]", OK),  # LiveCodeBench
        ({"fn_name": "f", "inputs": ['"a\u2028b"\n3'], "outputs": ["4"]}, "def f(a, b): return len(a) + b - 2", OK),
        ({"fn_name": "f", "inputs": [[[1]]], "outputs": [{"1": 2}]}, "def f(a): return {1: 2}", OK),
        ({"fn_name": "f", "inputs": [[1]], "outputs": [1]}, "def g(a): return a", WRONG),
        ({"fn_name": "f", "inputs": [[1]], "outputs": [1]}, "print(1)\ndef f(a):\n  print(a)\n  return a", OK),
        ({"fn_name": "f", "inputs": [[3]], "outputs": [[0, 1, 2]]},
         "import numpy\ndef f(a): return numpy.arange(a)", OK),
        ({"inputs": [["1", "2"]], "outputs": [["3"]]}, "print(int(input()) + int(input()))", OK),  # lists of lines
        ({"inputs": [""], "outputs": ["1"]}, "print(1)\nexit(1)", WRONG),
        ({"inputs": ["1"], "outputs": ["1"]}, "if __name__ == '__main__': print(input())", OK),
        ({"inputs": [""], "outputs": ["1"]},
         "import threading\nthread = threading.Thread(target=print, args=(1,))\nthread.start()\nthread.join()", OK),
        ({"inputs": ["é\n"], "outputs": ["é"]}, "print(input())", OK),
        ({"inputs": ["3 " * 300_000], "outputs": ["4 " * 300_000]},
         "print(*[int(n) + 1 for n in input().split()])", OK),
        ({"test": "def check(candidate):\n    assert candidate(2) == (4, {1})\n", "entry_point": "f"},
         "def f(x): return x * 2, {1}", OK),
        ({"test": "def check(candidate):\n    assert candidate(2) == [4]\n", "entry_point": "f"},
         "def f(x): return (4,)", WRONG),
        ({"test": "def check(candidate):\n    assert abs(poly(candidate(2), 0)) < 1e-6\n", "entry_point": "f"},
         "import math\ndef poly(xs, x): return sum(c * math.pow(x, i) for i, c in enumerate(xs))\n"
         "def f(x): return [0, x]", OK),
        ({"test_list": ["assert f(Pair(1, 2)) == 3"], "test_setup_code": ""},
         "class Pair:\n  def __init__(self, a, b): self.a, self.b = a, b\ndef f(p): return p.a + p.b", OK),
        ({"test_list": ["assert depth(root) == 2"], "test_setup_code": "root = Node(1)\nroot.left = Node(2)"},
         "class Node:\n  def __init__(self, v): self.v, self.left = v, None\n"
         "def depth(n): return 1 + depth(n.left) if n else 0", OK),
        ({"test_list": ["assert list(f(3)) == [0, 1, 2]", "assert f(1, scale=1j) == 1j"]},
         "def f(n, scale=None):\n  return n * scale if scale else (i for i in range(n))", OK),
        ({"test_list": ["import math\nassert math.isnan(f(0))", "assert f(1) is True and f(2) is None",
                        "assert f(3) == b'a'"]},
         "def f(x): return [float('nan'), True, None, b'a'][x]", OK),
        ({"test_list": ["try:\n  f(0)\n  raise SystemError\nexcept ValueError as e:\n  assert str(e) == 'no'"]},
         "def f(x): raise ValueError('no')", OK),
        ({"test_list": ["assert np.allclose(f(), [0.1, 0.2])"]},
         "import numpy as np\ndef f(): return np.array([0.1, 0.2])", OK),
        (["assert f() == 1", "assert f() == 2"],
         "calls = 0\ndef f():\n  global calls\n  calls += 1\n  return calls", OK),
        ("assert f(2) == 3\nassert f(3) == 4", "def f(x): return x + 1", OK),
        ("assert f(2) == 3\nassert f(3) == 5", "def f(x): return x + 1", WRONG),
        ("assert f(2) == 3", "def g(x): return x + 1", WRONG),
    ],
)  # fmt: skip
def test_forms_of_labels(label, program, kind):
    (verdict,) = judge(label if isinstance(label, str) else json.dumps(label), fenced(program))
    assert verdict.kind is kind, verdict.detail


@needs_sandbox
@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("while True: pass", "no end within 2 s"),
        ("import time\ntime.sleep(60)", "no end within 2 s"),
        ("x = bytearray(2**29)", "MemoryError"),
        ("import ctypes\nctypes.string_at(0)", "status -11"),
        ("def f(): f()\nf()", "RecursionError"),
    ],
)
def test_a_program_beyond_its_limits_is_wrong_and_not_a_failure(program, says):
    label = json.dumps({"inputs": ["", ""], "outputs": ["1", "1"]})
    limits = {"timeout_s": 2 if "no end" in says else 120, "worker": WorkerOptions(memory_gb=0.25)}
    (verdict,) = judge(label, fenced(program), **limits)
    assert (verdict.kind, verdict.reward) == (WRONG, 0.0) and says in verdict.detail


def test_failure_of_the_sandbox_is_a_crash_of_one_line():
    (verdict,) = judge(SUM, fenced(RIGHT), sandbox=Script(error=SandboxError("no\nroom")))
    assert (verdict.kind, verdict.detail) == (CRASH, "the sandbox failed: no room")


@needs_sandbox
def test_a_cancelled_call_leaves_no_process_and_no_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    before = descendants()

    async def cancel():
        prompt = make_prompt(label=SUM)
        reward = CodeReward(Bubblewrap(), CallOptions(timeout_s=60, num_workers=2))
        rollouts = [make_rollout(prompt, fenced("while True: pass"), index=index) for index in range(4)]
        task = asyncio.create_task(reward.score(prompt, rollouts))
        # bwrap, the judge and the program, twice
        assert await asyncio.to_thread(eventually, lambda: len(descendants() - before) >= 6)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await reward.close()

    asyncio.run(cancel())
    assert eventually(lambda: descendants() <= before) and os.listdir(tmp_path) == []


@needs_sandbox
def test_programs_end_with_the_process_that_started_them():
    program = """
import asyncio, os
from rlhf_rollout.rewards.code.sandbox import Bubblewrap
job = {"form": "stdin", "program": "while True: pass", "name": "", "inputs": [""]}
job |= {"timeout_s": 100.0, "memory_bytes": 2**28, "output_bytes": 100}
async def main():
    task = asyncio.create_task(Bubblewrap().run(job))
    await asyncio.sleep(600)
asyncio.run(main())
"""
    before = descendants()
    process = subprocess.Popen([sys.executable, "-c", program])
    assert eventually(lambda: len(descendants() - before) >= 4)
    started = descendants() - before
    process.kill()
    process.wait()
    assert eventually(lambda: not any(map(is_running, started)))


def test_build_reward_passes_the_options_on(monkeypatch):
    script = Script({"output": "3", "why": ""}, {"output": "x", "why": ""}, {"output": "30", "why": ""})
    monkeypatch.setattr("rlhf_rollout.rewards.mix.open_sandbox", {"http://box": script}.__getitem__)
    options = {"code_sandbox": "http://box", "code_partial": True, "timeout_s": 7.0, "num_workers": 2}
    reward = build_reward(parse_sources("code"), CallOptions(**options, worker=WorkerOptions(memory_gb=0.5)))
    prompt = make_prompt(label=SUM)
    verdicts = asyncio.run(reward.score(prompt, [make_rollout(prompt, fenced(RIGHT), index=i) for i in range(5)]))
    assert [verdict.reward for verdict in verdicts] == [pytest.approx(2 / 3)] * 5
    assert (script.jobs[0]["timeout_s"], script.jobs[0]["memory_bytes"], script.most) == (7.0, 2**29, 2)


@needs_sandbox
def test_check_runs_a_program_and_reads_labels():
    (source,) = parse_sources("code")
    prompts = [make_prompt(label=SUM), make_prompt("x", label="[]")]
    assert check_reward(source, prompts[:1]) is None
    assert check_reward(source, prompts) == "the label of prompt p-x has no tests: the list of assertions is empty"


def test_without_isolation_the_run_is_refused_before_it_starts(monkeypatch):
    (source,) = parse_sources("code")
    monkeypatch.setattr(sandbox_module.shutil, "which", lambda name: None)
    monkeypatch.setattr(sandbox_module, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"no program `bwrap`\n\nhint: install bubblewrap 0\.8 or later"):
        check_reward(source)
    with pytest.raises(ConfigError, match="no program `bwrap`"):
        build_reward([source])


def test_a_bwrap_that_may_not_make_namespaces_is_refused_with_its_words(tmp_path, monkeypatch):
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho 'bwrap: Creating new namespace failed' >&2; exit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(ConfigError, match="does not work: bwrap: Creating new namespace failed"):
        check_sandbox(None)


@needs_sandbox
def test_a_machine_without_the_filter_of_calls_is_refused(monkeypatch):
    # As on a processor whose system calls the judge does not know.
    judge = sandbox_module._JUDGE.replace('"x86_64":', '"z80":').replace('"aarch64":', '"z81":')
    monkeypatch.setattr(sandbox_module, "_JUDGE", judge)
    with pytest.raises(ConfigError, match=r"cannot run a program: .*KeyError.*\n\nhint: install bubblewrap"):
        Bubblewrap()
