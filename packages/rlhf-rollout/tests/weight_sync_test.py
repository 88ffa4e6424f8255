"""Buckets of weights: their layout, checksums, and shared memory."""

import dataclasses
import pickle
import zlib

import numpy as np
import pytest

from rlhf_data.errors import WeightSyncError
from rlhf_rollout.weight_sync.bucket import TensorSlot, WeightBucket, aligned, bucket_checksum, verify_checksum
from rlhf_rollout.weight_sync.shared_memory import map_segment
from rollout_testing import shared_memory_bucket

SPECS = (TensorSlot("a", "uint8", (2,), 0, 2), TensorSlot("b", "uint8", (3,), 256, 3))


def test_aligned_rounds_up_to_256() -> None:
    assert [aligned(value) for value in (0, 1, 256, 257)] == [0, 256, 256, 512]


def test_bucket_used_bytes_end_with_the_last_weight() -> None:
    assert WeightBucket("shared_memory", SPECS, "x").used_bytes == 259
    assert WeightBucket("shared_memory", (), "x").used_bytes == 0


def test_bucket_survives_pickling() -> None:
    bucket = WeightBucket("shared_memory", SPECS, "x", 7)
    assert pickle.loads(pickle.dumps(bucket)) == bucket


def test_bucket_checksum_ignores_the_gaps() -> None:
    buffer = np.arange(300, dtype=np.uint16).astype(np.uint8)
    expected = zlib.crc32(bytes([0, 1, 0, 1, 2]))  # bytes 0..1, then 256..258, which are 0..2 again
    assert bucket_checksum(buffer, SPECS) == expected
    buffer[100] = 99
    assert bucket_checksum(buffer, SPECS) == expected


def test_verify_checksum_changed_byte_raises() -> None:
    buffer = np.zeros(300, np.uint8)
    bucket = WeightBucket("shared_memory", SPECS, "x", bucket_checksum(buffer, SPECS))
    verify_checksum(buffer, bucket)
    buffer[257] = 1
    with pytest.raises(WeightSyncError, match=r"2 weights \(a, b"):
        verify_checksum(buffer, bucket)
    verify_checksum(buffer, dataclasses.replace(bucket, checksum=None))


def test_map_segment_shows_what_the_sender_wrote() -> None:
    with shared_memory_bucket({"w": np.array([1.5, -2.0], np.float32)}, checksum=True) as bucket:
        segment = map_segment(bucket.handle)
        verify_checksum(segment, bucket)
        np.testing.assert_array_equal(segment[:8].view(np.float32), [1.5, -2.0])


def test_map_segment_outlives_its_name() -> None:
    with shared_memory_bucket({"w": np.array([3.0], np.float32)}) as bucket:
        segment = map_segment(bucket.handle)
    assert segment[:4].view(np.float32)[0] == 3.0


def test_map_segment_missing_raises_with_hint() -> None:
    with pytest.raises(WeightSyncError, match="hint: shared memory reaches engines on the trainer's own host only"):
        map_segment("rlhf-test-none")
