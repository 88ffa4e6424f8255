"""Reads buckets of weights as torch tensors."""

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from rlhf_data.errors import EngineError, WeightSyncError
from rlhf_rollout.weights import Medium
from rlhf_rollout.weights.bucket import WeightBucket, read_in_two_tries, verify_checksum
from rlhf_rollout.weights.buffer import buffer_class

PART_BYTES = 256 << 20


class BucketReader:
    """Reads buckets.

    The sender's memory is mapped once. It stays mapped until the sender has used as many other buffers as its medium
    has in turn, until the end of an update that did not use it, or `close`.
    """

    def __init__(self, medium: Medium, device: torch.device) -> None:
        self.medium = medium
        self.device = device
        form = buffer_class(medium)
        self._may_read_again = form.may_read_again
        self._open_memory = form.receiver()
        # What is read anew for each filling would be kept for nothing.
        self._most_opened = form.window if form.is_mapped else 1
        self._opened: list[tuple[Any, torch.Tensor]] = []  # handles and memory, the oldest first
        self._used: list[Any] = []  # handles of this update
        self._kept = False

    def read(self, bucket: WeightBucket) -> list[tuple[str, torch.Tensor]]:
        """Return copies of the bucket's weights on `device`, so that the sender may reuse its buffer.

        Views would not be safe: a loader may keep a weight until the rest of its layer arrives in a later bucket.
        Raises as `view`.
        """
        return list(itertools.chain.from_iterable(self.read_parts(bucket)))

    def read_parts(self, bucket: WeightBucket) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Yield what `read` returns in parts of at most 256 MiB, so that not all copies are in memory at once.

        A larger weight is a part by itself.
        """
        source = self.view(bucket)
        slots = list(bucket.tensors)
        while slots:
            start = slots[0].offset_bytes
            number = max(sum(slot.place.stop - start <= PART_BYTES for slot in slots), 1)
            part, slots = slots[:number], slots[number:]
            flat = source[start : part[-1].place.stop].to(self.device, copy=True)
            self.settle()
            copies = [flat[slot.offset_bytes - start :][: slot.size_bytes] for slot in part]
            yield [
                (slot.name, data.view(getattr(torch, slot.dtype)).view(slot.shape))
                for slot, data in zip(part, copies, strict=True)
            ]

    def view(self, bucket: WeightBucket) -> torch.Tensor:
        """Return the used part of the bucket's buffer, [used_bytes] uint8. It may be the sender's own memory.

        Raises WeightSyncError for another medium than the engine's, or memory that it can never open, and EngineError
        for weights that did not arrive, or not as they were sent. What may be transient is tried twice where
        `BucketBuffer.may_read_again`.
        """
        if bucket.medium != self.medium:
            raise WeightSyncError(f"a bucket arrived by {bucket.medium}, but the engine was built for {self.medium}")
        if self._may_read_again:
            return read_in_two_tries(lambda: self._view(bucket), between=self.close)
        return self._view(bucket)

    def _view(self, bucket: WeightBucket) -> torch.Tensor:
        # torch counts one release per export, so an export is opened once for all buckets that it carries.
        source = next((memory for handle, memory in self._opened if handle == bucket.handle), None)
        if source is None:
            # What this update has not used may be closed at the sender, whose memory would not be freed.
            used = [item for item in self._opened if item[0] in self._used]
            self._opened = used[max(len(used) + 1 - self._most_opened, 0) :]
            source = self._open_memory(bucket.handle, self.device)
            self._opened.append((bucket.handle, source))
        if bucket.handle not in self._used:
            self._used.append(bucket.handle)
            del self._used[: -self._most_opened]
        self._kept = bucket.kept
        if bucket.used_bytes > source.numel():
            raise EngineError(f"a bucket of {bucket.used_bytes} bytes arrived in a buffer of {source.numel()} bytes")
        flat = source[: bucket.used_bytes]
        if bucket.checksum is not None:
            verify_checksum(flat.cpu().numpy(), bucket)
        return flat

    def settle(self) -> None:
        """Wait for the device's copies: the sender writes its next bucket once the engine has answered."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def end_update(self) -> None:
        """Unmap the sender's memory, except for what the sender keeps for the next update."""
        if not self._kept:
            self.close()
        self._opened = [item for item in self._opened if item[0] in self._used]
        self._used.clear()

    def close(self) -> None:
        """Unmap the sender's memory."""
        self._opened.clear()
        self._used.clear()
