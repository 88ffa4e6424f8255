"""Buckets of weights as torch tensors: the receiving end of shared memory and of CUDA IPC."""

from typing import Any

import torch

from rlhf_data.errors import WeightSyncError
from rlhf_rollout.weights import WeightBucket, map_segment, verify_checksum


class BucketReader:
    """Reads the buckets of one update; memory is mapped once and held until `close`."""

    def __init__(self, backend: str, device: torch.device) -> None:
        self.backend = backend
        self.device = device
        self._opened: tuple[Any, torch.Tensor] | None = None

    def read(self, bucket: WeightBucket) -> list[tuple[str, torch.Tensor]]:
        """Return the bucket's weights as tensors of their own on `device`: the sender may reuse its buffer.

        A loader may keep a weight until the rest of its layer has come, in a later bucket, so views would not do.
        Raises WeightSyncError for another backend than the engine's, memory that cannot be opened, or a wrong checksum.
        """
        if bucket.backend != self.backend:
            raise WeightSyncError(f"a bucket came by {bucket.backend}, the engine was built for {self.backend}")
        # torch counts one release for each export, so an export is opened once however many buckets it carries.
        if self._opened is None or self._opened[0] != bucket.handle:
            self.close()
            self._opened = bucket.handle, self._open(bucket.handle)
        source = self._opened[1]
        if bucket.used_bytes > source.numel():
            raise WeightSyncError(f"a bucket of {bucket.used_bytes} bytes came in a buffer of {source.numel()} bytes")
        flat = source[: bucket.used_bytes]
        if bucket.checksum is not None:
            verify_checksum(flat.cpu().numpy(), bucket)
        flat = flat.to(self.device, copy=True)
        if flat.is_cuda:
            torch.cuda.synchronize(flat.device)
        return [
            (spec.name, flat[spec.place].view(getattr(torch, spec.dtype)).view(spec.shape)) for spec in bucket.tensors
        ]

    def close(self) -> None:
        """Let go of the sender's memory."""
        self._opened = None

    def _open(self, handle: Any) -> torch.Tensor:
        if self.backend == "shared_memory":
            return torch.from_numpy(map_segment(handle))
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        device_uuid, arguments = handle
        index = self.device.index if self.device.index is not None else torch.cuda.current_device()
        own_uuid = str(torch.cuda.get_device_properties(index).uuid)
        if own_uuid != device_uuid:
            message = f"the weights lie on GPU {device_uuid}, the engine runs on GPU {own_uuid}"
            hint = "use weight_transfer shared_memory when trainer and engine have GPUs of their own"
            raise WeightSyncError(message, hint=hint)
        # The seventh argument is the sender's number for the device, which may differ in this process.
        return rebuild_cuda_tensor(*(*arguments[:6], index, *arguments[7:]))
