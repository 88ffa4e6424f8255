"""How long a request may take when its engine is paused meanwhile: by a simulated clock, so to the millisecond."""

import asyncio

import pytest

from rlhf_data.errors import EngineError
from rlhf_rollout.engines.requests import Hold, deadline, time_limit
from simulated import now, simulate


async def last(limit_s, pauses, lasts_s=10_000.0):
    """Return how and when a limit ends a context that begins at 0; `pauses` are (start, end), seconds."""
    hold = Hold()

    async def pause():
        for start, end in pauses:
            await asyncio.sleep(start - now())
            hold.start()
            await asyncio.sleep(end - now())
            hold.stop()

    pausing = asyncio.create_task(pause())
    await asyncio.sleep(0)
    try:
        async with deadline(limit_s, "it", hold=hold):
            await asyncio.sleep(lasts_s)
    except EngineError as error:
        return str(error).partition("\n")[0], now()
    finally:
        pausing.cancel()
    return "done", now()


@pytest.mark.parametrize(
    ("pauses", "end"),
    [
        ([], 10),
        ([(2, 5)], 13),
        ([(2, 5), (6, 16)], 23),
        ([(0, 100)], 110),
        ([(9, 200)], 201),
        ([(10.5, 20)], 10),  # too late
        ([(9, 12), (11.5, 100)], 101),
    ],
)
def test_time_in_pauses_does_not_count(pauses, end):
    message, found = simulate(last(10.0, pauses))
    assert message == "it took longer than 10 s"
    assert found == pytest.approx(end, abs=0.2)


def test_pauses_before_it_do_not_put_it_off():
    async def scenario():
        hold = Hold()
        hold.start()
        await asyncio.sleep(50)
        hold.stop()
        with pytest.raises(TimeoutError):
            async with time_limit(3.0, hold):
                await asyncio.sleep(100)
        return now()

    assert simulate(scenario()) == pytest.approx(53)


def test_context_that_is_done_in_time_leaves_no_timer():
    assert simulate(last(10.0, [(3, 900)], lasts_s=800.0)) == ("done", 800.0)

    async def scenario():
        async with time_limit(10.0):
            await asyncio.sleep(1)
        async with time_limit(None):
            await asyncio.sleep(1000)
        return [handle for handle in asyncio.get_running_loop()._scheduled if not handle.cancelled()]

    assert simulate(scenario()) == []


def test_hold_counts_each_pause_once():
    async def scenario():
        hold = Hold()
        found = [hold.seconds()]
        for call in (hold.start, hold.start, hold.stop, hold.stop, hold.start):
            call()
            await asyncio.sleep(2)
            found.append(hold.seconds())
        return found

    assert simulate(scenario()) == [0, 2, 4, 4, 4, 6]


def test_limit_that_ends_just_after_the_start_of_a_pause_looks_rarely():
    async def scenario():
        hold = Hold()
        loop = asyncio.get_running_loop()
        num_looks = 0
        seconds = hold.seconds

        def look():
            nonlocal num_looks
            num_looks += 1
            return seconds()

        hold.seconds = look
        loop.call_later(9.999999, hold.start)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(100), time_limit(10.0, hold):
                await asyncio.sleep(1000)
        return num_looks

    assert simulate(scenario()) < 1000


def test_timeout_from_within_passes_through():
    async def scenario():
        async with deadline(10.0, "it"):
            raise TimeoutError("another")

    with pytest.raises(TimeoutError, match="another"):
        simulate(scenario())
