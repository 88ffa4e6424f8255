"""The senders of one weight update to an engine on several GPUs: each sends what its own GPU can share."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from rlhf_data.errors import EngineError, WeightSyncError
from rlhf_rollout.weights.bucket import WeightBucket


class Senders:
    """Joins the calls of several senders: a call is made once, when all have sent their part of it.

    All senders make the same calls in the same order. If one is cancelled before the others have come, all fail.
    """

    def __init__(self, num_senders: int) -> None:
        self._num = num_senders
        self._parts: list[Any] = []
        self._joined: asyncio.Future[None] | None = None
        self._call: asyncio.Task[None] | None = None  # the event loop itself keeps no task alive

    async def join(self, part: Any, call: Callable[[list[Any]], Awaitable[None]]) -> None:
        """Wait for the parts of all senders, and for `call(parts)`, which the last one makes; raise its error."""
        if self._num == 1:
            return await call([part])
        if self._joined is None:
            self._joined = asyncio.get_running_loop().create_future()
        joined = self._joined
        self._parts.append(part)
        if len(self._parts) == self._num:
            self._call = asyncio.ensure_future(_settle(joined, call(self._take())))
        try:
            await asyncio.shield(joined)
        except asyncio.CancelledError:
            if self._joined is joined:
                self._take()
                joined.set_exception(EngineError(f"one of {self._num} senders of weights gave up"))
                joined.exception()  # there may be nobody to read it
            raise

    def _take(self) -> list[Any]:
        parts = self._parts
        self._parts = []
        self._joined = None
        return parts


async def _settle(joined: "asyncio.Future[None]", call: Awaitable[None]) -> None:
    try:
        await call
    except BaseException as error:
        joined.set_exception(error)
    else:
        joined.set_result(None)


def merged(buckets: Sequence[WeightBucket]) -> WeightBucket:
    """Return one bucket with the handles of all, in an order that does not depend on which came first.

    Raises WeightSyncError when they hold different weights.
    """
    first = buckets[0]
    if len(buckets) == 1:
        return first
    if any((bucket.tensors, bucket.medium) != (first.tensors, first.medium) for bucket in buckets):
        names = [bucket.tensors[0].name for bucket in buckets if bucket.tensors]
        raise WeightSyncError(f"the senders of weights are not at the same bucket: they begin with {', '.join(names)}")
    handles = sorted((handle for bucket in buckets for handle in bucket.handle), key=lambda handle: handle[0])
    return replace(first, handle=tuple(handles))
