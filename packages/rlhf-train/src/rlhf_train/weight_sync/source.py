"""Sends weights: packs them into buckets, and has all engines read each bucket."""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from importlib import import_module
from typing import Any, NamedTuple, Protocol

import torch

from rlhf_data.errors import ConfigError, WeightSyncError, unknown
from rlhf_rollout.protocols import RolloutEngine
from rlhf_rollout.weight_sync import MEDIA, Medium
from rlhf_rollout.weight_sync.bucket import TensorSlot, WeightBucket, aligned, bucket_checksum

DEFAULT_BUCKET_BYTES = 256 << 20
_KEPT_MEDIA = ("ipc", "shared_memory")  # whose buffers engines map, which takes time; others are read anew in any case


class BucketBuffer(Protocol):
    """Memory that the trainer writes and engines read. It is opened for a size in bytes and the names of engines.

    Attributes:
        medium: name of the medium, as the receiving half knows it.
        data: [size_bytes] uint8, the memory on the trainer's side.
        handles: one per engine, with which the engine opens the memory.
    """

    medium: Medium
    data: torch.Tensor
    handles: Sequence[Any]

    def reserve(self, end_bytes: int) -> None:
        """Make the first `end_bytes` bytes of `data` writable. Raises WeightSyncError when there is no room."""

    def publish(self) -> None:
        """Wait until other processes can read what was written, or begin to send it. `handles` are then valid."""

    def settle(self) -> str | None:
        """Wait until the buffer may be written again, once all engines have answered.

        Returns why no engine can receive further buckets, or None if they can.
        """

    def close(self) -> None:
        """Free the memory. Never raises."""


class SyncReport(NamedTuple):
    """The outcome of one sync.

    Attributes:
        size_bytes: of all weights.
        num_buckets: in which they were sent.
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
        keep_buffer: keep the buffer from one update to the next if engines map it ("ipc", "shared_memory"). This saves
            the time to allocate and open it. It is opened anew for other engines, and for one that has started again.
            `close` frees it.

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
        keep_buffer: bool = False,
    ) -> None:
        if bucket_bytes < 1:
            raise ConfigError(f"bucket_bytes is {bucket_bytes}; it must be at least 1")
        if medium not in MEDIA:
            raise ConfigError(unknown("weight sync medium", medium, MEDIA))
        if medium == "ipc" and not torch.cuda.is_available():
            raise ConfigError("weight sync by ipc needs a GPU", hint="use shared_memory")
        self._open_buffer = import_module(f"rlhf_train.weight_sync.{medium}").opener(workers_per_engine)
        self._bucket_bytes = bucket_bytes
        self._checksum = checksum
        self._keeps = keep_buffer and medium in _KEPT_MEDIA
        self._kept: tuple[list[str], BucketBuffer] | None = None

    def send(
        self,
        named_tensors: Iterator[tuple[str, torch.Tensor]],
        engines: Sequence[RolloutEngine],
        policy_version: int,
        names: Sequence[str] | None = None,
    ) -> SyncReport:
        """Send every weight to every engine. Must not be called inside a running event loop.

        All engines read a bucket before the buffer is filled again. An engine that fails is left out from there on.

        Args:
            named_tensors: names and full tensors, read one at a time, so that ZeRO-3 can gather each when it is read.
            engines: at least one.
            policy_version: of these weights.
            names: of the engines' processes, by which a medium knows those that it has sent to before. None if none are
                known.

        Raises:
            WeightSyncError: there is no engine, the buffer cannot be opened, or the weights do not fit an engine. The
                buffer is then closed, and the rest of `named_tensors` is read, as it may gather weights together with
                other ranks.
        """
        if not engines:
            raise WeightSyncError("there is no engine to send weights to")
        names = names or [secrets.token_hex() for _ in engines]
        return asyncio.run(self._send(named_tensors, _Receivers(engines), policy_version, names))

    def close(self) -> None:
        """Free the buffer that was kept for the next update, if any."""
        if self._kept is not None:
            self._kept[1].close()
            self._kept = None

    async def _send(
        self,
        named_tensors: Iterator[tuple[str, torch.Tensor]],
        receivers: "_Receivers",
        policy_version: int,
        names: Sequence[str],
    ) -> SyncReport:
        size_bytes = num_buckets = 0
        try:
            await receivers.call(lambda index, engine: engine.begin_weight_update(policy_version))
            indices = receivers.indices  # a broadcast would wait for an engine that has failed already
            with closing(self._fillings(named_tensors, [names[index] for index in indices])) as fillings:
                for buffer, specs in fillings:
                    if not receivers.indices:
                        continue  # the weights are still gathered with other ranks
                    buffer.publish()
                    bucket = WeightBucket(medium=buffer.medium, tensors=tuple(specs), handle=None, kept=self._keeps)
                    if self._checksum:
                        written = buffer.data[: bucket.used_bytes].cpu().numpy()
                        bucket = replace(bucket, checksum=bucket_checksum(written, bucket.tensors))
                    await receivers.receive(bucket, dict(zip(indices, buffer.handles, strict=True)))
                    if (reason := buffer.settle()) is not None:
                        receivers.give_up(reason)
                    size_bytes += sum(spec.size_bytes for spec in specs)
                    num_buckets += 1
            await receivers.call(lambda index, engine: engine.finish_weight_update())
        except BaseException:
            # Reading a weight may be a collective with the other ranks, which would wait forever if this rank stopped.
            for _ in named_tensors:
                pass
            raise
        return SyncReport(size_bytes, num_buckets, receivers.failures)

    def _fillings(
        self, named_tensors: Iterator[tuple[str, torch.Tensor]], names: list[str]
    ) -> Generator[tuple[BucketBuffer, list[TensorSlot]]]:
        """Pack the weights into one buffer, and yield the buffer with its contents each time it is full.

        The caller must be done with the buffer when it asks for the next one. A weight larger than the buffer makes the
        generator close the buffer and open a larger one.
        """
        buffer: BucketBuffer | None = None
        specs: list[TensorSlot] = []
        try:
            for name, tensor in named_tensors:
                offset = aligned(specs[-1].offset_bytes + specs[-1].size_bytes) if specs else 0
                if buffer is not None and specs and offset + tensor.nbytes > buffer.data.numel():
                    yield buffer, specs
                    specs, offset = [], 0
                if buffer is None or tensor.nbytes > buffer.data.numel():
                    if buffer is not None:
                        buffer.close()
                    buffer = self._open(max(self._bucket_bytes, tensor.nbytes), names)
                specs.append(_write(buffer, name, tensor.detach(), offset))
            if buffer is not None:
                yield buffer, specs
                if self._keeps:
                    self._kept = names, buffer
                    buffer = None
        finally:
            if buffer is not None:
                buffer.close()

    def _open(self, size_bytes: int, names: list[str]) -> BucketBuffer:
        """Return the buffer that was kept if it has this size and the same engines opened it, else a new one."""
        if self._kept is not None and self._kept[0] == names and self._kept[1].data.numel() >= size_bytes:
            buffer = self._kept[1]
            self._kept = None
            return buffer
        self.close()
        return self._open_buffer(size_bytes, names)


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

    async def receive(self, bucket: WeightBucket, handles: Mapping[int, Any]) -> None:
        """Have the engines read a bucket, each by its own one of `handles`, by position."""
        await self.call(lambda index, engine: engine.receive_weights(replace(bucket, handle=handles[index])))

    async def call(self, method: Callable[[int, RolloutEngine], Awaitable[None]]) -> None:
        """Call the engines that have not failed so far, all at once, and wait for all of them.

        Waiting for all matters on errors too: an engine may still be reading the buffer that the caller closes next.
        Raises the first WeightSyncError; any other error concerns one engine only.
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
