"""Weights to send, an engine that notes what it is told about them, and the memory that a sender holds."""

import asyncio
import contextlib
import gc
import zlib
from pathlib import Path

import torch

from rlhf_data.errors import WeightSyncError
from rlhf_rollout.weights.bucket import WeightBucket
from rlhf_rollout.weights.shared_memory import map_segment

gc.freeze()  # collections in `segments` need not look at libraries, which are a million objects

WEIGHTS = {
    "embed": torch.arange(96, dtype=torch.float32).view(32, 3),  # 384 bytes
    "norm": torch.full((7,), 0.5, dtype=torch.bfloat16),  # 14 bytes
    "head": torch.arange(64, dtype=torch.int64),  # 512 bytes
}


def segments() -> set[str]:
    """Return the descriptors of this process that are memory for weights, without what earlier tests have left."""
    gc.collect()
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor by which the folder is read
            if path.readlink().name.startswith("memfd:rlhf-weights"):
                found.add(path.name)
    return found


def crc(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.contiguous().view(torch.uint8).numpy())


class Recorder:
    """An engine that notes what it is told, and may fail."""

    def __init__(
        self,
        fail_at: str | None = None,
        gate: asyncio.Barrier | None = None,
        error: type[BaseException] = WeightSyncError,
    ) -> None:
        self._error = error
        self.events: list[str] = []
        self.buckets: list[WeightBucket] = []
        self.contents: list[bytes] = []
        self._fail_at = fail_at
        self._gate = gate

    async def _note(self, event: str) -> None:
        self.events.append(event)
        if self._gate is not None:
            await asyncio.wait_for(self._gate.wait(), 60)
        if event.split()[0] == self._fail_at:
            raise self._error(f"told to fail at {event}")

    async def begin_weight_update(self, policy_version: int) -> None:
        await self._note(f"begin {policy_version}")

    async def receive_weights(self, bucket: WeightBucket) -> None:
        self.buckets.append(bucket)
        self.contents.append(bytes(map_segment(bucket.handle)[: bucket.used_bytes]))
        await self._note("receive")

    async def finish_weight_update(self) -> None:
        await self._note("finish")
