"""Users' code that misbehaves, as a reward function and as an agent: what it costs, and what is left of it."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agent_testing import TOKENIZER, agent_pool, writes
from process_testing import descendants, eventually, is_running
from record_testing import make_prompt, make_rollout
from rlhf_data.errors import EngineError, RewardError
from rlhf_data.records import VerdictKind
from rlhf_rollout.agents.hosted import HostedAgent
from rlhf_rollout.agents.recorder import EpisodeLimits
from rlhf_rollout.protocols import SamplingParams
from rlhf_rollout.rewards.function import FunctionReward
from rlhf_rollout.rewards.sources import CallOptions
from rlhf_rollout.router import EngineRouter
from rlhf_rollout.workers.guarded import WorkerOptions
from rlhf_rollout.workers.rpc import Activity
from rollout_testing import limit_only

OK, CRASH, TIMEOUT = VerdictKind.OK, VerdictKind.CRASH, VerdictKind.TIMEOUT

# The same code is a reward function and an agent. What it does is decided by the label of the prompt.
CODE = """
import asyncio, json, os, re, signal, subprocess, sys, time
FOLDER = os.path.dirname(__file__)
{top}
async def act(label):
    if label != "good":
        {body}
    return 1.0

def reward_func(queries, prompts, labels):
    return {{"rewards": [asyncio.run(act(label)) for label in labels]}}

async def run_episode(session):
    await session.reply()
    return await act(session.label)
"""


class Reward:
    """The code as a reward function, in one process."""

    name = "the reward function"
    late = "no answer within 1 s"

    def __init__(self, path, *, timeout_s=60.0, **options):
        self.function = FunctionReward(path, CallOptions(timeout_s=timeout_s, **options))
        self.pool = self.function._pool
        self.close = self.function.close

    async def verdict(self, label):
        prompt = make_prompt(f"{label}: ", label)
        return (await self.function.score(prompt, [make_rollout(prompt, "a")]))[0]


class Agent:
    """The code as an agent, in one process."""

    name = "the agent"
    late = "the agent took longer than 8 s"

    def __init__(self, path, *, timeout_s=60.0, **options):
        self.pool = agent_pool(path, timeout_s=timeout_s, **options)
        self.agent = HostedAgent(EngineRouter([writes(["a"])]), self.pool, TOKENIZER, EpisodeLimits())
        self.close = self.pool.close

    async def verdict(self, label):
        [episode] = await self.agent.run(make_prompt(f"{label}: ", label), SamplingParams(max_tokens=32), "g")
        return episode.verdict


@pytest.fixture(params=[Reward, Agent], ids=["reward", "agent"])
def user(request):
    return request.param


@pytest.fixture
def code(write):
    """Return a function that writes code and returns its path; `body` is what it does for a label other than "good"."""
    return lambda body="", top="": write(CODE.format(top=top, body=body or "pass"), "guest.py")


@contextlib.asynccontextmanager
async def running(user, path, **options):
    """Yield a user of the code, of which no process is left in the end, not even as a zombie."""
    before = descendants()
    used = user(path, **options)
    try:
        yield used
    finally:
        await used.close()
    assert descendants() <= before


def verdicts(user, path, labels, **options):
    """Return the verdicts of calls at the same time, and how many processes were replaced."""

    async def run():
        async with running(user, path, **options) as used:
            return await asyncio.gather(*map(used.verdict, labels)), used.pool.num_replaced

    return asyncio.run(run())


FAILS = """
def fail(label):
    match label:
        case "raise": raise KeyError("no\\nsuch key")
        case "exit": sys.exit("bye")
        case "memory": bytearray(2**30)
        case "text": return "high"
        case "nan": return float("nan")
"""


def test_code_that_fails_costs_its_own_call_alone(user, code):
    details = {
        "good": "",
        "raise": r"KeyError: 'no\nsuch key' (guest.py:7)",
        "exit": "SystemExit: bye (guest.py:8)",
        "memory": "MemoryError: (guest.py:9)",
        "text": "must hold numbers, got a value of type str" if user is Reward else "must be one number, got 'high'",
        "nan": "the reward is nan",
    }
    path = code("return fail(label)", FAILS)
    found, num_replaced = verdicts(user, path, [*details, "good"], worker=WorkerOptions(memory_gb=0.75))
    assert [verdict.kind for verdict in found] == [OK, *[CRASH] * 5, OK]
    for verdict, detail in zip(found, details.values(), strict=False):
        assert detail in verdict.detail
    assert num_replaced == 0


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        ("os._exit(3)", " exited with status 3"),
        ("os._exit(0)", " exited with status 0"),
        ("os.kill(os.getpid(), 11)", " was ended by SIGSEGV"),
        ("os.kill(os.getppid(), 9); time.sleep(1000)", " was ended by SIGKILL"),
        ("os.write(int(sys.argv[1]), b'[1]\\n'); time.sleep(1000)", "something other than an answer came from the "),
    ],
)
def test_code_that_ends_its_process_or_the_connection_fails_alone(user, code, body, detail):
    found, num_replaced = verdicts(user, code(body), ["good", "bad", "good", "good"])
    assert [verdict.kind for verdict in found] == [OK, CRASH, OK, OK]
    assert detail in found[1].detail
    assert num_replaced >= 2


def test_child_of_code_that_kills_its_guard_ends_with_the_code(code, tmp_path):
    start = "open(FOLDER + '/pids', 'a').write(str(subprocess.Popen(['sleep', '1000']).pid) + ' ')"
    verdicts(Reward, code(f"{start}; os.kill(os.getppid(), 9)"), ["bad"])
    process_ids = (tmp_path / "pids").read_text().split()
    assert process_ids and eventually(lambda: not any(map(is_running, process_ids)))


@pytest.mark.parametrize(
    "body",
    [
        "await asyncio.sleep(1000)",
        "time.sleep(1000)",
        "re.match('(a+)+$', 'a' * 60 + 'b')",  # holds the interpreter's lock: no thread of the process can run
        "os.kill(os.getpid(), signal.SIGSTOP)",
    ],
)
def test_code_that_hangs_is_late_alone(user, code, body, monkeypatch):
    if user is Reward:
        limit_only(monkeypatch, lambda queries: any(query.startswith("bad") for query in queries))
    monkeypatch.setattr("rlhf_rollout.workers.rpc._PING_TIMEOUT_S", 1.0)
    timeout_s = 1.0 if user is Reward else 8.0  # the good ones must not be late on a busy machine
    started = time.monotonic()
    found, _ = verdicts(user, code(body), ["good", "bad", "good", "good"], timeout_s=timeout_s)
    assert [verdict.kind for verdict in found] == [OK, TIMEOUT, OK, OK]
    assert found[1].detail == user.late
    assert time.monotonic() - started < 200


NOISE = """
sys.stderr.write("importing ")
def disturb(label):
    match label:
        case "fork": os.fork()
        case "print": os.write(1, b'{"call": 1}\\n'); subprocess.run(["echo", "from a child"])
        case "close": sys.stdout.close()
"""


def test_code_that_forks_or_prints_disturbs_no_answer(user, code):
    found, num_replaced = verdicts(user, code("disturb(label)", NOISE), ["good", "fork", "print", "close", "good"])
    assert ([verdict.kind for verdict in found], num_replaced) == ([OK] * 5, 0)


def test_answers_belong_to_their_calls_when_the_code_forks_or_an_answer_comes_twice(user, code):
    forged = (
        'os.write(int(sys.argv[1]), b"".join(json.dumps({"call": n, "result": {}}).encode() + b"\\n" for n in OLD))'
    )
    path = code(f"os.fork(); {forged.replace('OLD', 'range(int(label))')}; return float(label)", "")

    async def run():
        async with running(user, path) as used:
            return [(await used.verdict(label)).score for label in ("1", "2", "3")]

    assert asyncio.run(run()) == [1.0, 2.0, 3.0]


SPAWNS = """
def spawn():
    plain = subprocess.Popen(["sleep", "1000"])
    session = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    daemon = "import os, time; os.fork() and os._exit(0); os.setsid(); print(os.getpid(), flush=True)"
    daemon += "; os.close(1); time.sleep(1000)"
    lost = subprocess.run([sys.executable, "-c", daemon], stdout=subprocess.PIPE, text=True).stdout
    open(FOLDER + "/new", "w").write(f"{os.getpid()} {plain.pid} {session.pid} {lost.strip()}")
    os.rename(FOLDER + "/new", FOLDER + "/pids")
    time.sleep(1000)
"""


def test_what_hanging_code_has_started_ends_with_the_close_that_does_not_wait_for_it(user, code, tmp_path, monkeypatch):
    path = code("spawn()", SPAWNS)
    # An agent may close what it has open; a reward function has nothing to close.
    monkeypatch.setattr("rlhf_rollout.workers.rpc._CLOSE_TIMEOUT_S", 1000.0 if user is Reward else 1.0)

    async def run():
        async with running(user, path, timeout_s=500.0) as used:
            pending = asyncio.create_task(used.verdict("bad"))
            while not (tmp_path / "pids").exists():
                await asyncio.sleep(0.02)
            started = time.monotonic()
            await used.close()
            seconds = time.monotonic() - started
            await asyncio.gather(pending, return_exceptions=True)
            with pytest.raises(RewardError, match="have been shut down"):
                await used.verdict("good")
            return seconds

    assert asyncio.run(run()) < 60
    process_ids = (tmp_path / "pids").read_text().split()
    assert len(process_ids) == 4
    assert not any(map(is_running, process_ids))


def test_what_hanging_code_has_started_ends_when_the_program_is_killed(user, code, write, tmp_path):
    program = write(
        f"""
        import asyncio, sys
        sys.path[:] = {[*sys.path, str(Path(__file__).parent)]!r}
        from workers_test import {user.__name__}
        asyncio.run({user.__name__}({code("spawn()", SPAWNS)!r}, timeout_s=500.0).verdict("bad"))
        """,
        "program.py",
    )
    process = subprocess.Popen([sys.executable, program])
    assert eventually((tmp_path / "pids").exists)
    process.kill()
    process.wait()
    assert eventually(lambda: not any(map(is_running, (tmp_path / "pids").read_text().split())))


@pytest.mark.parametrize(
    ("top", "says"),
    [
        ("import nonexistent_module", "ModuleNotFoundError: No module named 'nonexistent_module' (guest.py:4)"),
        ("raise SystemExit('no')", "SystemExit: no (guest.py:4)"),
        ("os._exit(4)", "exited with status 4"),
        ("os.environ['HF_TOKEN']", "KeyError: 'HF_TOKEN' (guest.py:4)"),
        ("time.sleep(1000)", "took longer than 0.5 s"),
        ("os.write(int(sys.argv[1]), b'[1]\\n')", "something other than an answer came from the "),
    ],
)
def test_code_that_cannot_be_imported_is_an_error_and_leaves_nothing_open(user, code, top, says):
    options = WorkerOptions(start_timeout_s=0.5 if "longer" in says else 60.0)

    async def run():
        async with running(user, code(top=top), worker=options) as used:
            with pytest.raises(RewardError) as caught:
                await used.verdict("good")
            return str(caught.value)

    before = sorted(os.listdir("/proc/self/fd"))
    message = asyncio.run(run())
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert f"{user.name} from " in message and says in message
    assert ("those that ``WorkerOptions.env`` names" in message) is ("longer" not in says)


def test_slow_import_is_told(user, code, caplog, monkeypatch):
    monkeypatch.setattr("rlhf_rollout.workers.rpc._NOTICE_S", 0.2)
    path = code(top="time.sleep(1.5)")
    assert verdicts(user, path, ["good"])[0][0].kind is OK
    assert f"importing {path} takes longer than 0.2 s; the limit is 120 s" in caplog.text


def test_close_does_not_wait_for_a_process_that_is_starting(user, code, tmp_path):
    path = code(top="open(FOLDER + '/importing', 'w'); time.sleep(1000)")

    async def run():
        async with running(user, path, worker=WorkerOptions(start_timeout_s=500.0)) as used:
            pending = asyncio.create_task(used.verdict("good"))
            while not (tmp_path / "importing").exists():
                await asyncio.sleep(0.02)
            started = time.monotonic()
            await used.close()
            with pytest.raises(RewardError, match="have been shut down"):
                await pending
            return time.monotonic() - started

    assert asyncio.run(run()) < 60


def test_process_that_is_killed_between_two_calls_is_replaced_and_charges_no_one(user, code):
    path = code("return float(os.getpid())")

    async def run():
        async with running(user, path) as used:
            first = await used.verdict("bad")
            os.kill(int(first.reward), signal.SIGKILL)
            while used.pool._slots[0].process.alive:
                await asyncio.sleep(0.02)
            second = await used.verdict("bad")
            return first.reward, second.reward, used.pool.num_replaced

    first, second, num_replaced = asyncio.run(run())
    assert first != second and num_replaced == 1


def test_process_that_starts_no_more_is_an_error_after_three_tries(user, code, tmp_path):
    starts = (
        "open(FOLDER + '/starts', 'a').write('x')\nif os.path.getsize(FOLDER + '/starts') > 1: raise OSError('full')"
    )
    path = code("os._exit(1)", starts)

    async def run():
        async with running(user, path) as used:
            assert (await used.verdict("bad")).kind is CRASH
            with pytest.raises(RewardError, match="OSError: full"):
                await used.verdict("good")
            assert descendants() <= before  # also while the pool may be used

    before = descendants()
    asyncio.run(run())
    assert (tmp_path / "starts").read_text() == "x" * 4  # the one that started, then three that did not


@pytest.mark.parametrize(
    ("error", "counts_anew"), [(None, True), (EngineError("down"), True), (ValueError(), False), (TypeError(), False)]
)
def test_time_of_the_code_counts_anew_after_an_answer_and_not_after_a_refusal(error, counts_anew):
    activity = Activity()
    activity.since = 0.0
    with pytest.raises(type(error)) if error else contextlib.nullcontext(), activity.waiting():
        assert activity.num_waiting == 1
        if error is not None:
            raise error
    assert (activity.since > 0.0, activity.num_waiting) == (counts_anew, 0)
