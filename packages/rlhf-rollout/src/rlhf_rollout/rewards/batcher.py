"""One call for the items of many callers: what arrives within a few milliseconds goes out together."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from rlhf_data.errors import ConfigError, RewardError

Item = TypeVar("Item")
Result = TypeVar("Result")


class Batcher(Generic[Item, Result]):
    """Gathers the items that concurrent `submit` calls bring into batches, in the order in which they come.

    A batch goes out when it is full, or `max_wait_s` after its first item; batches may be under way side by side. Not
    tied to an event loop, but to be used from one at a time.

    Args:
        call: takes the items of a batch and returns one result each, in order.
        max_batch: items of a batch at most.
        max_wait_s: what an item waits for others at most.

    Raises:
        ConfigError: `max_batch` below 1, or a negative `max_wait_s`.
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
        """Return the item's result. What the call raises is raised for every item of the batch. Raises RewardError when
        it returned another number of results than it got items."""
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
            self._waiting.pop(result, None)  # it is still there when the caller gave up
            if not self._waiting:
                self._stop_timer()

    async def close(self) -> None:
        """Cancel what waits and what is under way."""
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
        self._running.add(task)
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
        except Exception as error:  # of whatever is called: each caller decides what it means for its item
            for waiter in batch:
                if not waiter.done():
                    waiter.set_exception(error)
            return
        for waiter, result in zip(batch, results, strict=True):
            if not waiter.done():  # its caller may have given up
                waiter.set_result(result)
