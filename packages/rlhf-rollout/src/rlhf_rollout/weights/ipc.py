"""Weights in a CUDA allocation that the trainer shares with the engines on its own GPU."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from rlhf_data.errors import EngineError, WeightSyncError
from rlhf_rollout.weights.buffer import BucketBuffer

_LARGE_BUCKET_BYTES = 2 << 30


class Buffer(BucketBuffer):
    """Memory of the current GPU, exported once per engine."""

    is_mapped = True

    def __init__(self, size_bytes: int, engines: Sequence[str]) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        self.data = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        try:
            # Each handle is the GPU's UUID and the arguments with which torch opens the export; an engine on several
            # GPUs gets those of all its senders. Each engine needs an export of its own, because torch counts one
            # release per export before it frees the buffer.
            self.handles = [((uuid, reduce_tensor(self.data)[1]),) for _ in engines]
        except RuntimeError as error:
            hint = "unset expandable_segments in PYTORCH_CUDA_ALLOC_CONF, or use shared_memory"
            raise WeightSyncError(f"CUDA cannot export the weight buffer: {error}", hint=hint) from error

    def publish(self) -> None:
        """See `BucketBuffer`. Waits for the copies on the current stream."""
        torch.cuda.current_stream(self.data.device).synchronize()

    def close(self) -> None:
        """See `BucketBuffer`. torch frees the memory when every engine has released it."""
        self.handles = []
        self.data = self.data.new_empty(0)
        torch.cuda.ipc_collect()

    @staticmethod
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


def room() -> int:
    """Return how many bytes a large bucket may have: 2 GiB, or half of the memory that is free or cached by PyTorch."""
    free_bytes, _ = torch.cuda.mem_get_info()
    cached_bytes = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return min(_LARGE_BUCKET_BYTES, (free_bytes + cached_bytes) // 2)
