"""Weight updates beside requests in flight: what becomes of them, also when an engine dies or hangs in the update."""

import asyncio
import random
from collections import Counter

import numpy as np
import pytest

from rlhf_data.errors import EngineError, WeightSyncError
from simulated import now, simulated
from supervised_fleet import REQUEST_TIMEOUT_S, TOKENS, Fleet


def spans(task):
    """The versions and lengths of a request's samples, which are alike."""
    first, second = ([(span.policy_version, len(span.token_ids)) for span in sample.spans] for sample in task.result())
    assert first == second
    return first


@pytest.mark.parametrize("mode", ["drain", "keep", "restart"])
@simulated
async def test_requests_in_flight_are_drained_kept_or_restarted(mode):
    fleet = Fleet(at_update=mode)

    async with fleet:
        begun = now()
        running = [fleet.ask(30), fleet.ask(40)]
        await asyncio.sleep(20.5)
        updating = asyncio.create_task(fleet.synchronize())
        await asyncio.sleep(1)
        late = fleet.ask(5)
        await updating
        updated = now() - begun
        await asyncio.gather(*running, late)
        running = [spans(task) for task in running]
        late = spans(late)
        ended = now() - begun
    # The send takes 10 s, in which kept requests write at most the token at hand.
    assert (updated, ended, running) == {
        "drain": (50.0, 55.0, [[(1, 30)], [(1, 40)]]),
        "keep": (30.5, 49.5, [[(1, 20), (2, 10)], [(1, 20), (2, 20)]]),
        "restart": (30.5, 49.5, [[(1, 20), (2, 10)], [(1, 20), (2, 20)]]),
    }[mode]
    assert late == [(2, 5)]
    outcome = {"drain": "drained", "keep": "kept", "restart": "restarted"}[mode]
    assert fleet.supervisor.updates == {outcome: 4}
    assert (fleet.router.num_retries, fleet.said, fleet.states) == (0, [], ["ready", "ready"])


@simulated
async def test_engines_without_requests_are_not_paused():
    fleet = Fleet(at_update="keep")
    for engine in fleet.engines:
        engine.hanging = {"pause", "resume"}

    async with fleet:
        await fleet.synchronize()
        assert [engine.engine.policy_version for engine in fleet.engines] == [2, 2]
    assert not fleet.supervisor.updates


@pytest.mark.parametrize("mode", ["drain", "keep"])
@simulated
async def test_requests_that_come_in_an_update_wait_longer_than_their_deadline_and_go_everywhere(mode):
    fleet = Fleet(send_s=300.0, at_update=mode)

    async with fleet:
        old = fleet.ask(60)
        await asyncio.sleep(1)
        updating = asyncio.create_task(fleet.synchronize())
        await asyncio.sleep(1)
        new = [fleet.ask(4) for _ in range(8)]
        await updating
        await asyncio.sleep(1)
        loads = [fleet.router.num_in_flight(engine) for engine in fleet.engines]
        await asyncio.gather(old, *new)
        new = [spans(task) for task in new]
    assert new == [[(2, 4)]] * 8
    # Two samples each; no engine was given requests before the others could take some.
    assert sum(loads) == 16 + 2 * (mode == "keep") and abs(loads[0] - loads[1]) <= 2
    assert (fleet.router.num_retries, fleet.said) == (0, [])


@pytest.mark.parametrize("mode", ["drain", "keep", "restart"])
@simulated
async def test_engine_that_dies_in_an_update_has_its_requests_answered_elsewhere(mode):
    fleet = Fleet(at_update=mode)

    async with fleet:
        running = [fleet.ask(30), fleet.ask(30)]
        await asyncio.sleep(10.5)
        updating = asyncio.create_task(fleet.synchronize())
        await asyncio.sleep(5)
        fleet.engines[1].kill()
        await updating
        await asyncio.gather(*running)
        await asyncio.sleep(60)
        found = [spans(task) for task in running]
    assert found[0] == {"drain": [(1, 30)], "keep": [(1, 10), (2, 20)], "restart": [(1, 10), (2, 20)]}[mode]
    # One that drains goes on writing until it dies. Another engine goes on behind what there is.
    assert found[1] == ([(1, 15), (2, 15)] if mode == "drain" else [(1, 10), (2, 20)])
    assert fleet.supervisor.updates == {
        "drain": {"drained": 2, "cut": 2}, "keep": {"kept": 2, "cut": 2}, "restart": {"restarted": 2, "cut": 2}
    }[mode]  # fmt: skip
    assert (fleet.router.num_retries, fleet.states, fleet.engines[1].num_restarts) == (1, ["ready", "ready"], 1)
    assert fleet.said[-1] == "engine 1 is back, with weights of version 2"


@simulated
async def test_engine_that_dies_in_an_update_is_restarted_at_its_end_and_not_at_the_next_check():
    fleet = Fleet(send_s=1.0)

    async with fleet:
        await asyncio.sleep(0.5)
        updating = asyncio.create_task(fleet.synchronize())
        await asyncio.sleep(0.5)
        fleet.engines[1].kill()
        await updating
        await asyncio.sleep(6.5)  # it starts in 5 s, and has its weights after 1
        assert fleet.states == ["ready", "ready"]


@pytest.mark.parametrize(("method", "mode"), [("resume", "keep"), ("pause", "keep"), ("resume", "drain")])
@simulated
async def test_engine_that_never_answers_pause_or_resume_is_restarted(method, mode):
    fleet = Fleet(at_update=mode)

    async with fleet:
        running = [fleet.ask(20), fleet.ask(20)]
        await asyncio.sleep(10.5)
        fleet.engines[1].hanging = {method, "health"} if method == "pause" else {method}
        begun = now()
        await fleet.synchronize()
        lasted = now() - begun
        await asyncio.gather(*running)
        await asyncio.sleep(60)
        found = [spans(task) for task in running]
    if mode == "keep":  # an engine that does not hear of the pause goes on until it is restarted
        assert found == [[(1, 10), (2, 10)], [(1, 10), (2, 10)] if method == "resume" else [(1, 20)]]
    # The send takes 10 s, `resume` may take three intervals of 10 s, and three missed checks 90 s.
    assert lasted <= (10 + 30 + 10 if method == "resume" else 10 + 10 + 90)
    assert (fleet.states, [engine.num_restarts for engine in fleet.engines]) == (["ready", "ready"], [0, 1])
    assert any("`resume` took longer than 30 s" in line for line in fleet.said) == (method == "resume")


@simulated
async def test_engine_that_hangs_while_it_drains_is_noticed_before_its_requests_are_late():
    fleet = Fleet()

    async with fleet:
        running = [fleet.ask(20), fleet.ask(60)]
        await asyncio.sleep(1)
        fleet.engines[1].engine._writing.close()  # it writes no more
        fleet.engines[1].hanging = {"health"}
        begun = now()
        await fleet.synchronize()
        lasted = now() - begun
        await asyncio.gather(*running)
        answer = spans(running[1])
    assert answer == [(2, 60)]
    assert lasted < REQUEST_TIMEOUT_S
    assert fleet.engines[1].num_restarts == 1


@simulated
async def test_healthy_engine_may_drain_for_longer_than_many_health_checks():
    fleet = Fleet(interval_s=1.0)

    async with fleet:
        running = fleet.ask(60)
        await asyncio.sleep(1)
        await fleet.synchronize()
        assert spans(running) == [(1, 60)]
    assert fleet.said == []


@pytest.mark.parametrize("mode", ["drain", "keep", "restart"])
@simulated
async def test_update_that_fails_as_a_whole_leaves_no_engine_paused_and_no_request_waiting(mode):
    fleet = Fleet(at_update=mode)

    async with fleet:
        running = [fleet.ask(20), fleet.ask(20)]
        await asyncio.sleep(1)
        fleet.error = WeightSyncError("a weight has another shape")
        updating = asyncio.create_task(fleet.synchronize())
        await asyncio.sleep(1)
        waiting = fleet.ask(5)
        with pytest.raises(WeightSyncError, match="another shape"):
            await updating
        with pytest.raises(EngineError, match="no engine is attached"):
            await waiting
        outcomes = await asyncio.gather(*running, return_exceptions=True)
        assert not any(engine.engine._paused for engine in fleet.engines)
        ended = now()
        failures = [str(outcome) for outcome in outcomes if isinstance(outcome, Exception)]
    # The update has begun and never ends, so kept requests end at their deadline, and have nowhere else to go.
    assert ended <= REQUEST_TIMEOUT_S + 30
    assert len(failures) == (0 if mode == "drain" else 2) and all("no engine is attached" in text for text in failures)
    assert fleet.supervisor.error is fleet.error


@simulated
async def test_reason_why_the_run_cannot_go_on_is_not_covered_by_what_follows_from_it():
    fleet = Fleet(interval_s=15.0)

    async with fleet:
        await asyncio.sleep(14)
        fleet.engines[1].hanging = {"health"}
        fleet.engines[0].kill()
        await asyncio.sleep(5)  # one engine starts again, the other is being examined
        fleet.error = WeightSyncError("a weight has another shape")
        await asyncio.sleep(300)
        assert fleet.engines[1].num_restarts == 0
    assert (fleet.supervisor.error, fleet.states) == (fleet.error, ["lost", "lost"])


@simulated
async def test_update_that_is_cancelled_resumes_the_engines():
    fleet = Fleet(at_update="keep")

    async with fleet:
        running = [fleet.ask(20), fleet.ask(20)]
        await asyncio.sleep(1)
        fleet.engines[1].hanging = {"pause"}
        updating = asyncio.create_task(fleet.synchronize())
        await asyncio.sleep(5)
        updating.cancel()
        await asyncio.wait([updating])
        assert not [task for task in asyncio.all_tasks() if "MortalEngine.pause" in repr(task)]
        assert not fleet.engines[0].engine._paused
        await asyncio.gather(*running)
        assert [sum(length for _, length in spans(task)) for task in running] == [20, 20]


@simulated
async def test_only_engine_that_dies_paused_and_is_given_up_fails_its_requests():
    fleet = Fleet(1, at_update="keep", max_restarts=0)

    async with fleet:
        running = fleet.ask(20)
        await asyncio.sleep(1)
        fleet.engines[0].hanging = {"finish_weight_update"}
        updating = asyncio.create_task(fleet.synchronize())
        await asyncio.sleep(1)
        fleet.engines[0].kill()
        with pytest.raises(EngineError, match="no engine is left"):
            await updating
        with pytest.raises(EngineError):
            await running
        assert now() < REQUEST_TIMEOUT_S


@pytest.mark.parametrize("mode", ["drain", "keep", "restart"])
@simulated
async def test_an_hour_of_updates_and_deaths_loses_hardly_any_request(mode):
    """Three engines, twelve clients, an update every minute and a death or a hang every four, for an hour."""
    fleet = Fleet(3, at_update=mode, max_restarts=5)
    rng = random.Random(3)
    counts = Counter()

    async def client(until):
        while now() < until:
            num_tokens = rng.randint(1, 60)
            version = fleet.supervisor.policy_version
            try:
                answer = await fleet.router.generate(np.array([num_tokens], np.int32), TOKENS)
            except EngineError as error:  # two engines died before they wrote anything more
                counts["lost" if str(error).count("the process is gone") == 2 else str(error)] += 1
                continue
            for sample in answer:
                versions = [span.policy_version for span in sample.spans]
                assert versions == sorted(versions) and len(sample.token_ids) == num_tokens
                assert versions[0] >= version or versions[0] == version - 1
            counts["answers"] += 1

    async def harm(until):
        while now() < until:
            await asyncio.sleep(rng.expovariate(1 / 240))
            engine = rng.choice(fleet.engines)
            what = rng.choice(["kill", "pause", "resume", "generate"])
            if what == "kill":
                engine.kill()
            else:
                engine.hanging = {what, "health"}
            counts[what] += 1

    async with fleet:
        until = 3600.0
        tasks = [asyncio.create_task(client(until)) for _ in range(12)]
        harming = asyncio.create_task(harm(until))
        while now() < until:
            await asyncio.sleep(60)
            await fleet.synchronize()
        await asyncio.gather(*tasks)
        harming.cancel()
        await asyncio.sleep(600)
        versions = [engine.engine.policy_version for engine in fleet.engines]
    assert versions == [fleet.version] * 3 and fleet.states == ["ready"] * 3
    assert counts.keys() <= {"answers", "lost", "kill", "pause", "resume", "generate"}, counts
    assert counts["answers"] > 500 and counts["lost"] < 0.01 * counts["answers"], counts
    assert min(counts[what] for what in ("kill", "pause", "resume", "generate")) >= 2, counts
    assert all(fleet.router.num_in_flight(engine) == 0 for engine in fleet.engines)
    assert all(not engine.engine._num_sequences for engine in fleet.engines)
    outcome = {"drain": "drained", "keep": "kept", "restart": "restarted"}[mode]
    assert fleet.supervisor.updates[outcome] > 100
