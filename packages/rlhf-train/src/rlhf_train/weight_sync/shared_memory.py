"""Weight sync through shared memory on this host, from tensors on any device."""

import itertools
import os
from collections.abc import Callable, Sequence

import torch

from rlhf_data.errors import WeightSyncError
from rlhf_rollout.weight_sync import Medium

_numbers = itertools.count()  # a later buffer may have the descriptor, and so the path, of an earlier one


class SharedMemoryBuffer:
    """A `BucketBuffer` in memory without a name, mapped as a flat tensor.

    Other processes of this user open it by its path in /proc. The kernel frees the memory when
    the last process unmaps it or dies, however that happens. The size of /dev/shm does not limit it.
    """

    medium: Medium = "shared_memory"
    holds_two = False

    def __init__(self, size_bytes: int, engines: Sequence[str]) -> None:
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
        except BaseException:
            self.close()
            raise

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
            message = f"the host has no memory for {end_bytes} bytes of weights: {error.strerror}"
            raise WeightSyncError(message, hint="end other programs, or use a smaller model") from error
        self._reserved_bytes = end_bytes

    def publish(self) -> None:
        """See `BucketBuffer`. Does nothing: a copy from a GPU to pageable memory returns when it is complete."""

    def settle(self) -> None:
        """See `BucketBuffer`. Engines have read the buffer when they answer."""

    def close(self) -> None:
        """See `BucketBuffer`. The memory is freed when the last process unmaps it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def opener(workers_per_engine: int) -> Callable[[int, Sequence[str]], SharedMemoryBuffer]:
    """Return the function that opens buffers."""
    return SharedMemoryBuffer
