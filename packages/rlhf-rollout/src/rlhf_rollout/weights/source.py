"""Sends weights: packs them into buckets, and has all engines read each bucket."""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from rlhf_data.errors import ConfigError, WeightSyncError, unknown
from rlhf_rollout.protocols import RolloutEngine
from rlhf_rollout.weights import MEDIA, Medium
from rlhf_rollout.weights.bucket import TensorSlot, WeightBucket, aligned, bucket_checksum
from rlhf_rollout.weights.buffer import BucketBuffer, buffer_class

DEFAULT_BUCKET_BYTES = 256 << 20


class SyncReport(NamedTuple):
    """The outcome of one sync.

    Attributes:
        size_bytes: size of all weights.
        num_buckets: number of buckets in which they were sent.
        failures: position of each engine that failed, and why. These engines have no usable weights.
    """

    size_bytes: int
    num_buckets: int
    failures: Mapping[int, str]


class WeightSource:
    """Sends the trainer's weights to engines.

    Args:
        medium: "shared_memory" (same host), "ipc" (same GPU), "tcp" (any node), or "nccl" (GPUs that no trainer is on;
            gloo on CPUs). The engines must be built for the same medium.
        bucket_bytes: size of a bucket. A weight larger than this gets a bucket of its own size.
        checksum: whether engines verify a checksum of each bucket, for debugging.
        workers_per_engine: processes of each engine, one per GPU.
        host: address by which engines reach this process by "tcp" and "nccl". By default, only those on this host do.
        keep_buffer: keep the buffer from one update to the next if engines map it ("ipc", "shared_memory"). This saves
            the time to allocate and open it. It is opened anew for other engines, and for one that has started again.
            `close` frees it.
        room: returns how many bytes a larger bucket may have. It is used once all engines have loaded an update, from
            which the size of the weights is known: fewer buckets save time, as each takes an engine milliseconds to
            answer. None for buckets of `bucket_bytes` only, which are used from the first engine's failure on: a
            process that is killed may keep the memory of a bucket from the trainer for good.

    Attributes:
        medium, checksum: as given.
        keeps: whether a buffer is kept.

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
        if medium not in MEDIA:
            raise ConfigError(unknown("weight sync medium", medium, MEDIA))
        if medium == "ipc" and not torch.cuda.is_available():
            raise ConfigError("weight sync by ipc needs a GPU", hint="use shared_memory")
        form = buffer_class(medium)
        self.medium: Medium = medium
        self.checksum = checksum
        self.keeps = keep_buffer and form.is_mapped
        self._open_buffer = form.sender(workers_per_engine, host)
        self._bucket_bytes = bucket_bytes
        self._kept: tuple[list[str], BucketBuffer] | None = None  # and the names of the engines that have opened it
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

        All engines have read a bucket before the next one is sent. An engine that fails is left out from there on.

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
                if self.keeps:
                    self._kept = update.release()
        except BaseException:
            # Reading a weight may be a collective with the other ranks, which would wait forever if this rank stopped.
            for _ in named_tensors:
                pass
            raise
        if receivers.failures:
            self._room = None
        else:
            self._loaded_bytes = update.size_bytes
        return SyncReport(update.size_bytes, update.num_buckets, receivers.failures)

    def open(self, size_bytes: int, names: list[str]) -> BucketBuffer:
        """Return the buffer that was kept if it has this size and the same engines opened it, else a new one."""
        if self._kept is not None and self._kept[0] == names and self._kept[1].data.numel() >= size_bytes:
            buffer = self._kept[1]
            self._kept = None
            return buffer
        self.close()
        return self._open_buffer(size_bytes, names)

    def close(self) -> None:
        """Free the buffer that was kept for the next update, if any."""
        if self._kept is not None:
            self._kept[1].close()
            self._kept = None

    def _next_bucket_bytes(self) -> int:
        """Return the size of the buckets of the next update."""
        if self._room is None or not self._loaded_bytes:
            return self._bucket_bytes
        # A little more than the weights, which begin at aligned places, so that no small bucket is left at the end.
        return max(self._bucket_bytes, min(self._loaded_bytes + (self._loaded_bytes >> 6), self._room()))


class _Update:
    """One sync: fills the buffer, and has all engines read each filling.

    Engines are called on a thread: this one meanwhile fills the next bucket, if the buffer has room for two, and
    gathers weights where the rank's other collectives run.

    Attributes:
        size_bytes, num_buckets: see `SyncReport`.
    """

    def __init__(self, source: WeightSource, bucket_bytes: int, receivers: "_Receivers") -> None:
        self._source = source
        self._bucket_bytes = bucket_bytes
        self._receivers = receivers
        self._calls = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights")
        self._runner = asyncio.Runner()
        self._buffer: BucketBuffer | None = None
        self._specs: list[TensorSlot] = []
        self._reading: Future[None] | None = None  # engines read the last filling
        self.size_bytes = 0
        self.num_buckets = 0

    def begin(self, policy_version: int, names: Sequence[str]) -> None:
        """Tell the engines, whose processes have these names, that weights come."""
        self._call(self._receivers.call(lambda index, engine: engine.begin_weight_update(policy_version))).result()
        self._indices = self._receivers.indices  # a broadcast would wait for an engine that has failed already
        self._names = [names[index] for index in self._indices]

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Send a weight, at the latest with those of `finish`. Returns once it is copied."""
        offset = aligned(self._specs[-1].place.stop) if self._specs else 0
        if self._specs and offset + tensor.nbytes > self._buffer.data.numel():
            self._hand_over()
            offset = 0
        if self._buffer is None or tensor.nbytes > self._buffer.data.numel():
            self._close_buffer()
            self._buffer = self._source.open(max(self._bucket_bytes, tensor.nbytes), self._names)
        self._specs.append(_write(self._buffer, name, tensor, offset))

    def finish(self) -> None:
        """Send the last weights, and have the engines put all of them in force."""
        if self._specs:
            self._hand_over()
        self._settle()
        if not self._source.keeps:
            self._close_buffer()
        self._call(self._receivers.call(lambda index, engine: engine.finish_weight_update())).result()

    def release(self) -> tuple[list[str], BucketBuffer] | None:
        """Return the names of the engines, and their buffer, which the caller closes; None if there were no weights."""
        buffer = self._buffer
        self._buffer = None
        return None if buffer is None else (self._names, buffer)

    def close(self) -> None:
        """Wait until no engine reads any more, and free the buffer."""
        self._calls.shutdown()
        self._runner.close()
        if self._buffer is not None:
            self._buffer.close()

    def _hand_over(self) -> None:
        """Have the engines read the buffer, when they are done with its last filling."""
        self._settle()
        specs = self._specs
        self._specs = []
        if not self._receivers.indices:
            return  # the weights are still gathered with other ranks
        bucket = WeightBucket(self._source.medium, tuple(specs), handle=None, kept=self._source.keeps)
        if self._source.checksum:
            written = self._buffer.data[: bucket.used_bytes].cpu().numpy()
            bucket = replace(bucket, checksum=bucket_checksum(written, bucket.tensors))
        self._buffer.publish()
        handles = dict(zip(self._indices, self._buffer.handles, strict=True))
        self._reading = self._call(
            self._receivers.call(lambda index, engine: engine.receive_weights(replace(bucket, handle=handles[index])))
        )
        self.size_bytes += sum(spec.size_bytes for spec in specs)
        self.num_buckets += 1
        if not self._buffer.holds_two:
            self._settle()

    def _settle(self) -> None:
        """Wait until the engines have read the last filling."""
        if self._reading is None:
            return
        reading = self._reading
        self._reading = None
        reading.result()
        if (reason := self._buffer.settle()) is not None:
            self._receivers.give_up(reason)

    def _close_buffer(self) -> None:
        if self._buffer is not None:
            self._settle()
            self._buffer.close()
            self._buffer = None

    def _call(self, calls: Coroutine[Any, Any, None]) -> Future[None]:
        return self._calls.submit(self._runner.run, calls)


def _write(buffer: BucketBuffer, name: str, tensor: torch.Tensor, offset: int) -> TensorSlot:
    end = offset + tensor.nbytes
    buffer.reserve(end)
    buffer.data[offset:end].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorSlot(name, dtype, tuple(tensor.shape), offset_bytes=offset, size_bytes=tensor.nbytes)


class _Receivers:
    """The engines of one sync.

    Attributes:
        failures: see `SyncReport`.
    """

    def __init__(self, engines: Sequence[RolloutEngine]) -> None:
        self._live = dict(enumerate(engines))
        self.failures: dict[int, str] = {}

    @property
    def indices(self) -> list[int]:
        """Positions of the engines that have not failed."""
        return list(self._live)

    def give_up(self, reason: str) -> None:
        """Count all engines that have not failed so far as failed."""
        self.failures |= dict.fromkeys(self._live, reason)
        self._live.clear()

    async def call(self, method: Callable[[int, RolloutEngine], Awaitable[None]]) -> None:
        """Call the engines that have not failed so far, all at once, and wait for all of them.

        Waiting for all matters on errors too: an engine may still be reading the buffer that the caller closes next.
        Raises the first WeightSyncError, because weights that do not fit one engine fit none. Any other error, such
        as a network that failed, concerns one engine only.
        """
        indices = self.indices
        calls = [method(index, self._live[index]) for index in indices]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, WeightSyncError) or not isinstance(outcome, Exception | None):
                raise outcome
        for index, outcome in zip(indices, outcomes, strict=True):
            if outcome is not None:
                self.failures[index] = f"{type(outcome).__name__}: {outcome}"
                del self._live[index]
