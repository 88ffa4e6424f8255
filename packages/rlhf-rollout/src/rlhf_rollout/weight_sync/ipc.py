"""Weights in a CUDA allocation that the trainer exported to the engines on its own GPU."""

from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from rlhf_data.errors import WeightSyncError


def open_memory(handle: tuple[str, tuple[Any, ...]], device: torch.device) -> torch.Tensor:
    """Return the exported allocation as a flat uint8 tensor.

    Args:
        handle: the UUID of the GPU that holds the allocation, and the arguments by which torch opens it.
        device: the engine's device.

    Raises:
        WeightSyncError: the engine runs on another GPU.
    """
    device_uuid, arguments = handle
    index = device.index if device.index is not None else torch.cuda.current_device()
    own_uuid = str(torch.cuda.get_device_properties(index).uuid)
    if own_uuid != device_uuid:
        message = f"the weights are on GPU {device_uuid}, but the engine runs on GPU {own_uuid}"
        hint = "use weight_transfer shared_memory when trainer and engine run on different GPUs"
        raise WeightSyncError(message, hint=hint)
    # The seventh argument is the sender's index of the device, which may differ in this process.
    return rebuild_cuda_tensor(*(*arguments[:6], index, *arguments[7:]))
