"""Buckets of weights: their description and their checks. Without torch."""

import logging
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from rlhf_data.errors import EngineError, WeightSyncError, nearest

ALIGNMENT_BYTES = 256
DRAFT = "draft model: "  # before the names of weights of the engine's draft model
_PAUSE_S = 1.0  # between two tries

T = TypeVar("T")
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """Where one weight lies in a bucket's buffer.

    Attributes:
        name: the weight's name in the Hugging Face checkpoint.
        dtype: torch's name for it without the prefix, such as "bfloat16".
        shape: as in the checkpoint.
        offset_bytes: from the start of the buffer, a multiple of 256.
        size_bytes: length; the weight is contiguous.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    size_bytes: int

    @property
    def place(self) -> slice:
        """Its bytes in the buffer."""
        return slice(self.offset_bytes, self.offset_bytes + self.size_bytes)


@dataclass(frozen=True, slots=True)
class WeightBucket:
    """A flat buffer of weights on its way to an engine.

    Attributes:
        medium: how the buffer reaches the engine, one of `MEDIA`.
        tensors: the weights in the buffer.
        handle: what `map_segment` needs to open the shared memory, or torch to open the CUDA allocation, elsewhere.
        checksum: CRC-32 of the buffer's bytes, in debug mode; None otherwise.
        kept: whether the sender sends later updates in the same buffer, so that the engine should keep it open.
    """

    medium: str
    tensors: tuple[TensorSlot, ...]
    handle: Any
    checksum: int | None = None
    kept: bool = False

    @property
    def used_bytes(self) -> int:
        """Bytes from the start of the buffer to the end of its last weight."""
        return max((tensor.place.stop for tensor in self.tensors), default=0)


def divided(bucket: WeightBucket) -> tuple[WeightBucket, WeightBucket]:
    """Return the weights of a bucket without `DRAFT` in their names, and those with it by their names without it.

    Neither part has the checksum, which is that of all of them.
    """
    drafted = [slot for slot in bucket.tensors if slot.name.startswith(DRAFT)]
    own = tuple(slot for slot in bucket.tensors if slot not in drafted)
    renamed = tuple(replace(slot, name=slot.name.removeprefix(DRAFT)) for slot in drafted)
    return replace(bucket, tensors=own, checksum=None), replace(bucket, tensors=renamed, checksum=None)


def aligned(offset_bytes: int) -> int:
    """Return the first multiple of 256 at or above `offset_bytes`."""
    return -(-offset_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def bucket_checksum(buffer: np.ndarray, tensors: tuple[TensorSlot, ...]) -> int:
    """Return the CRC-32 of the weights' bytes in a buffer [n] uint8, in order, without the gaps between them."""
    checksum = 0
    for tensor in tensors:
        checksum = zlib.crc32(buffer[tensor.place], checksum)
    return checksum


def check_tensor(spec: TensorSlot, expected: tuple[int, ...] | None, known: Iterable[str]) -> None:
    """Raise WeightSyncError unless a weight has the `expected` shape; None: the engine's model has no such weight."""
    if expected is None:
        guess = nearest(spec.name, known)
        hint = f"did you mean {guess!r}?" if guess else "trainer and engine hold different models"
        raise WeightSyncError(f"the engine's model has no weight {spec.name!r}", hint=hint)
    if tuple(spec.shape) != expected:
        message = f"the weight {spec.name!r} arrived with shape {tuple(spec.shape)}; the engine's model has {expected}"
        raise WeightSyncError(message)


def read_in_two_tries(read: Callable[[], T], between: Callable[[], None] = lambda: None) -> T:
    """Return what `read` returns. If it fails because weights did not arrive, call `between`, and try once more.

    A lost connection, or a moment without memory or descriptors, then costs a second and not an engine's restart.
    """
    try:
        return read()
    except (EngineError, MemoryError, OSError) as error:
        logger.warning("a bucket of weights did not arrive, and is read again: %s", error)
    between()
    time.sleep(_PAUSE_S)
    return read()


def verify_checksum(buffer: np.ndarray, bucket: WeightBucket) -> None:
    """Raise EngineError when the bucket carries a checksum and the buffer's bytes have another."""
    if bucket.checksum is None:
        return
    found = bucket_checksum(buffer, bucket.tensors)
    if found != bucket.checksum:
        names = ", ".join(tensor.name for tensor in bucket.tensors[:3])
        raise EngineError(
            f"a bucket of {len(bucket.tensors)} weights ({names} ...) has checksum {found:#010x}, but the sender "
            f"computed {bucket.checksum:#010x}",
            hint="the sender changed the buffer before the engine had read it, or they share no memory",
        )
