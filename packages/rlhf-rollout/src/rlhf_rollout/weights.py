"""The receiver's half of weight sync: what a bucket of weights is. Torch-free, so that any process can carry one."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Where one weight lies in a bucket's buffer.

    Attributes:
        name: the weight's name in the Hugging Face checkpoint.
        dtype: torch's name for it without the prefix, such as "bfloat16".
        shape: as in the checkpoint.
        offset_bytes: from the start of the buffer, a multiple of 256.
        size_bytes: contiguous.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class WeightBucket:
    """A flat buffer of weights on its way to an engine.

    Attributes:
        backend: "shared_memory" (a POSIX segment on this host) or "ipc" (a CUDA allocation on this device).
        tensors: what lies in it.
        handle: the segment's name, or what torch needs to open the CUDA allocation in another process.
        checksum: of the buffer's bytes, in debug mode; None otherwise.
    """

    backend: str
    tensors: tuple[TensorSpec, ...]
    handle: Any
    checksum: int | None = None
