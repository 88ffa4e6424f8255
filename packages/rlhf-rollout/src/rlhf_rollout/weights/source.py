"""Sends weights: packs them into buckets, and has all engines read each bucket."""

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import closing
from dataclasses import replace
from typing import NamedTuple

import torch

from rlhf_data.errors import ConfigError, WeightSyncError, check_name
from rlhf_rollout.event_loop import EventLoopThread
from rlhf_rollout.protocols import RolloutEngine
from rlhf_rollout.weights import MEDIA, Medium
from rlhf_rollout.weights.bucket import TensorSlot, WeightBucket, aligned, bucket_checksum
from rlhf_rollout.weights.buffer import BucketBuffer, buffer_class

DEFAULT_BUCKET_BYTES = 256 << 20

logger = logging.getLogger(__name__)


class SyncReport(NamedTuple):
    """The outcome of one sync.

    Attributes:
        size_bytes: size of all weights.
        num_buckets: number of buckets in which they were sent.
        failures: position of each engine that failed, and why. These engines have no usable weights.
        ended_s: position of each engine, and when it answered last, by `time.perf_counter`.
    """

    size_bytes: int
    num_buckets: int
    failures: Mapping[int, str]
    ended_s: Mapping[int, float]


class WeightSource:
    """Sends the trainer's weights to engines.

    Args:
        medium: "shared_memory" (same host), "ipc" (same GPU), "tcp" (any node), or "nccl" (GPUs that no trainer is on;
            gloo on CPUs). The engines must be built for the same medium.
        bucket_bytes: size of a bucket. A larger weight gets a bucket of its own size, whose buffer keeps this size for
            the update. An update has `BucketBuffer.window` buffers at most: 3 in shared memory and by "tcp", else 1, or
            2 by "nccl".
        checksum: whether engines verify a checksum of each bucket, for debugging.
        workers_per_engine: processes of each engine, one per GPU.
        host: address by which engines reach this process by "tcp" and "nccl". By default, only those on this host do.
        keep_buffer: keep the buffers from one update to the next if engines map them ("ipc", "shared_memory"). This
            saves the time to allocate and open them. They are opened anew for other engines, and for one that has
            started again. `close` frees them.
        room: returns how many bytes a larger bucket may have. It is used once all engines have loaded an update, from
            which the size of the weights is known: fewer buckets save time, as each takes an engine milliseconds to
            answer. None for buckets of `bucket_bytes` only, which are used from the first engine's failure on: a
            process that is killed may keep the memory of a bucket from the trainer for good.

    Attributes:
        medium, checksum: as given.
        window: see `BucketBuffer`.
        keeps: whether buffers are kept.

    Raises:
        ConfigError: an unknown medium, a bucket size below 1, or "ipc" without a GPU.
    """

    def __init__(
        self,
        medium: Medium,
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        checksum: bool = False,
        workers_per_engine: int = 1,
        host: str = "127.0.0.1",
        keep_buffer: bool = False,
        room: Callable[[], int] | None = None,
    ) -> None:
        if bucket_bytes < 1:
            raise ConfigError(f"bucket_bytes is {bucket_bytes}; it must be at least 1")
        check_name("weight sync medium", medium, MEDIA)
        if medium == "ipc" and not torch.cuda.is_available():
            raise ConfigError("weight sync by ipc needs a GPU", hint="use shared_memory")
        form = buffer_class(medium)
        self.medium: Medium = medium
        self.checksum = checksum
        self.keeps = keep_buffer and form.is_mapped
        self._open_buffer = form.sender(workers_per_engine, host)
        self._bucket_bytes = bucket_bytes
        self.window = form.window
        self._kept: tuple[list[str], list[BucketBuffer]] = ([], [])  # names of the engines that have opened them
        self._room = room
        self._loaded_bytes = 0  # size of the last update, if all engines have loaded it

    def send(
        self,
        named_tensors: Iterator[tuple[str, torch.Tensor]],
        engines: Sequence[RolloutEngine],
        policy_version: int,
        names: Sequence[str] | None = None,
    ) -> SyncReport:
        """Send every weight to every engine.

        Each engine reads the buckets in order, at its own pace: one that is slow holds up the others only once it is
        behind by as many buckets as there are buffers. An engine that fails is left out from there on.

        Args:
            named_tensors: names and full tensors, read one at a time, so that ZeRO-3 can gather each when it is read.
            engines: at least one.
            policy_version: version of these weights.
            names: names of the engines' processes, by which a medium recognizes those that it has sent to before. None
                if they are not known.

        Raises:
            WeightSyncError: there is no engine, the buffer cannot be opened, or the weights do not fit an engine. The
                buffer is then closed, and the rest of `named_tensors` is read, as it may gather weights together with
                other ranks.
        """
        if not engines:
            raise WeightSyncError("there is no engine to send weights to")
        names = names or [secrets.token_hex() for _ in engines]
        receivers = _Receivers(engines)
        bucket_bytes = self._next_bucket_bytes()
        self._loaded_bytes = 0
        try:
            with closing(_Update(self, bucket_bytes, receivers)) as update:
                update.begin(policy_version, names)
                for name, tensor in named_tensors:
                    update.add(name, tensor.detach())
                update.finish()
                self.close()  # those that were kept and not used
                if self.keeps:
                    self._kept = update.release()
        except BaseException:
            self.close()
            # Reading a weight may be a collective with the other ranks, which would wait forever if this rank stopped.
            for _ in named_tensors:
                pass
            raise
        if receivers.failures:
            self._room = None
        else:
            self._loaded_bytes = update.size_bytes
        return SyncReport(update.size_bytes, update.num_buckets, receivers.failures, receivers.ended_s)

    def open(self, size_bytes: int, names: list[str]) -> BucketBuffer:
        """Return a buffer that was kept if it is large enough and the same engines opened it, else a new one."""
        kept_names, buffers = self._kept
        if buffers and kept_names == names and buffers[0].data.numel() >= size_bytes:
            return buffers.pop(0)
        self.close()
        return self._open_buffer(size_bytes, names)

    def close(self) -> None:
        """Free the buffers that were kept for the next update, if any."""
        _, buffers = self._kept
        while buffers:
            buffers.pop().close()

    def _next_bucket_bytes(self) -> int:
        """Return the size of the buckets of the next update."""
        if self._room is None or not self._loaded_bytes:
            return self._bucket_bytes
        # A little more than the weights, which begin at aligned places, so that no small bucket is left at the end.
        return max(self._bucket_bytes, min(self._loaded_bytes + (self._loaded_bytes >> 6), self._room()))


class _Update:
    """One sync: fills buffers in turn, and has all engines read each filling.

    Engines are called on a thread: this one meanwhile fills the next bucket, if there is room for it, and gathers
    weights where the rank's other collectives run.

    Attributes:
        size_bytes, num_buckets: see `SyncReport`.
    """

    def __init__(self, source: WeightSource, bucket_bytes: int, receivers: "_Receivers") -> None:
        self._source = source
        self._window = source.window
        self._bucket_bytes = bucket_bytes
        self._receivers = receivers
        self._thread = EventLoopThread("weights")
        self._buffers: list[BucketBuffer] = []
        self._at = -1  # the buffer that is filled
        self._specs: list[TensorSlot] = []
        # The fillings that engines read, the oldest first.
        self._reading: deque[tuple[BucketBuffer, Future[None]]] = deque()
        self.size_bytes = 0
        self.num_buckets = 0

    def begin(self, policy_version: int, names: Sequence[str]) -> None:
        """Tell the engines, whose processes have these names, that weights come."""
        self._call(lambda index, engine: engine.begin_weight_update(policy_version)).result()
        self._indices = self._receivers.indices  # a broadcast would wait for an engine that has failed already
        self._names = [names[index] for index in self._indices]

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Send a weight, at the latest with those of `finish`. Returns once it is copied."""
        offset = aligned(self._specs[-1].place.stop) if self._specs else 0
        if self._specs and offset + tensor.nbytes > self._buffers[self._at].data.numel():
            self._hand_over()
            offset = 0
        if not self._specs:
            self._take_buffer(tensor.nbytes)
        self._specs.append(_write(self._buffers[self._at], name, tensor, offset))

    def finish(self) -> None:
        """Send the last weights, and have the engines put all of them in force."""
        if self._specs:
            self._hand_over()
        self._settle()
        if not self._source.keeps:
            self._close_buffers()
        self._call(lambda index, engine: engine.finish_weight_update()).result()

    def release(self) -> tuple[list[str], list[BucketBuffer]]:
        """Return the names of the engines, and their buffers in the order of their use, which the caller closes."""
        buffers = self._buffers
        self._buffers = []
        return self._names, buffers

    def close(self) -> None:
        """Wait until no engine reads any more, and free the buffers."""
        wait([reading for _, reading in self._reading])
        self._thread.close()
        self._close_buffers()

    def _take_buffer(self, size_bytes: int) -> None:
        """Go on to the next buffer, for a weight of `size_bytes`, once engines have read what it held."""
        size_bytes = max(self._bucket_bytes, size_bytes)
        self._at = (self._at + 1) % self._window
        if self._at == len(self._buffers):
            try:
                self._buffers.append(self._open_reserved(size_bytes))
                return
            except WeightSyncError as error:
                if not self._at:  # without the first one there is no update
                    raise
                logger.info("weights are sent through %d buffer(s): %s", self._at, error)
                self._window = self._at
                self._at = 0
        buffer = self._buffers[self._at]
        is_small = buffer.data.numel() < size_bytes
        if is_small or not buffer.holds_two:
            self._settle(buffer)
        if is_small:
            buffer.close()
            self._buffers[self._at] = self._source.open(size_bytes, self._names)

    def _open_reserved(self, size_bytes: int) -> BucketBuffer:
        """Return a buffer of memory that is there. The first one is reserved as it is filled."""
        buffer = self._source.open(size_bytes, self._names)
        try:
            if self._at:
                buffer.reserve(size_bytes)
        except WeightSyncError:
            buffer.close()
            raise
        return buffer

    def _hand_over(self) -> None:
        """Have the engines read the buffer, each when it has read the buckets before."""
        if self._source.window == 1:
            self._settle()
        specs = self._specs
        self._specs = []
        if not self._receivers.indices:
            return  # the weights are still gathered with other ranks
        buffer = self._buffers[self._at]
        bucket = WeightBucket(self._source.medium, tuple(specs), handle=None, kept=self._source.keeps)
        if self._source.checksum:
            written = buffer.data[: bucket.used_bytes].cpu().numpy()
            bucket = replace(bucket, checksum=bucket_checksum(written, bucket.tensors))
        buffer.publish()
        handles = dict(zip(self._indices, buffer.handles, strict=True))
        reading = self._call(lambda index, engine: engine.receive_weights(replace(bucket, handle=handles[index])))
        self._reading.append((buffer, reading))
        self.size_bytes += sum(spec.size_bytes for spec in specs)
        self.num_buckets += 1
        if self._source.window == 1 and not buffer.holds_two:
            self._settle()

    def _settle(self, until: BucketBuffer | None = None) -> None:
        """Wait until the engines have read the buffer `until`, or all that were handed over."""
        while self._reading and (until is None or any(buffer is until for buffer, _ in self._reading)):
            buffer, reading = self._reading[0]
            reading.result()
            self._reading.popleft()
            if (reason := buffer.settle()) is not None:
                self._receivers.give_up(reason)

    def _close_buffers(self) -> None:
        for buffer in self._buffers:
            buffer.close()
        self._buffers = []

    def _call(self, method: Callable[[int, RolloutEngine], Awaitable[None]]) -> Future[None]:
        return self._thread.start(self._receivers.call(method))


def _write(buffer: BucketBuffer, name: str, tensor: torch.Tensor, offset: int) -> TensorSlot:
    end = offset + tensor.nbytes
    buffer.reserve(end)
    buffer.data[offset:end].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorSlot(name, dtype, tuple(tensor.shape), offset_bytes=offset, size_bytes=tensor.nbytes)


class _Receivers:
    """The engines of one sync. Each gets one call after the other.

    Attributes:
        failures, ended_s: see `SyncReport`.
    """

    def __init__(self, engines: Sequence[RolloutEngine]) -> None:
        self._live = dict(enumerate(engines))
        self._last: dict[int, asyncio.Task[None]] = {}  # call of each engine
        self._error: BaseException | None = None
        self.failures: dict[int, str] = {}
        self.ended_s: dict[int, float] = {}

    @property
    def indices(self) -> list[int]:
        """Positions of the engines that have not failed."""
        return list(self._live)

    def give_up(self, reason: str) -> None:
        """Count all engines that have not failed so far as failed."""
        self.failures |= dict.fromkeys(self._live, reason)
        self._live.clear()

    async def call(self, method: Callable[[int, RolloutEngine], Awaitable[None]]) -> None:
        """Call the engines that have not failed so far, each after its calls before, and wait for all of them.

        Waiting for all matters on errors too: an engine may still be reading the buffer that the caller closes next.
        Raises the first WeightSyncError, because weights that do not fit one engine fit none: no engine is called any
        more. Any other error, such as a network that failed, concerns one engine only.
        """
        # No step of another task comes between two calls of this method up to here, so that calls keep their order.
        for index in self.indices:
            self._last[index] = asyncio.ensure_future(self._after(self._last.get(index), index, method))
        if calls := [self._last[index] for index in self.indices]:
            await asyncio.wait(calls)
        if self._error is not None:
            raise self._error

    async def _after(
        self,
        before: asyncio.Task[None] | None,
        index: int,
        method: Callable[[int, RolloutEngine], Awaitable[None]],
    ) -> None:
        if before is not None:
            await before
        engine = self._live.get(index)
        if engine is None or self._error is not None:
            return
        try:
            await method(index, engine)
            self.ended_s[index] = time.perf_counter()
        except WeightSyncError as error:
            self._error = self._error or error
        except Exception as error:
            self.failures[index] = f"{type(error).__name__}: {error}"
            del self._live[index]
        except BaseException as error:
            self._error = self._error or error
