"""Joins the items of concurrent callers into batches: by time, or by what is still to come."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from itertools import islice
from typing import Generic, TypeVar

from rlhf_data.errors import RewardError
from rlhf_data.records import Prompt, Rollout, Verdict

Sample = tuple[Prompt, Rollout]

MAX_WAIT_S = 0.005  # that an item waits for others at most

# Turns of the event loop that a waiting group leaves to tasks that are about to expect or submit others.
_TURNS = 8

Item = TypeVar("Item")
Result = TypeVar("Result")


class Batcher(Generic[Item, Result]):
    """Gathers the items of concurrent `submit` calls into batches, in the order of their arrival.

    A batch goes out when it is full, or some time after its first item. While `max_running` batches are in flight,
    items wait for one of them to return, and go out together. Use it from one event loop at a time.

    Args:
        call: takes the items of a batch and returns one result per item, in order.
        max_batch: items per batch at most.
        max_running: batches in flight at most; None for any number.
        max_wait_s: seconds after which a batch goes out that is not full; None for `MAX_WAIT_S`.
    """

    def __init__(
        self,
        call: Callable[[list[Item]], Awaitable[list[Result]]],
        *,
        max_batch: int,
        max_running: int | None = None,
        max_wait_s: float | None = None,
    ) -> None:
        self._call = call
        self._max_batch = max_batch
        self._max_running = max_running
        self._max_wait_s = MAX_WAIT_S if max_wait_s is None else max_wait_s
        self._waiting: dict[asyncio.Future[Result], Item] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._running: set[asyncio.Task[None]] = set()

    async def submit(self, item: Item) -> Result:
        """Return the item's result.

        An exception of the call is raised for every item of its batch. Raises RewardError when the call returns another
        number of results than it got items.
        """
        loop = asyncio.get_running_loop()
        result: asyncio.Future[Result] = loop.create_future()
        self._waiting[result] = item
        self._consider()
        try:
            return await result
        finally:
            self._waiting.pop(result, None)  # still there if the caller was cancelled before the batch went out
            if not self._waiting:
                self._stop_timer()

    def fail(self, error: Exception) -> None:
        """Raise an error for the items that wait for a batch."""
        for result in self._waiting:
            if not result.done():
                result.set_exception(error)

    @property
    def is_idle(self) -> bool:
        """Whether no item waits and no batch but the caller's own is in flight."""
        return not self._waiting and len(self._running) <= 1

    async def close(self) -> None:
        """Cancel waiting items and batches in flight."""
        for result in self._waiting:
            result.cancel()
        self._waiting.clear()
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _consider(self) -> None:
        """Decide, when an item has come, whether a batch goes out."""
        if len(self._waiting) >= self._max_batch:
            self._send_all()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._max_wait_s, self._send_all)

    def _send_all(self) -> None:
        self._stop_timer()
        while self._waiting and (self._max_running is None or len(self._running) < self._max_running):
            self._send(list(islice(self._waiting, self._max_batch)))

    def _send(self, results: Iterable[asyncio.Future[Result]]) -> None:
        batch = {result: self._waiting.pop(result) for result in results}
        task = asyncio.get_running_loop().create_task(self._run(batch))
        self._running.add(task)  # the event loop itself keeps only a weak reference to a task
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if self._max_running is not None:  # items may have waited for this
            self._send_all()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _run(self, batch: dict[asyncio.Future[Result], Item]) -> None:
        try:
            results = await self._call(list(batch.values()))
            if len(results) != len(batch):
                raise RewardError(f"{len(results)} results for a batch of {len(batch)}")
        except asyncio.CancelledError:
            for waiter in batch:
                waiter.cancel()
            raise
        except Exception as error:  # the call may raise anything; each caller decides what that means for its item
            for waiter in batch:
                if not waiter.done():
                    waiter.set_exception(error)
            return
        for waiter, result in zip(batch, results, strict=True):
            if not waiter.done():  # its caller may have given up
                waiter.set_result(result)


def by_group(
    call: Callable[[list[Sample]], Awaitable[list[Verdict]]],
) -> Callable[[list[list[Sample]]], Awaitable[list[list[Verdict]]]]:
    """Return a function that takes groups and gives the verdicts of each; `call` takes the samples of all of them."""

    async def judge(groups: list[list[Sample]]) -> list[list[Verdict]]:
        verdicts = iter(await call([sample for group in groups for sample in group]))
        return [[next(verdicts) for _ in group] for group in groups]

    return judge


class GroupBatcher(Batcher[list[Sample], list[Verdict]]):
    """Gathers groups, the samples of one prompt each, into batches of as many groups as are complete.

    A full batch goes out at once, unless a single sample would be left for the next one: scorers compare what a call
    holds. When no further group is expected, what waits is divided evenly into as few batches as it takes.

    Args:
        call: takes the samples of a batch and returns one verdict per sample, in order.
        max_batch: samples per batch at most. The samples of a group stay together, also if they are more.
    """

    def __init__(self, call: Callable[[list[Sample]], Awaitable[list[Verdict]]], *, max_batch: int) -> None:
        super().__init__(by_group(call), max_batch=max_batch)
        self._expected: set[str] = set()
        self._pause: asyncio.Task[None] | None = None

    def expect(self, group_id: str) -> None:
        """Note that a group is being generated."""
        self._expected.add(group_id)
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None

    def forget(self, group_id: str) -> None:
        """Note that a group has come, or will not come."""
        self._expected.discard(group_id)
        self._consider()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is expected or waits."""
        return not self._expected and not self._waiting

    def _consider(self) -> None:
        while self._num_waiting >= self._max_batch and self._expected:
            first = self._first(self._max_batch)
            num_sent = sum(len(self._waiting[result]) for result in first)
            # Groups that are expected will be as large as the last one that has come.
            size = len(next(reversed(self._waiting.values())))
            num_left = self._num_waiting - num_sent + size * len(self._expected)
            if num_left == 1 < self._max_batch:
                return
            self._send(first)
        if self._waiting and not self._expected and self._pause is None:
            self._pause = asyncio.get_running_loop().create_task(self._send_rest())

    @property
    def _num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    async def _send_rest(self) -> None:
        for _ in range(_TURNS):
            await asyncio.sleep(0)
        self._pause = None
        while self._waiting:
            num_batches = -(-self._num_waiting // self._max_batch)
            self._send(self._first(self._num_waiting / num_batches))

    def _first(self, target: float) -> list[asyncio.Future[list[Verdict]]]:
        """Return the groups of the next batch: `target` samples or somewhat more, but at most `max_batch`."""
        chosen: list[asyncio.Future[list[Verdict]]] = []
        count = 0
        for result, group in self._waiting.items():
            if count >= target or (chosen and count + len(group) > self._max_batch):
                break
            chosen.append(result)
            count += len(group)
        return chosen
