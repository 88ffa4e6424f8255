"""Weights through CUDA IPC: one flat buffer on the GPU that the trainer and its engines share."""

import torch

from rlhf_data.errors import WeightSyncError
from rlhf_rollout.weight_sync import Medium


class CudaIpcBuffer:
    """A flat allocation on the current GPU, exported once for each engine."""

    medium: Medium = "ipc"

    def __init__(self, size_bytes: int, num_engines: int) -> None:
        from torch.multiprocessing.reductions import reduce_tensor

        device = torch.device("cuda", torch.cuda.current_device())
        self.data = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        try:
            # The GPU's id, and what torch needs to open the export. torch frees the buffer after one release per
            # export, so each engine needs an export of its own.
            self.handles = [(uuid, reduce_tensor(self.data)[1]) for _ in range(num_engines)]
        except RuntimeError as error:
            hint = "unset expandable_segments in PYTORCH_CUDA_ALLOC_CONF, or use shared_memory"
            raise WeightSyncError(f"CUDA does not export the weight buffer: {error}", hint=hint) from error

    def reserve(self, end_bytes: int) -> None:
        """See `BucketBuffer`: all of it was allocated."""

    def publish(self) -> None:
        """See `BucketBuffer`: wait for the copies on the stream."""
        torch.cuda.current_stream(self.data.device).synchronize()

    def close(self) -> None:
        """See `BucketBuffer`: torch keeps the memory until every engine has let go of it."""
        self.handles = []
        self.data = self.data.new_empty(0)
        torch.cuda.ipc_collect()


open_buffer = CudaIpcBuffer
