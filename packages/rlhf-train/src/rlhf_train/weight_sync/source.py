"""The sender of weights: packs them into buckets and hands each bucket to all engines."""

import asyncio
from collections.abc import Awaitable, Generator, Iterator, Sequence
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


class BucketBuffer(Protocol):
    """Memory that both sides see, opened once per sync for a number of bytes and a number of engines."""

    medium: Medium
    data: torch.Tensor
    handles: Sequence[Any]
    """One per engine, by which the engine opens the memory."""

    def reserve(self, end_bytes: int) -> None:
        """Make sure that the first `end_bytes` bytes of `data` can be written."""

    def publish(self) -> None:
        """Wait until what was written can be read by others."""

    def close(self) -> None:
        """Free the memory. Never raises."""


class SyncReport(NamedTuple):
    """What one sync took: the bytes of the weights, and the buffer's fillings."""

    size_bytes: int
    num_buckets: int


class WeightSource:
    """Brings the trainer's weights to engines.

    Args:
        medium: "shared_memory" (same host) or "ipc" (same GPU), see `Medium`; the engines must be built for it.
        bucket_bytes: weights travel in buckets of this size; a larger weight gets a bucket of its own size.
        checksum: let each engine verify the bytes that arrive, for debugging.

    Raises:
        ConfigError: an unknown medium, a bucket without room, or ipc without a GPU.
    """

    def __init__(self, medium: Medium, *, bucket_bytes: int = DEFAULT_BUCKET_BYTES, checksum: bool = False) -> None:
        if bucket_bytes < 1:
            raise ConfigError(f"bucket_bytes is {bucket_bytes}; it must be at least 1")
        if medium not in MEDIA:
            raise ConfigError(unknown("weight sync medium", medium, MEDIA))
        if medium == "ipc" and not torch.cuda.is_available():
            raise ConfigError("weight sync by ipc needs a GPU", hint="use shared_memory")
        self._open_buffer = import_module(f"rlhf_train.weight_sync.{medium}").open_buffer
        self._bucket_bytes = bucket_bytes
        self._checksum = checksum

    def send(
        self, named_tensors: Iterator[tuple[str, torch.Tensor]], engines: Sequence[RolloutEngine], policy_version: int
    ) -> SyncReport:
        """Send every weight to every engine. Not for use inside a running event loop.

        Names and full tensors are taken one by one, so they may be gathered on the way; all engines, at least one,
        receive a bucket before the buffer is filled again. Raises EngineError or WeightSyncError when an engine did not
        take a bucket, or the buffer cannot be had; the buffer is gone and the weights are taken to their end then, too.
        """
        if not engines:
            raise WeightSyncError("there is no engine to send weights to")
        return asyncio.run(self._send(named_tensors, engines, policy_version))

    async def _send(
        self, named_tensors: Iterator[tuple[str, torch.Tensor]], engines: Sequence[RolloutEngine], policy_version: int
    ) -> SyncReport:
        size_bytes = num_buckets = 0
        try:
            await _together([engine.begin_weight_update(policy_version) for engine in engines])
            with closing(self._fillings(named_tensors, len(engines))) as fillings:
                for buffer, specs in fillings:
                    buffer.publish()
                    bucket = WeightBucket(medium=buffer.medium, tensors=tuple(specs), handle=None)
                    if self._checksum:
                        written = buffer.data[: bucket.used_bytes].cpu().numpy()
                        bucket = replace(bucket, checksum=bucket_checksum(written, bucket.tensors))
                    pairs = zip(engines, buffer.handles, strict=True)
                    await _together(
                        [engine.receive_weights(replace(bucket, handle=handle)) for engine, handle in pairs]
                    )
                    size_bytes += sum(spec.size_bytes for spec in specs)
                    num_buckets += 1
            await _together([engine.finish_weight_update() for engine in engines])
        except BaseException:
            # Other ranks gather each weight together with this one: they must not be left waiting.
            for _ in named_tensors:
                pass
            raise
        return SyncReport(size_bytes, num_buckets)

    def _fillings(
        self, named_tensors: Iterator[tuple[str, torch.Tensor]], num_engines: int
    ) -> Generator[tuple[BucketBuffer, list[TensorSlot]]]:
        """Fill one buffer again and again, and yield it with what lies in it; a larger weight has it opened anew."""
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
                    buffer = self._open_buffer(max(self._bucket_bytes, tensor.nbytes), num_engines)
                specs.append(_write(buffer, name, tensor.detach(), offset))
            if buffer is not None:
                yield buffer, specs
        finally:
            if buffer is not None:
                buffer.close()


def _write(buffer: BucketBuffer, name: str, tensor: torch.Tensor, offset: int) -> TensorSlot:
    end = offset + tensor.nbytes
    buffer.reserve(end)
    buffer.data[offset:end].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorSlot(name, dtype, tuple(tensor.shape), offset_bytes=offset, size_bytes=tensor.nbytes)


async def _together(calls: Sequence[Awaitable[None]]) -> None:
    """Run the calls at once, wait for all of them, and raise the first error."""
    for outcome in await asyncio.gather(*calls, return_exceptions=True):
        if outcome is not None:
            raise outcome
