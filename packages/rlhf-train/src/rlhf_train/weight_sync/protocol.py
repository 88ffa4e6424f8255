"""What a weight sender and an engine's receiving end are, and the loop that packs weights into buckets."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from rlhf_data.errors import WeightSyncError
from rlhf_rollout.protocols import RolloutEngine
from rlhf_rollout.weights import TensorSpec, WeightBucket, aligned, bucket_checksum

DEFAULT_BUCKET_BYTES = 256 << 20


class EngineClient(Protocol):
    """An engine as the trainer's rank 0 sees it: blocking calls. Each raises WeightSyncError or EngineError."""

    def begin(self, policy_version: int) -> None:
        """Stop the engine and get it ready for buckets."""
        ...

    def receive(self, bucket: WeightBucket) -> None:
        """Have the engine load a bucket; the buffer may be reused once this returns."""
        ...

    def finish(self) -> None:
        """Put the weights in force and let the engine generate on."""
        ...


@dataclass(frozen=True, slots=True)
class SyncReport:
    """What one sync took.

    Attributes:
        seconds: from the first call to the last engine that generates again.
        size_bytes: of the weights.
        num_buckets: the buffer's fillings.
    """

    seconds: float
    size_bytes: int
    num_buckets: int


class WeightSender(Protocol):
    """Brings the trainer's weights to engines."""

    def send(
        self, named_tensors: Iterator[tuple[str, torch.Tensor]], engines: Sequence[EngineClient], policy_version: int
    ) -> SyncReport:
        """Send every weight to every engine, bucket by bucket.

        Args:
            named_tensors: Hugging Face names and full tensors; taken one by one, so they may be gathered on the way.
            engines: all receive a bucket before the buffer is filled again.
            policy_version: optimizer steps behind these weights.

        Raises:
            WeightSyncError: an engine did not take a bucket, or the buffer cannot be had.
        """
        ...


class BucketBuffer(Protocol):
    """Memory that both sides see; opened once a sync."""

    backend: str
    data: torch.Tensor

    def reserve(self, end_bytes: int) -> None:
        """Make sure that the first `end_bytes` bytes of `data` can be written."""
        ...

    def publish(self) -> None:
        """Wait until what was written can be read by others."""
        ...

    def handles(self) -> Sequence[Any]:
        """Return one handle an engine."""
        ...

    def close(self) -> None:
        """Free the memory. Never raises."""
        ...


class LocalEngineClient:
    """An engine of this process, for programs and tests without Ray; not for use inside a running event loop."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine

    def begin(self, policy_version: int) -> None:
        """See `EngineClient`."""
        asyncio.run(self._engine.begin_weight_update(policy_version))

    def receive(self, bucket: WeightBucket) -> None:
        """See `EngineClient`."""
        asyncio.run(self._engine.receive_weights(bucket))

    def finish(self) -> None:
        """See `EngineClient`."""
        asyncio.run(self._engine.finish_weight_update())


class BucketSender:
    """Sends through one kind of buffer.

    Args:
        open_buffer: makes a buffer of so many bytes for so many engines; it exists only during a sync.
        bucket_bytes: the buffer's size.
        checksum: let each engine verify the bytes that arrive.
    """

    def __init__(self, open_buffer: Callable[[int, int], BucketBuffer], *, bucket_bytes: int, checksum: bool) -> None:
        self._open_buffer = open_buffer
        self._bucket_bytes = bucket_bytes
        self._checksum = checksum

    def send(
        self, named_tensors: Iterator[tuple[str, torch.Tensor]], engines: Sequence[EngineClient], policy_version: int
    ) -> SyncReport:
        """See `WeightSender.send`. The buffer is gone when this returns or raises."""
        return send_buckets(
            named_tensors,
            engines,
            policy_version,
            open_buffer=lambda size_bytes: self._open_buffer(size_bytes, len(engines)),
            bucket_bytes=self._bucket_bytes,
            checksum=self._checksum,
        )


def send_buckets(
    named_tensors: Iterator[tuple[str, torch.Tensor]],
    engines: Sequence[EngineClient],
    policy_version: int,
    *,
    open_buffer: Callable[[int], BucketBuffer],
    bucket_bytes: int,
    checksum: bool,
) -> SyncReport:
    """Fill one buffer again and again, and hand each filling to all engines at once.

    Args:
        named_tensors: names and full tensors.
        engines: at least one.
        policy_version: carried to the engines.
        open_buffer: makes a buffer of so many bytes; it is opened anew, larger, only for a weight above `bucket_bytes`.
        bucket_bytes: the buffer's size.
        checksum: let each engine verify the bytes that arrive.
    """
    if not engines:
        raise WeightSyncError("there is no engine to send weights to")
    started = time.perf_counter()
    size_bytes = num_buckets = 0
    buffer: BucketBuffer | None = None
    specs: list[TensorSpec] = []
    with ThreadPoolExecutor(len(engines), thread_name_prefix="weight-sync") as pool:

        def flush() -> None:
            nonlocal num_buckets
            if buffer is not None and specs:
                buffer.publish()
                _hand_over(pool, buffer, tuple(specs), engines, checksum)
                num_buckets += 1
                specs.clear()

        try:
            _together(pool, [lambda engine=engine: engine.begin(policy_version) for engine in engines])
            for name, tensor in named_tensors:
                tensor = tensor.detach()
                offset = aligned(specs[-1].offset_bytes + specs[-1].size_bytes) if specs else 0
                if buffer is None or offset + tensor.nbytes > buffer.data.numel():
                    flush()
                    offset = 0
                    if buffer is None or tensor.nbytes > buffer.data.numel():
                        if buffer is not None:
                            buffer.close()
                        buffer = open_buffer(max(bucket_bytes, tensor.nbytes))
                specs.append(_write(buffer, name, tensor, offset))
                size_bytes += tensor.nbytes
            flush()
            _together(pool, [engine.finish for engine in engines])
        except BaseException:
            # Other ranks gather each weight together with this one: they must not be left waiting.
            for _ in named_tensors:
                pass
            raise
        finally:
            if buffer is not None:
                buffer.close()
    return SyncReport(seconds=time.perf_counter() - started, size_bytes=size_bytes, num_buckets=num_buckets)


def _write(buffer: BucketBuffer, name: str, tensor: torch.Tensor, offset: int) -> TensorSpec:
    end = offset + tensor.nbytes
    buffer.reserve(end)
    buffer.data[offset:end].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    return TensorSpec(
        name=name,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        offset_bytes=offset,
        size_bytes=tensor.nbytes,
    )


def _hand_over(
    pool: ThreadPoolExecutor,
    buffer: BucketBuffer,
    specs: tuple[TensorSpec, ...],
    engines: Sequence[EngineClient],
    checksum: bool,
) -> None:
    bucket = WeightBucket(backend=buffer.backend, tensors=specs, handle=None)
    if checksum:
        bucket = replace(bucket, checksum=bucket_checksum(buffer.data[: bucket.used_bytes].cpu().numpy(), specs))
    _together(
        pool,
        [
            lambda engine=engine, handle=handle: engine.receive(replace(bucket, handle=handle))
            for engine, handle in zip(engines, buffer.handles(), strict=True)
        ],
    )


def _together(pool: ThreadPoolExecutor, calls: Sequence[Callable[[], None]]) -> None:
    """Run the calls at once, wait for all of them, and raise the first error."""
    futures = [pool.submit(call) for call in calls]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise errors[0]
