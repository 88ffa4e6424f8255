"""The processes of agents: what is left of one that does not start, or whose episode is cancelled."""

import asyncio
import threading
import time
from collections import Counter

import pytest

from agent_testing import Hosted, agent_pool, run, texts_of, writes
from process_testing import eventually
from record_testing import make_prompt
from rlhf_data.errors import RewardError
from rlhf_data.records import VerdictKind
from rlhf_rollout.engines.fake import FakeEngine
from rlhf_rollout.workers.guarded import WorkerOptions
from rlhf_rollout.workers.rpc import WorkerProcess

TIMEOUT_S = 60.0

# It can be imported once the file `may_start` exists.
SLOW = """
import os, time
open("FOLDER/starting", "w")
while not os.path.exists("FOLDER/may_start"):
    time.sleep(0.01)

async def run_episode(session):
    await session.reply()
    return 1.0
"""


@pytest.fixture
def slow(write, tmp_path):
    return write(SLOW.replace("FOLDER", str(tmp_path)))


async def until(is_true):
    assert await asyncio.to_thread(eventually, is_true)


async def cancelled(task):
    task.cancel()
    await asyncio.wait([task])


@pytest.mark.parametrize("is_first", [True, False])
async def test_episode_that_is_cancelled_while_its_process_starts_leaves_none_that_is_half_started(
    slow, tmp_path, is_first
):
    async with Hosted(slow, writes(["a"]), timeout_s=TIMEOUT_S) as hosted:
        if not is_first:
            (tmp_path / "may_start").touch()
            await hosted.episode()
            hosted.pool._slots[0].process.kill()
            for name in ("may_start", "starting"):
                (tmp_path / name).unlink()
        first = asyncio.create_task(hosted.episode())
        await until((tmp_path / "starting").exists)
        await asyncio.wait_for(cancelled(first), TIMEOUT_S)
        (tmp_path / "may_start").touch()
        episode = await asyncio.wait_for(hosted.episode(), TIMEOUT_S)
    assert episode.verdict.reward == 1.0
    assert texts_of(episode.rollouts[0])[-1][1] == "a<eos>"


async def test_process_that_starts_too_slowly_leaves_no_descriptor_in_the_event_loop(slow):
    """asyncio would not hear of data for the next socket with the same number."""
    watched = asyncio.get_running_loop()._selector.get_map()
    num_watched = len(watched)
    pool = agent_pool(slow, worker=WorkerOptions(start_timeout_s=0.5))
    with pytest.raises(RewardError, match=r"took longer than 0.5 s"):
        await pool.start()
    await pool.close()
    assert len(watched) == num_watched


async def test_late_request_of_an_episode_that_was_given_up_disturbs_no_other(write):
    source = write("""
        async def run_episode(session):
            try:
                await session.reply("a")
                return 1.0
            finally:
                await session.reply("late")
    """)
    engine = FakeEngine(latency_s=1000.0)
    async with Hosted(source, engine, timeout_s=TIMEOUT_S) as hosted:
        first = asyncio.create_task(hosted.episode())
        async with asyncio.timeout(TIMEOUT_S):
            while not (await engine.health()).num_in_flight:
                await asyncio.sleep(0.01)
        await cancelled(first)
        hosted.agent.router.detach(engine)
        hosted.agent.router.attach(writes(["b"]))
        episode = await asyncio.wait_for(hosted.episode(), TIMEOUT_S)
    assert (episode.verdict.reward, hosted.pool.num_replaced) == (1.0, 0)


async def test_episode_that_comes_while_a_blocked_process_is_killed_has_another_one(write, monkeypatch):
    source = write("""
        import time
        async def run_episode(session):
            await session.reply()
            if session.label == "block":
                time.sleep(1000)
            return 1.0
    """)
    monkeypatch.setattr("rlhf_rollout.workers.rpc._PING_TIMEOUT_S", 0.5)
    kill, ending, may_kill = WorkerProcess.kill, WorkerProcess.ending, threading.Event()

    def kill_late(process):
        assert may_kill.wait(TIMEOUT_S)
        kill(process)

    def end_late(process):  # after the episode at fault
        time.sleep(0.5)
        return ending(process)

    async with Hosted(source, writes(["a"]), timeout_s=12.0) as hosted:
        await hosted.agent.start()
        monkeypatch.setattr(WorkerProcess, "kill", kill_late)
        monkeypatch.setattr(WorkerProcess, "ending", end_late)
        first = asyncio.create_task(hosted.episode("block"))
        try:
            await until(lambda: hosted.pool._slots[0].process._failure)
            second = asyncio.create_task(hosted.episode("good"))
            await asyncio.sleep(0.2)
        finally:
            may_kill.set()
        assert [(await task).verdict.kind for task in (first, second)] == [VerdictKind.TIMEOUT, VerdictKind.OK]


async def test_cancelled_episode_ends_its_requests_to_the_policy(write):
    source = write("""
        import asyncio
        async def run_episode(session):
            await asyncio.gather(session.reply("a"), session.reply("b"))
    """)
    async with Hosted(source, FakeEngine(latency_s=1000.0)) as hosted:
        task = asyncio.create_task(hosted.episode())
        await until(lambda: "2 completions in flight" in hosted.agent.router.describe())
        await cancelled(task)
        await until(lambda: "0 completions in flight" in hosted.agent.router.describe())


KILLER = """
import asyncio, os

async def run_episode(session):
    with open(LOG, "a") as file:
        file.write(f"{os.getpid()} {session.prompt}\\n")
    await session.reply()
    await asyncio.sleep(0.2 if session.label == "kill" else 0.6)
    if session.label == "kill":
        os._exit(3)
    return 1.0
"""


@pytest.mark.parametrize(
    ("labels", "sizes", "num_dead"),
    [
        (["4", "4", "kill", *"44444"], [8, 4, 4, 2, 2, 1, 1], 4),  # that of the pool, and three extra ones
        (["kill", "4", "kill", "kill"], [4, 2, 2, 1, 1, 1, 1], 6),
    ],
)
def test_episodes_of_a_process_that_dies_run_again_in_halves_until_those_at_fault_are_alone(
    write, tmp_path, labels, sizes, num_dead
):
    log = tmp_path / "log"
    prompts = [make_prompt(f"p{number}", label) for number, label in enumerate(labels)]
    source = write(KILLER.replace("LOG", repr(str(log))))
    episodes, num_replaced = run(source, writes(["a"]), prompts=prompts, timeout_s=TIMEOUT_S)
    kinds = [VerdictKind.CRASH if label == "kill" else VerdictKind.OK for label in labels]
    assert [episode.verdict.kind for episode in episodes] == kinds
    runs = Counter(line.split()[0] for line in log.read_text().splitlines())  # by process
    assert sorted(runs.values(), reverse=True) == sizes
    assert num_replaced == num_dead


def test_extra_processes_are_as_many_as_others_at_most(write, tmp_path, monkeypatch):
    alive = set()
    most = []
    start, shut_down = WorkerProcess.start, WorkerProcess.shut_down

    async def counted_start(process):
        alive.add(process)
        most.append(len(alive))
        await start(process)

    async def counted_end(process):
        await shut_down(process)
        alive.discard(process)

    monkeypatch.setattr(WorkerProcess, "start", counted_start)
    monkeypatch.setattr(WorkerProcess, "shut_down", counted_end)
    source = write(KILLER.replace("LOG", repr(str(tmp_path / "log"))))
    prompts = [make_prompt(f"p{number}", "kill") for number in range(8)]
    episodes, _ = run(source, writes(["a"]), prompts=prompts, timeout_s=TIMEOUT_S)
    assert all(episode.verdict.kind is VerdictKind.CRASH for episode in episodes)
    assert max(most) == 3  # the pool's own and two extra ones
    assert not alive


HANGS = """
import asyncio, os, time

class Environment:
    def reset(self, prompt, label):
        self.label = label
        return ""

    async def wait(self):
        while not os.path.exists(FILE):
            await asyncio.sleep(0.05)
        return "", 1.0, True, {"score": float(os.getpid())}

    def step(self, action):
        if self.label == "hang":
            time.sleep(1000)
        return self.wait() if self.label == "wait" else ("", 1.0, True, {"score": float(os.getpid())})

    def close(self):
        if self.label == "hang in close":
            time.sleep(1000)
"""


async def test_functions_that_hang_are_counted(write, tmp_path):
    """The steps by their episodes' end, the `close` by its own limit."""
    async with Hosted(write(HANGS), writes(["a"]), timeout_s=2.0) as hosted:
        labels = ["hang", "hang", "hang in close", "4"]
        episodes = await asyncio.gather(*map(hosted.episode, labels))
        await until(lambda: hosted.pool._slots[0].process.num_hanging == 3)
    failed = [episode.verdict.kind.failed for episode in episodes]
    assert failed[:2] == [True, True] and not failed[3]
    assert hosted.pool.num_replaced == 0


async def test_process_in_which_many_functions_hang_gets_no_more_episodes_and_ends_after_those_that_it_has(
    write, tmp_path
):
    may_end = tmp_path / "may_end"
    source = write(HANGS.replace("FILE", repr(str(may_end))))
    async with Hosted(source, writes(["a"]), timeout_s=TIMEOUT_S) as hosted:

        async def score(label):
            return (await hosted.episode(label)).verdict.score

        await hosted.pool.start()
        old = hosted.pool._slots[0].process
        old.num_hanging = 15
        first = await score("4")
        waiting = asyncio.create_task(score("wait"))
        await until(lambda: old._running)
        old.num_hanging = 16
        second = await score("4")
        third = await score("4")
        assert old.alive and not waiting.done()
        may_end.touch()
        assert first == await waiting != second == third
        await until(lambda: not old.alive)
    assert hosted.pool.num_replaced == 1
