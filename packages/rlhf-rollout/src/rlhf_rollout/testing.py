"""Helpers for tests of engines: buckets of weights without a trainer."""

import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np

from rlhf_rollout.weights import SHARED_MEMORY_DIR, TensorSpec, WeightBucket, aligned, bucket_checksum


@contextmanager
def shared_memory_bucket(weights: Mapping[str, np.ndarray], *, checksum: bool = False) -> Iterator[WeightBucket]:
    """Yield a bucket that holds `weights` in shared memory; the segment goes with the context."""
    specs, offset = [], 0
    for name, array in weights.items():
        specs.append(TensorSpec(name, array.dtype.name, array.shape, offset, array.nbytes))
        offset = aligned(offset + array.nbytes)
    buffer = np.zeros(max(offset, 1), np.uint8)
    for spec, array in zip(specs, weights.values(), strict=True):
        buffer[spec.offset_bytes : spec.offset_bytes + spec.size_bytes] = (
            np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        )
    name = f"rlhf-test-{os.getpid()}-{secrets.token_hex(4)}"
    path = SHARED_MEMORY_DIR / name
    path.write_bytes(buffer.tobytes())
    try:
        yield WeightBucket(
            "shared_memory", tuple(specs), name, bucket_checksum(buffer, tuple(specs)) if checksum else None
        )
    finally:
        path.unlink()
