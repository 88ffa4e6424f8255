"""How long a request may take: as long as its engine gets further. By a simulated clock, so to the millisecond."""

import asyncio

import numpy as np
import pytest

from rlhf_data.errors import EngineError
from rlhf_rollout.engines.fake import FakeEngine
from rlhf_rollout.engines.requests import Progress, StalledError, deadline, time_limit
from rlhf_rollout.engines.spec import EngineSpec
from rlhf_rollout.protocols import SamplingParams
from simulated import now, simulate


async def last(limit_s, events, lasts_s=10_000.0):
    """Return how and when a limit ends a context that begins at 0; `events` are seconds and calls of `Progress`."""
    progress = Progress()

    async def act():
        for second, call in events:
            await asyncio.sleep(second - now())
            getattr(progress, call)()

    acting = asyncio.create_task(act())
    await asyncio.sleep(0)
    try:
        async with deadline(limit_s, "it", progress=progress):
            await asyncio.sleep(lasts_s)
    except StalledError as error:
        return str(error).partition("\n")[0], now()
    finally:
        acting.cancel()
    return "done", now()


def paused(start, end):
    return [(start, "pause"), (end, "resume")]


@pytest.mark.parametrize(
    ("events", "last_sign"),
    [
        ([], 0),
        ([(second, "advance") for second in range(1, 500, 9)], 496),
        ([(9.9, "advance")], 9.9),
        (paused(2, 5), 5),
        ([*paused(2, 5), *paused(6, 16)], 16),
        (paused(0, 100), 100),
        ([*paused(9, 200), (203, "advance")], 203),
        ([*paused(2.6, 2.7), (2.8, "advance")], 2.8),  # between two looks
        (paused(10.5, 20), 0),  # too late
    ],
)
def test_limit_passes_when_nothing_has_happened_for_as_long(events, last_sign):
    message, found = simulate(last(10.0, events))
    assert message == "it took longer than 10 s without a new token"
    assert last_sign + 10 <= found < last_sign + 10 + 10 / 8 + 0.01


def test_signs_before_it_do_not_put_it_off():
    async def scenario():
        progress = Progress()
        progress.pause()
        await asyncio.sleep(50)
        progress.resume()
        assert progress.num_signs == 1
        with pytest.raises(TimeoutError):
            async with time_limit(3.0, progress):
                await asyncio.sleep(100)
        return now()

    assert simulate(scenario()) == pytest.approx(53)


def test_deadline_without_progress_is_for_the_whole():
    async def scenario():
        with pytest.raises(EngineError, match=r"^it took longer than 3 s\n") as caught:
            async with deadline(4, "it"), deadline(3, "it", grace_s=0.5):
                await asyncio.sleep(100)
        assert not isinstance(caught.value, StalledError)
        return now()

    assert simulate(scenario()) == pytest.approx(3.5)


def test_context_that_is_done_in_time_leaves_no_timer():
    assert simulate(last(10.0, paused(3, 900), lasts_s=800.0)) == ("done", 800.0)

    async def scenario():
        async with time_limit(10.0):
            await asyncio.sleep(1)
        async with time_limit(None):
            await asyncio.sleep(1000)
        return [handle for handle in asyncio.get_running_loop()._scheduled if not handle.cancelled()]

    assert simulate(scenario()) == []


def test_timeout_from_within_passes_through():
    async def scenario():
        async with deadline(10.0, "it"):
            raise TimeoutError("another")

    with pytest.raises(TimeoutError, match="another"):
        simulate(scenario())


def test_engine_that_goes_on_before_it_has_drained_has_its_limit():
    async def scenario():
        engine = FakeEngine(token_latency_s=lambda prompt, seed: prompt[0])
        writing = asyncio.create_task(engine.generate(np.array([3]), SamplingParams()))
        await asyncio.sleep(1)
        pausing = asyncio.create_task(engine.pause("drain"))
        await asyncio.sleep(1)
        await engine.resume()
        await asyncio.gather(writing, pausing)
        with pytest.raises(StalledError):
            await engine.generate(np.array([200]), SamplingParams(), timeout_s=10.0)

    simulate(scenario())


@pytest.mark.parametrize("call", [lambda engine: engine.pause("drain"), lambda engine: engine.begin_weight_update(1)])
def test_call_that_drains_waits_as_long_as_tokens_are_written(call):
    async def scenario():
        spec = EngineSpec(model="fake", request_timeout_s=8.0, control_timeout_s=2.0)
        engine = FakeEngine(spec, script=lambda *_: [5] * 12, token_latency_s=5.0)
        writing = asyncio.create_task(engine.generate(np.array([3]), SamplingParams(max_tokens=12)))
        await asyncio.sleep(1)
        await call(engine)
        assert writing.done()
        return now()

    assert simulate(scenario()) == pytest.approx(60)


def test_request_waits_while_its_engine_is_paused():
    async def scenario():
        engine = FakeEngine(token_latency_s=1.0)
        await engine.pause("keep")
        writing = asyncio.create_task(engine.generate(np.array([3]), SamplingParams(max_tokens=2), timeout_s=10.0))
        await asyncio.sleep(100)
        await engine.resume()
        await writing
        return now()

    assert simulate(scenario()) == pytest.approx(102)
