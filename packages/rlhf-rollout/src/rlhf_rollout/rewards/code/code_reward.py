"""Rewards for programs: the tests of the label are run in a sandbox.

The label of a prompt holds the tests, in one of these forms; all but the last are JSON:

    {"inputs": [text, ...], "outputs": [text, ...]}                      standard input and output (APPS, TACO)
    {"fn_name": name, "inputs": [arguments, ...], "outputs": [...]}      calls (APPS, LiveCodeBench)
    {"test": code that defines check, "entry_point": name}               assertions (HumanEval)
    {"test_list": [code, ...], "test_setup_code": code}                  assertions (MBPP)
    [code, ...]                                                          assertions
    code                                                                 assertions, as one test

Outputs are compared here, outside the sandbox. Assertions run inside, in another process than the program.
"""

import asyncio
import json
import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from rlhf_data.records import Prompt, Rollout, Verdict, VerdictKind
from rlhf_rollout.rewards.code.sandbox import Job, Sandbox, SandboxError, check_sandbox
from rlhf_rollout.rewards.sources import DEFAULT_CALLS, CallOptions
from rlhf_rollout.workers.user_code import one_line

_FENCE = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
_NO_PROGRAM = ("SyntaxError", "IndentationError", "TabError")
_DEFAULT_MEMORY_GB = 1.0
_MIN_OUTPUT_BYTES = 2**16
_MAX_PROGRAM = 2**20  # characters


@dataclass(frozen=True, slots=True)
class Tests:
    """The tests of a label.

    Attributes:
        form: "stdin", "call" or "assertions".
        name: the function to call.
        inputs: one per test: standard input, the arguments of a call in JSON, or the code of a test.
        outputs: one per test: the expected text or value; empty for assertions.
    """

    form: str
    inputs: tuple[str, ...]
    outputs: tuple[Any, ...] = ()
    name: str = ""

    def job(self) -> Job:
        """Return what the sandbox gets of the tests: everything but the expected outputs."""
        key = "tests" if self.form == "assertions" else "inputs"
        expected = max((len(str(output)) for output in self.outputs), default=0)
        limits = {"output_bytes": _MIN_OUTPUT_BYTES + 4 * expected}
        return {"form": self.form, "name": self.name, key: self.inputs, **limits}


class CodeReward:
    """A `RewardFunction` that runs programs against the tests of the label.

    The verdict is `ok` if all tests pass, `unparsable` if the response has no program, and otherwise `wrong`, also for
    a program that exceeds a limit. It is `crash` when the sandbox failed or the label has no tests. The extra number
    `passed` is the share of tests that passed. May be used from several event loops.

    Args:
        sandbox: runs the programs.
        calls: how they are run. `num_workers` programs run at the same time per event loop, each with
            `worker.memory_gb` of memory, by default 1 GiB.
    """

    def __init__(self, sandbox: Sandbox, calls: CallOptions = DEFAULT_CALLS) -> None:
        memory_gb = calls.worker.memory_gb or _DEFAULT_MEMORY_GB
        self._sandbox = sandbox
        self._limits = {"timeout_s": calls.timeout_s, "memory_bytes": int(memory_gb * 2**30)}
        self._num_workers = calls.num_workers
        self._partial = calls.code_partial
        self._slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    async def score(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Verdict]:
        """Return one verdict per rollout, in order. A cancelled call ends its programs."""
        try:
            tests = parse_tests(prompt.label or "")
        except ValueError as error:
            return [Verdict(VerdictKind.CRASH, detail=one_line(f"the label has no tests: {error}"))] * len(rollouts)
        slots = self._slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._num_workers))
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._judge(rollout.text, tests, slots)) for rollout in rollouts]
        return [task.result() for task in tasks]

    async def close(self) -> None:
        """Do nothing: programs end with the calls of `score`."""

    async def _judge(self, response: str, tests: Tests, slots: asyncio.Semaphore) -> Verdict:
        started = time.monotonic()
        program = extract_program(response)
        if not program.strip():
            return self._verdict(VerdictKind.UNPARSABLE, 0.0, "the response has no program", started)
        if len(program) > _MAX_PROGRAM:
            return self._verdict(VerdictKind.WRONG, 0.0, f"the program has {len(program)} characters", started)
        async with slots:
            try:
                results = await self._sandbox.run({**tests.job(), **self._limits, "program": program})
            except SandboxError as error:
                detail = one_line(f"the sandbox failed: {error}")
                return Verdict(VerdictKind.CRASH, detail=detail, seconds=time.monotonic() - started)
        problems = [_problem(tests, number, results) for number in range(len(tests.inputs))]
        failed = [f"test {number}: {problem}" for number, problem in enumerate(problems, 1) if problem]
        if not failed:
            return self._verdict(VerdictKind.OK, 1.0, "", started)
        passed = 1 - len(failed) / len(problems)
        # A response without a code block may be prose.
        is_prose = "```" not in response and problems[0].startswith(_NO_PROGRAM)
        kind = VerdictKind.UNPARSABLE if is_prose else VerdictKind.WRONG
        return self._verdict(kind, passed, f"{len(failed)} of {len(problems)} tests failed; {failed[0]}", started)

    def _verdict(self, kind: VerdictKind, passed: float, detail: str, started: float) -> Verdict:
        reward = passed if self._partial else float(kind is VerdictKind.OK)
        seconds = time.monotonic() - started
        return Verdict(kind, reward, detail=one_line(detail), extra={"passed": passed}, seconds=seconds)


def extract_program(response: str) -> str:
    """Return the content of the last fenced code block, whose end may be missing; without one, the whole response."""
    blocks = _FENCE.findall(response)
    return blocks[-1] if blocks else response


def parse_tests(label: str) -> Tests:
    """Return the tests of a label: see the top of this file. Raises ValueError unless it has at least one."""
    try:
        data = json.loads(label)
    except (ValueError, RecursionError):
        data = label
    if isinstance(data, str):
        data = [data]
    if isinstance(data, list):
        data = {"test_list": data}
    if not isinstance(data, dict):
        raise ValueError(f"it is {label[:80]!r}")
    if "test_list" in data or "test" in data:
        return _assertions(data)
    inputs, outputs = data.get("inputs"), data.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not inputs or len(inputs) != len(outputs):
        raise ValueError("`inputs` and `outputs` must be lists of the same length, at least 1")
    name = data.get("fn_name")
    if not name:
        return Tests("stdin", tuple(map(_text, inputs)), tuple(map(_text, outputs)))
    calls = []
    expected = []
    for arguments, output in zip(inputs, outputs, strict=True):
        if isinstance(arguments, str):  # one argument per line, as in LiveCodeBench
            arguments = [json.loads(line) for line in arguments.split("\n") if line.strip()]
            output = json.loads(output) if isinstance(output, str) else output
        calls.append(json.dumps(arguments))
        expected.append(output)
    return Tests("call", tuple(calls), tuple(expected), str(name))


def check_code(prompts: Sequence[Prompt], sandbox_url: str | None) -> str | None:
    """Run a program in the sandbox, and read the labels of `prompts`.

    Returns why a label has no tests; None when all have some. Raises ConfigError when there is no working sandbox.
    """
    check_sandbox(sandbox_url)
    for prompt in prompts:
        try:
            parse_tests(prompt.label or "")
        except ValueError as error:
            return one_line(f"the label of prompt {prompt.prompt_id} has no tests: {error}")
    return None


def same_text(output: str, expected: str) -> bool:
    """Return whether two outputs agree: line by line without white space at the ends, decimals within 1e-9."""
    lines, expected_lines = (text.rstrip().splitlines() for text in (output, expected))
    if len(lines) != len(expected_lines):
        return False
    pairs = zip(lines, expected_lines, strict=True)
    return all(line.strip() == wanted.strip() or _same_words(line.split(), wanted.split()) for line, wanted in pairs)


def _text(value: Any) -> str:
    """Return a text that some data sets give as a list of lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _same_words(words: Sequence[str], expected: Sequence[str]) -> bool:
    return len(words) == len(expected) and all(map(_same_word, words, expected))


def _same_word(word: str, expected: str) -> bool:
    if word == expected or "." not in expected:
        return word == expected
    try:
        return math.isclose(float(word), float(expected), rel_tol=1e-9, abs_tol=1e-9)
    except ValueError:
        return False


def _assertions(data: dict[str, Any]) -> Tests:
    if "test" in data:
        bodies = [f"{data['test']}\ncheck({data.get('entry_point')})"]
    else:
        setup = data.get("test_setup_code") or "\n".join(data.get("test_imports") or [])
        bodies = [f"{setup}\n{body}" for body in data["test_list"] if isinstance(body, str) and body.strip()]
    if not bodies:
        raise ValueError("the list of assertions is empty")
    return Tests("assertions", tuple(bodies))


def _problem(tests: Tests, number: int, results: Sequence[dict[str, Any]]) -> str:
    """Return why a test failed; empty if it passed."""
    if number >= len(results):
        return "it did not end in time, or ended the judge"
    result = results[number]
    if tests.form == "assertions":
        return "" if result.get("passed") is True else str(result.get("why") or "failed")
    if result.get("why"):
        return str(result["why"])
    output, expected = str(result.get("output")), tests.outputs[number]
    same = (same_text if tests.form == "stdin" else _same_value)(output, expected)
    return "" if same else f"got {output[:200]!r}, expected {str(expected)[:200]!r}"


def _same_value(output: str, expected: Any) -> bool:
    """Return whether a value in JSON is the expected one, which some data sets wrap in a list."""
    try:
        value = json.loads(output)
        return value == expected or (isinstance(expected, list) and [value] == expected)
    except (ValueError, RecursionError):
        return False
