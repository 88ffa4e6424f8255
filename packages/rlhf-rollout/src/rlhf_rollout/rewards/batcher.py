"""Joins the items of concurrent callers into batches: items that arrive within milliseconds share one call."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from rlhf_data.errors import ConfigError, RewardError

Item = TypeVar("Item")
Result = TypeVar("Result")


class Batcher(Generic[Item, Result]):
    """Gathers the items of concurrent `submit` calls into batches, in the order of their arrival.

    A batch goes out when it is full, or `max_wait_s` after its first item. Several batches may be in flight. Use it
    from one event loop at a time.

    Args:
        call: takes the items of a batch and returns one result per item, in order.
        max_batch: items per batch at most.
        max_wait_s: seconds that an item waits for others at most.

    Raises:
        ConfigError: `max_batch` is below 1, or `max_wait_s` is negative.
    """

    def __init__(
        self, call: Callable[[list[Item]], Awaitable[list[Result]]], *, max_batch: int, max_wait_s: float = 0.005
    ) -> None:
        if max_batch < 1 or max_wait_s < 0:
            raise ConfigError(f"max_batch ({max_batch}) must be at least 1 and max_wait_s ({max_wait_s}) not negative")
        self._call = call
        self._max_batch = max_batch
        self._max_wait_s = max_wait_s
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
        if len(self._waiting) == self._max_batch:
            self._send()
        elif self._timer is None:
            self._timer = loop.call_later(self._max_wait_s, self._send)
        try:
            return await result
        finally:
            self._waiting.pop(result, None)  # still there if the caller was cancelled before the batch went out
            if not self._waiting:
                self._stop_timer()

    async def close(self) -> None:
        """Cancel waiting items and batches in flight."""
        for result in self._waiting:
            result.cancel()
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _send(self) -> None:
        self._stop_timer()
        batch, self._waiting = self._waiting, {}
        task = asyncio.get_running_loop().create_task(self._run(batch))
        self._running.add(task)  # the event loop itself keeps only a weak reference to a task
        task.add_done_callback(self._running.discard)

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
