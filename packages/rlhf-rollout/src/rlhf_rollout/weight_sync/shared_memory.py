"""Weights in a POSIX shared-memory segment on this host. Torch-free except for `open_memory`."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rlhf_data.errors import WeightSyncError

if TYPE_CHECKING:
    import torch

SHARED_MEMORY_DIR = Path("/dev/shm")


def map_segment(name: str) -> np.ndarray:
    """Return a segment that another process made, as a [n] uint8 array; it stays mapped while the array exists.

    Raises WeightSyncError when the segment cannot be opened.
    """
    try:
        # Opened as a file, because multiprocessing.shared_memory would delete the segment when this process ends.
        return np.memmap(SHARED_MEMORY_DIR / name, np.uint8, "r+")
    except OSError as error:
        message = f"the weight segment {SHARED_MEMORY_DIR / name} cannot be opened: {error.strerror}"
        raise WeightSyncError(message, hint="shared memory reaches only engines on the trainer's own host") from error


def open_memory(handle: str, device: "torch.device") -> "torch.Tensor":
    """Return the segment named `handle` as a flat uint8 tensor on the host, whatever the engine's `device`."""
    import torch

    return torch.from_numpy(map_segment(handle))
