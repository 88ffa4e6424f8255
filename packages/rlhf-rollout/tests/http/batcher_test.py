"""Batches from concurrent callers: full ones, late ones, failing ones, and callers that give up."""

import asyncio
import time

import pytest

from rlhf_data.errors import RewardError
from rlhf_rollout.http.batcher import Batcher


class Doubler:
    """Doubles the items of a batch after `seconds`; remembers the batches."""

    def __init__(self, *, seconds=0.0):
        self.seconds = seconds
        self.batches = []
        self.num_cancelled = self.running = self.most_running = 0

    async def __call__(self, items):
        self.batches.append(items)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self.running -= 1
        return [2 * item for item in items]


async def submit_all(batcher, items):
    return await asyncio.gather(*[batcher.submit(item) for item in items], return_exceptions=True)


def test_batcher_full_batches_go_out_at_once_and_the_rest_after_its_wait(monkeypatch):
    monkeypatch.setattr("rlhf_rollout.http.batcher.MAX_WAIT_S", 0.1)
    call = Doubler()

    async def run():
        batcher = Batcher(call, max_batch=3)
        started = time.monotonic()
        results = await submit_all(batcher, range(7))
        return results, time.monotonic() - started

    results, seconds = asyncio.run(run())
    assert results == [0, 2, 4, 6, 8, 10, 12]
    assert call.batches == [[0, 1, 2], [3, 4, 5], [6]]
    assert seconds > 0.09


def test_batcher_full_batch_does_not_wait(monkeypatch):
    monkeypatch.setattr("rlhf_rollout.http.batcher.MAX_WAIT_S", 1000.0)

    async def run():
        await submit_all(Batcher(Doubler(), max_batch=2), [1, 2])

    asyncio.run(asyncio.wait_for(run(), 60))


class Gate:
    """Answers the batches of a `Batcher` one at a time, each when the test says so."""

    def __init__(self):
        self.batches = []
        self.answers = []

    async def __call__(self, items):
        self.batches.append(items)
        self.answers.append(asyncio.get_running_loop().create_future())
        if await self.answers[-1] == "fail":
            raise ZeroDivisionError
        return items


@pytest.mark.parametrize("answer", ["return", "fail"])
def test_batcher_items_that_come_while_enough_batches_run_go_out_together(answer):
    call = Gate()

    async def run():
        batcher = Batcher(call, max_batch=3, max_running=1)
        tasks = []
        for item in range(5):
            tasks.append(asyncio.create_task(batcher.submit(item)))
            while not call.batches:
                await asyncio.sleep(0.001)
        for number, sizes in enumerate([[1], [1, 3], [1, 3, 1]]):
            while len(call.batches) <= number:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.02)
            assert [len(batch) for batch in call.batches] == sizes
            call.answers[number].set_result(answer)
        return await asyncio.gather(*tasks, return_exceptions=True)

    results = asyncio.run(asyncio.wait_for(run(), 60))
    assert results == list(range(5)) if answer == "return" else {type(one) for one in results} == {ZeroDivisionError}


def test_batcher_nothing_goes_out_after_its_end():
    call = Gate()

    async def run():
        batcher = Batcher(call, max_batch=1, max_running=1)
        tasks = [asyncio.create_task(batcher.submit(item)) for item in range(3)]
        await asyncio.sleep(0.01)
        await batcher.close()
        return await asyncio.gather(*tasks, return_exceptions=True)

    assert [type(result) for result in asyncio.run(run())] == [asyncio.CancelledError] * 3
    assert call.batches == [[0]]


@pytest.mark.parametrize("results", [[], [1], [1, 2, 3]])
def test_batcher_other_number_of_results_is_an_error(results):
    async def call(items):
        return results

    errors = asyncio.run(submit_all(Batcher(call, max_batch=2), range(2)))
    assert [(type(error), str(error)) for error in errors] == [
        (RewardError, f"{len(results)} results for a batch of 2")
    ] * 2


@pytest.mark.parametrize(
    ("max_batch", "wait_s", "batches"),
    [(10, 0, [[2]]), (2, 0.01, [[1, 2]])],
    ids=["is left out", "on the way takes no one along"],
)
def test_batcher_caller_that_gives_up(max_batch, wait_s, batches):
    call = Doubler(seconds=0.05)

    async def run():
        batcher = Batcher(call, max_batch=max_batch)
        leaving = asyncio.create_task(batcher.submit(1))
        staying = asyncio.create_task(batcher.submit(2))
        await asyncio.sleep(wait_s)
        leaving.cancel()
        return await staying

    assert asyncio.run(run()) == 4
    assert call.batches == batches


def test_batcher_outlives_an_event_loop():
    call = Doubler()
    batcher = Batcher(call, max_batch=10)

    async def abandon():
        asyncio.create_task(batcher.submit(1))  # noqa: RUF006 (abandoned on purpose)
        await asyncio.sleep(0)

    asyncio.run(abandon())
    assert asyncio.run(submit_all(batcher, [2])) == [4]
    assert call.batches == [[2]]
