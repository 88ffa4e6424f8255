"""Weights in shared memory on this host, from tensors on any device. Its receiving half works without torch."""

import errno
import itertools
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from rlhf_data.errors import EngineError, WeightSyncError
from rlhf_rollout.weights.buffer import HOST_WINDOW, BucketBuffer, no_memory

if TYPE_CHECKING:
    import torch

_UNSEEN = (errno.ENOENT, errno.EACCES, errno.EPERM)
_numbers = itertools.count()  # a later buffer may have the descriptor, and so the path, of an earlier one


class Buffer(BucketBuffer):
    """Memory without a name, mapped as a flat tensor.

    Other processes of this user open it by its path in /proc. The kernel frees the memory when
    the last process unmaps it or dies, however that happens. The size of /dev/shm does not limit it.
    """

    window = HOST_WINDOW
    is_mapped = True
    may_read_again = True

    def __init__(self, size_bytes: int, engines: Sequence[str]) -> None:
        import torch

        self._reserved_bytes = 0
        try:
            self._descriptor: int | None = os.memfd_create("rlhf-weights")
        except (OSError, AttributeError) as error:
            raise WeightSyncError(f"cannot create shared memory: {error}", hint="weight sync needs Linux") from error
        path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        self.handles = [(path, next(_numbers))] * len(engines)
        try:
            os.ftruncate(self._descriptor, size_bytes)
            self.data = torch.from_file(path, shared=True, size=size_bytes, dtype=torch.uint8)
        except (OSError, RuntimeError) as error:
            self.close()
            raise no_memory(size_bytes, error) from error

    def reserve(self, end_bytes: int) -> None:
        """See `BucketBuffer`. Raises WeightSyncError when the host has no memory left.

        Pages are allocated on first use. Without this call, writing a page that does not fit would kill the process
        with SIGBUS.
        """
        if end_bytes <= self._reserved_bytes:
            return
        try:
            os.posix_fallocate(self._descriptor, self._reserved_bytes, end_bytes - self._reserved_bytes)
        except OSError as error:
            raise no_memory(end_bytes, error.strerror) from error
        self._reserved_bytes = end_bytes

    # It need not publish anything: a copy from a GPU to pageable memory returns when it is complete.

    def close(self) -> None:
        """See `BucketBuffer`. The memory is freed when the last process unmaps it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    @staticmethod
    def open_memory(handle: tuple[str, int], device: "torch.device") -> "torch.Tensor":
        """Return `map_segment` of `handle` as a flat uint8 tensor on the host, whatever the engine's `device`."""
        import torch

        return torch.from_numpy(map_segment(handle))


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
        hint = "shared memory reaches only engines on the trainer's own host, and tcp reaches others"
        raise WeightSyncError(message, hint=hint) from error
