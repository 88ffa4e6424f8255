"""Weight sync through CUDA IPC: a flat buffer on the GPU that the trainer shares with the engines on that GPU."""

from collections.abc import Callable, Sequence

import torch

from rlhf_data.errors import WeightSyncError
from rlhf_rollout.weight_sync import Medium

_LARGE_BUCKET_BYTES = 2 << 30


class CudaIpcBuffer:
    """A `BucketBuffer` in the memory of the current GPU, exported once per engine."""

    medium: Medium = "ipc"
    holds_two = False

    def __init__(self, size_bytes: int, engines: Sequence[str]) -> None:
        from torch.multiprocessing.reductions import reduce_tensor

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

    def reserve(self, end_bytes: int) -> None:
        """See `BucketBuffer`. Does nothing, because the whole buffer is allocated from the start."""

    def publish(self) -> None:
        """See `BucketBuffer`. Waits for the copies on the current stream."""
        torch.cuda.current_stream(self.data.device).synchronize()

    def settle(self) -> None:
        """See `BucketBuffer`. Engines have read the buffer when they answer."""

    def close(self) -> None:
        """See `BucketBuffer`. torch frees the memory when every engine has released it."""
        self.handles = []
        self.data = self.data.new_empty(0)
        torch.cuda.ipc_collect()


def opener(workers_per_engine: int) -> Callable[[int, Sequence[str]], CudaIpcBuffer]:
    """Return the function that opens buffers."""
    return CudaIpcBuffer


def room() -> int:
    """Return how many bytes a large bucket may have: 2 GiB, or half of the memory that is free or cached by PyTorch."""
    free_bytes, _ = torch.cuda.mem_get_info()
    cached_bytes = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return min(_LARGE_BUCKET_BYTES, (free_bytes + cached_bytes) // 2)
