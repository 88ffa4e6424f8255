"""Weight sync through shared memory on this host, from tensors on any device."""

import errno
import mmap
import os
import secrets

import torch

from rlhf_data.errors import WeightSyncError
from rlhf_rollout.weight_sync import Medium
from rlhf_rollout.weight_sync.shared_memory import SHARED_MEMORY_DIR


class SharedMemoryBuffer:
    """A `BucketBuffer` in a file on tmpfs, mapped as a flat tensor."""

    medium: Medium = "shared_memory"

    def __init__(self, size_bytes: int, num_engines: int) -> None:
        name = f"rlhf-weights-{os.getpid()}-{secrets.token_hex(4)}"
        self._path = SHARED_MEMORY_DIR / name
        self.handles = [name] * num_engines
        self._reserved_bytes = 0
        try:
            self._descriptor: int | None = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        except OSError as error:
            message = f"cannot create shared memory in {SHARED_MEMORY_DIR}: {error.strerror}"
            raise WeightSyncError(
                message, hint=f"weight sync needs Linux with a tmpfs at {SHARED_MEMORY_DIR}"
            ) from error
        try:
            os.ftruncate(self._descriptor, size_bytes)
            self._map = mmap.mmap(self._descriptor, size_bytes)
            self.data = torch.frombuffer(self._map, dtype=torch.uint8)
        except BaseException:
            self.close()
            raise

    def reserve(self, end_bytes: int) -> None:
        """See `BucketBuffer`. Raises WeightSyncError when the tmpfs is full.

        tmpfs allocates pages on first use. Without this call, writing a page that does not fit would kill the process
        with SIGBUS.
        """
        if end_bytes <= self._reserved_bytes:
            return
        try:
            os.posix_fallocate(self._descriptor, self._reserved_bytes, end_bytes - self._reserved_bytes)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            message = f"{SHARED_MEMORY_DIR} has no room for {end_bytes} bytes of weights"
            hint = f"make {SHARED_MEMORY_DIR} larger (docker run --shm-size), or use smaller buckets"
            raise WeightSyncError(message, hint=hint) from error
        self._reserved_bytes = end_bytes

    def publish(self) -> None:
        """See `BucketBuffer`. Does nothing: a copy from a GPU to pageable memory returns when it is complete."""

    def close(self) -> None:
        """See `BucketBuffer`. Removes the file name; the memory is freed when the last process unmaps it."""
        self._path.unlink(missing_ok=True)
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


open_buffer = SharedMemoryBuffer
