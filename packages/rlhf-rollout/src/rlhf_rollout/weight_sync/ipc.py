"""Weights in a CUDA allocation that the trainer exported to the engines on its own GPU."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from rlhf_data.errors import EngineError, WeightSyncError


def open_memory(handle: Sequence[tuple[str, tuple[Any, ...]]], device: torch.device) -> torch.Tensor:
    """Return the exported allocation as a flat uint8 tensor.

    Args:
        handle: for each GPU of the engine, its UUID, and the arguments by which torch opens the allocation there.
        device: the device of this worker of the engine.

    Raises:
        WeightSyncError: the worker runs on another GPU.
        EngineError: CUDA cannot open it.
    """
    index = device.index if device.index is not None else torch.cuda.current_device()
    own_uuid = str(torch.cuda.get_device_properties(index).uuid)
    arguments = dict(handle).get(own_uuid)
    if arguments is None:
        gpus = ", ".join(uuid for uuid, _ in handle)
        message = f"the weights are on GPU {gpus}, but the engine runs on GPU {own_uuid}"
        hint = "use weight_transfer shared_memory when trainer and engine run on different GPUs"
        raise WeightSyncError(message, hint=hint)
    # The seventh argument is the sender's index of the device, which may differ in this process.
    try:
        return rebuild_cuda_tensor(*(*arguments[:6], index, *arguments[7:]))
    except RuntimeError as error:
        raise EngineError(f"CUDA cannot open the buffer of weights: {error}") from error


def opener() -> Callable[[Any, torch.device], torch.Tensor]:
    """Return `open_memory`, which keeps nothing between buckets."""
    return open_memory
