"""Weights in shared memory on this host. Torch-free except for `open_memory`."""

import errno
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf_data.errors import EngineError, WeightSyncError

if TYPE_CHECKING:
    import torch

_UNSEEN = (errno.ENOENT, errno.EACCES, errno.EPERM)


def map_segment(handle: tuple[str, int]) -> np.ndarray:
    """Return a segment that another process made, as a [n] uint8 array; it stays mapped while the array exists.

    `handle` is the path of the maker's descriptor in /proc, and a number that tells apart segments which have had the
    same path. Raises WeightSyncError when this process cannot see the segment, and EngineError when it has no memory or
    descriptors left for it.
    """
    path, _ = handle
    try:
        return np.memmap(path, np.uint8, "r+")
    except OSError as error:
        message = f"the weight segment {path} cannot be opened: {error.strerror}"
        if error.errno not in _UNSEEN:
            raise EngineError(message, hint="end other programs on this host, or raise its limits") from error
        raise WeightSyncError(
            message, hint="shared memory reaches only engines on the trainer's own host, and tcp reaches others"
        ) from error


def open_memory(handle: tuple[str, int], device: "torch.device") -> "torch.Tensor":
    """Return `map_segment` of `handle` as a flat uint8 tensor on the host, whatever the engine's `device`."""
    import torch

    return torch.from_numpy(map_segment(handle))


def opener() -> Callable[[Any, "torch.device"], "torch.Tensor"]:
    """Return `open_memory`, which keeps nothing between buckets."""
    return open_memory
