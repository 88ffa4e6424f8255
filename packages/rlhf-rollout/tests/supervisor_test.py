"""Engines that die, hang and lose their weights, and what requests notice of it."""

import asyncio
import dataclasses

import numpy as np
import pytest

from rlhf_data.errors import EngineError
from rlhf_data.records import FinishReason
from rlhf_rollout.protocols import Completion, EngineHealth, SamplingParams
from rlhf_rollout.router import EngineRouter
from rlhf_rollout.supervisor import EngineState, EngineSupervisor

PROMPT = np.array([4, 5], np.int32)
TIMEOUT_S = 60.0


class Engine:
    """An engine in another process, as a test wants it.

    Attributes:
        alive: otherwise every call fails.
        hangs: health checks miss their deadline, and requests never end.
        num_bad_starts: restarts that fail.
    """

    def __init__(self, num_bad_starts=0):
        self.alive, self.hangs = True, False
        self.num_bad_starts = num_bad_starts
        self.updating = False
        self.version = 0
        self.num_ready = 0
        self.log = []

    def _check(self):
        if not self.alive:
            raise EngineError("the process is gone")

    async def generate(self, token_ids, sampling, *, timeout_s=None, drafts=None):
        self._check()
        self.log.append("generate")
        if self.hangs:
            await asyncio.sleep(0.05)
            raise EngineError("a request took longer than 0.05 s")
        return [Completion.single([7], [-0.5], FinishReason.STOP, self.version)]

    async def health(self):
        self._check()
        if self.hangs:
            raise EngineError("a health check took longer than 30 s")
        return EngineHealth(policy_version=self.version, num_in_flight=0, is_paused=False, is_asleep=False)

    def kill(self):
        self.log.append("kill")
        self.alive = False

    def restart(self):
        self.log.append("restart")
        self.alive, self.hangs, self.version = True, False, 0

    async def ready(self):
        await asyncio.sleep(0.01)
        self.num_ready += 1
        if self.num_bad_starts:
            self.num_bad_starts -= 1
            self.alive = False
            raise EngineError("no memory")

    async def sleep(self, keep_weights=True):
        self._check()
        assert not keep_weights
        if self.updating:
            raise EngineError("the engine cannot sleep during a weight update")
        self.log.append("sleep")

    async def wake_up(self):
        self._check()
        self.log.append("wake_up")


class Fleet:
    """Engines with a router, a supervisor, and a trainer that has version 5."""

    def __init__(self, *engines, **options):
        self.engines = engines
        self.router = EngineRouter()
        self.said = []
        self.sent = []
        self.dying = set()  # numbers of engines that die when they are sent weights
        self.error = None
        options.setdefault("interval_s", 0.01)
        self.supervisor = EngineSupervisor(engines, self.router, self.send, self.said.append, **options)

    async def send(self, engines):
        self.sent.append(sorted(engines))
        if self.error is not None:
            raise self.error
        failures = {}
        for number, engine in engines.items():
            if number in self.dying:
                self.dying.remove(number)
                engine.alive = False
                failures[number] = "died in the middle of a bucket"
            else:
                engine.version = 5
        return failures

    def run(self, *steps):
        """Give the engines their first weights, and run coroutine functions beside `watch`."""

        async def scenario():
            await self.supervisor.synchronize(5)
            watching = asyncio.create_task(self.supervisor.watch())
            results = [await step() for step in steps]
            watching.cancel()
            await asyncio.wait([watching])
            return results

        return asyncio.run(asyncio.wait_for(scenario(), TIMEOUT_S))

    async def ask(self):
        [completion] = await self.router.generate(PROMPT, SamplingParams())
        return completion.policy_version

    def until(self, condition):
        async def wait():
            while not condition():
                await asyncio.sleep(0.005)

        return wait

    def kill(self, number):
        async def kill():
            self.engines[number].alive = False

        return kill

    @property
    def states(self):
        return [str(state) for state in self.supervisor.states]


def test_engines_get_requests_only_with_the_current_weights():
    fleet = Fleet(Engine(), Engine())
    assert fleet.states == ["syncing", "syncing"]
    assert fleet.run(fleet.ask, fleet.ask) == [5, 5]
    assert (fleet.sent, fleet.states, fleet.said) == ([[0, 1]], ["ready", "ready"], [])


def test_killed_engine_is_restarted_and_synchronized_before_the_waiting_request_reaches_it():
    fleet = Fleet(Engine(), interval_s=1000)
    _, version = fleet.run(fleet.kill(0), fleet.ask)
    # The request that noticed the death was answered with the current weights, not with those of a fresh process.
    assert version == 5
    assert fleet.sent == [[0], [0]]
    assert fleet.engines[0].log == ["restart", "generate"]
    assert fleet.said == [
        "engine 0 failed: the process is gone\nit is restarted (1 of 3)",
        "engine 0 is back, with weights of version 5",
    ]


def test_return_of_an_engine_is_said_once_however_many_updates_follow_before_its_next_request():
    fleet = Fleet(Engine(), interval_s=0.01)
    is_back = fleet.until(lambda: len(fleet.said) == 2)
    fleet.run(fleet.kill(0), is_back, lambda: fleet.supervisor.synchronize(5), lambda: fleet.supervisor.synchronize(5))
    assert fleet.said[1:] == ["engine 0 is back, with weights of version 5"]


def test_requests_go_to_the_other_engine_while_one_is_restarted():
    fleet = Fleet(Engine(), Engine(), interval_s=1000)
    versions = fleet.run(fleet.kill(0), *[fleet.ask] * 6, fleet.until(lambda: fleet.states == ["ready", "ready"]))
    assert versions[1:-1] == [5] * 6
    assert "restart" in fleet.engines[0].log and "restart" not in fleet.engines[1].log
    assert fleet.sent == [[0, 1], [0]]


def test_idle_engine_that_dies_is_noticed_by_the_periodic_check():
    fleet = Fleet(Engine())
    fleet.run(fleet.kill(0), fleet.until(lambda: fleet.said and "back" in fleet.said[-1]))
    assert fleet.engines[0].log == ["restart"]


def test_hung_engine_is_restarted():
    fleet = Fleet(Engine(), interval_s=1000)

    async def hang():
        fleet.engines[0].hangs = True

    _, version = fleet.run(hang, fleet.ask)
    assert version == 5
    assert fleet.engines[0].log == ["generate", "restart", "generate"]
    assert "health check took longer" in fleet.said[0]


def test_engine_that_misses_one_check_gets_no_requests_until_it_answers_one():
    fleet = Fleet(Engine(), interval_s=0.01)
    states = []
    whole = fleet.engines[0].health

    async def late_once():
        states.append(fleet.states)
        if len(states) == 2:
            raise EngineError("a health check took longer than 30 s")
        return await whole()

    async def miss():
        fleet.engines[0].health = late_once

    fleet.run(miss, fleet.until(lambda: len(states) == 4), fleet.ask)
    assert states == [["ready"], ["ready"], ["suspect"], ["ready"]]
    assert (fleet.engines[0].log, fleet.said) == (["generate"], [])


def test_engine_that_refuses_one_request_and_is_healthy_stays():
    fleet = Fleet(Engine(), interval_s=1000)
    whole = fleet.engines[0].generate

    async def refuse(*arguments, **options):
        raise EngineError("the prompt is too long")

    async def break_requests():
        fleet.engines[0].generate = refuse

    async def mend():
        with pytest.raises(EngineError, match="too long"):
            await fleet.ask()
        fleet.engines[0].generate = whole

    assert fleet.run(break_requests, mend, fleet.ask)[-1] == 5
    assert (fleet.engines[0].log, fleet.said, fleet.sent) == (["generate"], [], [[0]])


def test_engine_that_came_back_by_itself_gets_the_weights_it_lacks():
    fleet = Fleet(Engine())

    async def lose_weights():
        fleet.engines[0].version = 0

    fleet.run(lose_weights, fleet.until(lambda: len(fleet.sent) == 2 and fleet.states == ["ready"]))
    assert (fleet.engines[0].version, fleet.engines[0].log) == (5, [])


def test_death_in_the_middle_of_a_sync_leaves_the_other_engine_in_use():
    fleet = Fleet(Engine(), Engine())
    fleet.dying = {1}
    assert fleet.run(fleet.ask, fleet.until(lambda: fleet.states == ["ready", "ready"]))[0] == 5
    assert fleet.sent == [[0, 1], [1]]
    assert fleet.said[0] == "engine 1 failed: died in the middle of a bucket\nit is restarted (1 of 3)"


def test_death_of_the_only_engine_in_a_sync_is_mended_before_the_sync_ends():
    fleet = Fleet(Engine())
    fleet.dying = {0}
    assert fleet.run(fleet.ask) == [5]
    assert (fleet.sent, fleet.engines[0].log) == ([[0], [0]], ["restart", "generate"])


@pytest.mark.parametrize("num_bad_starts", [2, 3])
def test_restarts_are_counted_until_a_request_succeeds(num_bad_starts):
    fleet = Fleet(Engine(num_bad_starts), interval_s=1000)
    if num_bad_starts == 2:
        assert fleet.run(fleet.kill(0), fleet.ask, fleet.kill(0), fleet.ask)[1::2] == [5, 5]
        assert [line.rpartition("\n")[2] for line in fleet.said if "restarted" in line] == [
            "it is restarted (1 of 3)", "it is restarted (2 of 3)", "it is restarted (3 of 3)",
            "it is restarted (1 of 3)",
        ]  # fmt: skip
        return
    with pytest.raises(EngineError, match="no engine is attached"):
        fleet.run(fleet.kill(0), fleet.ask)
    assert fleet.engines[0].log.count("restart") == 3
    assert str(fleet.supervisor.error) == "no engine is left; engine 0 failed 4 times in a row: no memory"
    assert fleet.said[-1] == "engine 0 failed: no memory\nit is given up after 3 restarts in a row"


def test_restart_that_cannot_be_asked_for_counts_as_a_death():
    fleet = Fleet(Engine(), max_restarts=2)

    def restart():
        raise EngineError("no node has room")

    async def break_restart():
        fleet.engines[0].restart = restart

    with pytest.raises(EngineError, match="no engine is attached"):
        fleet.run(break_restart, fleet.kill(0), fleet.ask)
    assert str(fleet.supervisor.error) == "no engine is left; engine 0 failed 3 times in a row: no node has room"


def test_one_engine_given_up_leaves_the_run_to_the_others():
    fleet = Fleet(Engine(num_bad_starts=9), Engine(), max_restarts=1)
    fleet.run(fleet.kill(0), fleet.until(lambda: fleet.states == ["lost", "ready"]), fleet.ask)
    assert fleet.supervisor.error is None
    assert fleet.router.engines == [fleet.engines[1]]


def test_synchronize_without_any_engine_left_raises_the_reason():
    fleet = Fleet(Engine(num_bad_starts=9), max_restarts=2)
    fleet.dying = {0}
    with pytest.raises(EngineError, match="no engine is left; engine 0 failed 3 times in a row: no memory"):
        fleet.run()
    assert fleet.engines[0].log == ["restart"] * 2


def test_transfer_that_fails_while_requests_wait_fails_the_requests():
    fleet = Fleet(Engine(), interval_s=1000)

    async def lose_trainer():
        fleet.error = RuntimeError("the trainer is gone")
        fleet.engines[0].alive = False

    with pytest.raises(EngineError, match="no engine is attached"):
        fleet.run(lose_trainer, fleet.ask)
    assert fleet.supervisor.error is fleet.error
    assert fleet.states == ["lost"]


async def test_sleep_counts_engines_that_fail_as_dead_and_waits_for_one_that_starts():
    fleet = Fleet(Engine(), Engine(), Engine())

    await fleet.supervisor.synchronize(5)
    fleet.engines[1].alive = False
    fleet.supervisor._places[2].state = EngineState.STARTING
    await fleet.supervisor.sleep()
    states = fleet.states
    await fleet.supervisor.wake_up()
    assert states == ["ready", "dead", "syncing"]
    assert [engine.log for engine in fleet.engines] == [["sleep", "wake_up"], ["kill"], ["sleep", "wake_up"]]
    assert [engine.num_ready for engine in fleet.engines] == [0, 0, 1]
    assert fleet.said == ["engine 1 failed: the process is gone\nit is restarted (1 of 3)"]


def test_process_of_an_engine_that_cannot_sleep_ends_and_another_one_starts_with_the_next_requests():
    fleet = Fleet(Engine(), Engine())

    async def scenario():
        await fleet.supervisor.synchronize(5)
        fleet.engines[0].updating = True
        await fleet.supervisor.sleep()
        alive = [engine.alive for engine in fleet.engines]
        states = fleet.states
        await fleet.supervisor.wake_up()
        await fleet.supervisor.synchronize(5)
        watching = asyncio.create_task(fleet.supervisor.watch())
        while fleet.states != ["ready", "ready"]:
            await asyncio.sleep(0.005)
        watching.cancel()
        return alive, states

    assert asyncio.run(asyncio.wait_for(scenario(), TIMEOUT_S)) == ([False, True], ["dead", "ready"])
    assert [engine.log for engine in fleet.engines] == [["kill", "restart"], ["sleep", "wake_up"]]
    assert fleet.engines[0].version == 5


async def test_engines_that_slept_get_the_weights_of_the_same_version_again():
    fleet = Fleet(Engine(), Engine())

    await fleet.supervisor.synchronize(5)
    await fleet.supervisor.sleep()
    version = fleet.supervisor.policy_version
    await fleet.supervisor.wake_up()
    for engine in fleet.engines:
        engine.version = 0
    await fleet.supervisor.synchronize(5)
    assert version is None
    assert [engine.version for engine in fleet.engines] == [5, 5]
    assert fleet.supervisor.policy_version == 5


def test_sampling_of_a_request_does_not_change_when_it_is_sent_again():
    fleet = Fleet(Engine(), interval_s=1000)
    asked = []
    whole = fleet.engines[0].generate

    async def note(token_ids, sampling, **options):
        asked.append((token_ids.tolist(), sampling))
        return await whole(token_ids, sampling, **options)

    fleet.engines[0].generate = note
    sampling = SamplingParams(seed=3)

    async def ask():
        return await fleet.router.generate(PROMPT, dataclasses.replace(sampling))

    fleet.run(fleet.kill(0), ask)
    assert asked == [(PROMPT.tolist(), sampling)] * 2
