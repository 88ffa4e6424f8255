"""Engines that die, hang and lose their weights, and what requests notice of it. By a simulated clock."""

import asyncio

import pytest

from rlhf_data.errors import EngineError
from rlhf_rollout.supervisor import EngineState
from simulated import simulated
from supervised_fleet import Fleet

NOT_CHECKED = {"interval_s": 1e6}  # only requests notice what happens


async def version_of(fleet):
    """Return the version of the weights that answer a request."""
    return (await fleet.ask(3))[0].policy_version


def told(fleet):
    """Return the numbers of the engines that each transfer went to, and how often each engine was restarted."""
    return [numbers for *_, numbers in fleet.sent], [engine.num_restarts for engine in fleet.engines]


@simulated
async def test_engines_get_requests_only_with_the_current_weights():
    fleet = Fleet()
    assert fleet.states == ["syncing", "syncing"]
    async with fleet:
        assert [await version_of(fleet), await version_of(fleet)] == [1, 1]
    assert (told(fleet), fleet.states, fleet.said) == (([[0, 1]], [0, 0]), ["ready", "ready"], [])


@simulated
async def test_killed_engine_is_restarted_and_synchronized_before_the_waiting_request_reaches_it():
    fleet = Fleet(1, **NOT_CHECKED)
    async with fleet:
        fleet.engines[0].kill()
        # The request that noticed the death was answered with the current weights, not with those of a fresh process.
        assert await version_of(fleet) == 1
    assert told(fleet) == ([[0], [0]], [1])
    assert fleet.said == [
        "engine 0 failed: the process is gone\nit is restarted (1 of 3)",
        "engine 0 is back, with weights of version 1",
    ]


@simulated
async def test_return_of_an_engine_is_said_once_however_many_updates_follow_before_its_next_request():
    fleet = Fleet(1)
    async with fleet:
        fleet.engines[0].kill()
        await asyncio.sleep(60)
        await fleet.synchronize()
        await fleet.synchronize()
    assert fleet.said[1:] == ["engine 0 is back, with weights of version 1"]


@simulated
async def test_requests_go_to_the_other_engine_while_one_is_restarted():
    fleet = Fleet(**NOT_CHECKED)
    async with fleet:
        fleet.engines[0].kill()
        assert [await version_of(fleet) for _ in range(6)] == [1] * 6
        await asyncio.sleep(60)
        assert fleet.states == ["ready", "ready"]
    assert told(fleet) == ([[0, 1], [0]], [1, 0])


@simulated
async def test_engine_that_dies_or_hangs_while_it_is_idle_is_noticed_by_the_periodic_check():
    fleet = Fleet()
    async with fleet:
        fleet.engines[0].kill()
        fleet.engines[1].hanging = {"health", "generate"}
        await asyncio.sleep(200)
        assert fleet.states == ["ready", "ready"] and await version_of(fleet) == 1
    assert told(fleet)[1] == [1, 1]
    assert any("engine 1 failed: a health check took longer" in line for line in fleet.said)


@simulated
async def test_engine_that_misses_one_check_gets_no_requests_until_it_answers_one():
    fleet = Fleet(1)
    states = []
    async with fleet:
        whole = fleet.engines[0].health

        async def late_once():
            states.append(fleet.states)
            if len(states) == 2:
                raise EngineError("a health check took longer than 30 s")
            return await whole()

        fleet.engines[0].health = late_once
        while len(states) < 4:
            await asyncio.sleep(1)
        assert await version_of(fleet) == 1
    assert states[:4] == [["ready"], ["ready"], ["suspect"], ["ready"]]
    assert (told(fleet)[1], fleet.said) == ([0], [])


@simulated
async def test_engine_that_refuses_one_request_and_is_healthy_stays():
    fleet = Fleet(1, **NOT_CHECKED)

    async def refuse(*arguments, **options):
        raise EngineError("the prompt is too long")

    async with fleet:
        whole = fleet.engines[0].generate
        fleet.engines[0].generate = refuse
        with pytest.raises(EngineError, match="too long"):
            await fleet.ask(3)
        fleet.engines[0].generate = whole
        assert await version_of(fleet) == 1
    assert (told(fleet), fleet.said) == (([[0]], [0]), [])


@simulated
async def test_engine_that_came_back_by_itself_gets_the_weights_it_lacks():
    fleet = Fleet(1)
    async with fleet:
        fleet.engines[0].engine.policy_version = 0
        await asyncio.sleep(60)
        assert fleet.states == ["ready"] and await version_of(fleet) == 1
    assert told(fleet) == ([[0], [0]], [0])


@simulated
async def test_death_of_the_only_engine_in_a_sync_is_mended_before_the_sync_ends():
    fleet = Fleet(1)
    asyncio.get_running_loop().call_later(5, fleet.engines[0].kill)
    async with fleet:
        assert await version_of(fleet) == 1
    assert told(fleet) == ([[0], [0]], [1])


@pytest.mark.parametrize("num_bad_starts", [2, 3])
@simulated
async def test_restarts_are_counted_until_a_request_succeeds(num_bad_starts):
    fleet = Fleet(1, **NOT_CHECKED)
    fleet.engines[0].num_bad_starts = num_bad_starts
    async with fleet:
        fleet.engines[0].kill()
        if num_bad_starts == 2:
            assert await version_of(fleet) == 1
            fleet.engines[0].kill()
            assert await version_of(fleet) == 1
            restarts = [line.rpartition("\n")[2] for line in fleet.said if "restarted" in line]
            assert restarts == [f"it is restarted ({number} of 3)" for number in (1, 2, 3, 1)]
            return
        with pytest.raises(EngineError, match="no engine is attached"):
            await fleet.ask(3)
    assert told(fleet)[1] == [3]
    assert str(fleet.supervisor.error) == "no engine is left; engine 0 failed 4 times in a row: no memory"
    assert fleet.said[-1] == "engine 0 failed: no memory\nit is given up after 3 restarts in a row"


@simulated
async def test_restart_that_cannot_be_asked_for_counts_as_a_death():
    fleet = Fleet(1, max_restarts=2)

    def restart():
        raise EngineError("no node has room")

    async with fleet:
        fleet.engines[0].restart = restart
        fleet.engines[0].kill()
        with pytest.raises(EngineError, match="no engine is attached"):
            await fleet.ask(3)
    assert str(fleet.supervisor.error) == "no engine is left; engine 0 failed 3 times in a row: no node has room"


@simulated
async def test_one_engine_given_up_leaves_the_run_to_the_others():
    fleet = Fleet(max_restarts=1)
    fleet.engines[0].num_bad_starts = 9
    async with fleet:
        fleet.engines[0].kill()
        await asyncio.sleep(60)
        assert fleet.states == ["lost", "ready"] and await version_of(fleet) == 1
    assert fleet.supervisor.error is None
    assert fleet.router.engines == [fleet.engines[1]]


@simulated
async def test_synchronize_without_any_engine_left_raises_the_reason():
    fleet = Fleet(1, max_restarts=2)
    fleet.engines[0].num_bad_starts = 9
    fleet.engines[0].kill()
    with pytest.raises(EngineError, match="no engine is left; engine 0 failed 3 times in a row: no memory"):
        await fleet.synchronize()
    assert told(fleet)[1] == [2]


@simulated
async def test_transfer_that_fails_while_requests_wait_fails_the_requests():
    fleet = Fleet(1, **NOT_CHECKED)
    async with fleet:
        fleet.error = RuntimeError("the trainer is gone")
        fleet.engines[0].kill()
        with pytest.raises(EngineError, match="no engine is attached"):
            await fleet.ask(3)
    assert (fleet.supervisor.error, fleet.states) == (fleet.error, ["lost"])


@simulated
async def test_sleep_counts_engines_that_fail_as_dead_and_waits_for_one_that_starts():
    fleet = Fleet(3)
    await fleet.synchronize()
    fleet.engines[1].kill()
    fleet.supervisor._places[2].state = EngineState.STARTING
    await fleet.supervisor.sleep()
    have_dropped = [bool(engine.engine._incomplete) for engine in fleet.engines]
    states = fleet.states
    await fleet.supervisor.wake_up()
    assert (states, have_dropped) == (["ready", "dead", "syncing"], [True, False, True])
    assert not any(engine.engine._asleep for engine in fleet.engines)
    assert fleet.said == ["engine 1 failed: the process is gone\nit is restarted (1 of 3)"]


@simulated
async def test_process_of_an_engine_that_cannot_sleep_ends_and_another_one_starts_with_the_next_requests():
    fleet = Fleet()
    async with fleet:
        await fleet.engines[0].begin_weight_update(9)
        await fleet.supervisor.sleep()
        states = fleet.states
        assert fleet.engines[0]._death.is_set() and fleet.engines[1].engine._asleep
        await fleet.supervisor.wake_up()
        await fleet.synchronize()
        await asyncio.sleep(60)
        assert (states, fleet.states) == (["dead", "ready"], ["ready", "ready"])
    assert told(fleet)[1] == [1, 0]
    assert [engine.engine.policy_version for engine in fleet.engines] == [2, 2]


@simulated
async def test_engines_that_slept_get_the_weights_of_the_same_version_again():
    fleet = Fleet()
    await fleet.supervisor.synchronize(1)
    await fleet.supervisor.sleep()
    version = fleet.supervisor.policy_version
    await fleet.supervisor.wake_up()
    await fleet.supervisor.synchronize(1)
    assert version is None
    assert told(fleet) == ([[0, 1], [0, 1]], [0, 0])
    assert fleet.supervisor.policy_version == 1
