"""Buckets of weights: their layout, checksums, and shared memory."""

import contextlib
import dataclasses
import errno
import subprocess
import sys
import zlib

import numpy as np
import pytest

from rlhf_data.errors import EngineError, WeightSyncError
from rlhf_rollout.weights.bucket import (
    TensorSlot,
    WeightBucket,
    bucket_checksum,
    check_tensor,
    verify_checksum,
)
from rlhf_rollout.weights.shared_memory import map_segment
from rollout_testing import shared_memory_bucket
from weight_recorder import segments

SPECS = (TensorSlot("a", "uint8", (2,), 0, 2), TensorSlot("b", "uint8", (3,), 256, 3))


def test_buckets_and_their_shared_memory_need_no_torch() -> None:
    names = ("bucket", "buffer", "shared_memory")
    code = f"import sys\nfrom rlhf_rollout.weights import {', '.join(names)}\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_bucket_used_bytes_end_with_the_last_weight() -> None:
    assert WeightBucket("shared_memory", SPECS, "x").used_bytes == 259
    assert WeightBucket("shared_memory", (), "x").used_bytes == 0


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
    with pytest.raises(EngineError, match=r"2 weights \(a, b[^\n]*\n\nhint: the sender changed"):
        verify_checksum(buffer, bucket)
    verify_checksum(buffer, dataclasses.replace(bucket, checksum=None))
    slots = tuple(TensorSlot(name, "uint8", (1,), offset, 1) for offset, name in enumerate("abcd"))
    with pytest.raises(EngineError, match=r"a bucket of 4 weights \(a, b, c \.\.\.\) has checksum"):
        verify_checksum(buffer, dataclasses.replace(bucket, tensors=slots, checksum=1))


def test_map_segment_missing_raises_with_hint() -> None:
    with pytest.raises(WeightSyncError, match="hint: shared memory reaches only engines on the trainer's own host"):
        map_segment(("/proc/self/fd/999999", 0))


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.EMFILE, errno.ENFILE])
def test_map_segment_without_memory_or_descriptors_says_nothing_about_the_weights(number, monkeypatch) -> None:
    def full(*_: object) -> None:
        raise OSError(number, "full")

    monkeypatch.setattr(np, "memmap", full)
    with pytest.raises(EngineError, match=r"cannot be opened: full\s+hint: end other programs"):
        map_segment(("/proc/self/fd/0", 0))


def reader():
    torch = pytest.importorskip("torch")
    from rlhf_rollout.weights.reader import BucketReader

    return BucketReader("shared_memory", torch.device("cpu"))


def test_reader_weights_are_copies_that_the_sender_cannot_change() -> None:
    with shared_memory_bucket({"a": np.array([1.0, 2.0], np.float32)}) as bucket:
        ((_, tensor),) = reader().read(bucket)
        map_segment(bucket.handle)[:8] = 0
    assert tensor.tolist() == [1.0, 2.0]


def test_reader_reads_parts_of_a_limited_size_or_of_one_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    held = reader()
    monkeypatch.setattr("rlhf_rollout.weights.reader.PART_BYTES", 1024)
    # In bytes: 256, 512 and 256 fill a part; 1028 is a part of its own; the last two go together.
    sizes = {"a": 64, "b": 128, "c": 64, "d": 257, "e": 1, "f": 2}
    weights = {name: np.arange(size, dtype=np.float32) + size for name, size in sizes.items()}
    with shared_memory_bucket(weights, checksum=True) as bucket:
        parts = list(held.read_parts(bucket))
        map_segment(bucket.handle)[:] = 0
    assert [[name for name, _ in part] for part in parts] == [["a", "b", "c"], ["d"], ["e", "f"]]
    for part in parts:
        for name, tensor in part:
            assert tensor.tolist() == weights[name].tolist()


def test_reader_keeps_a_segment_after_an_update_only_if_the_sender_does(monkeypatch: pytest.MonkeyPatch) -> None:
    held = reader()
    opened = []
    original = held._open_memory
    monkeypatch.setattr(held, "_open_memory", lambda handle, device: opened.append(handle) or original(handle, device))
    with shared_memory_bucket({"a": np.ones(2, np.float32)}) as bucket:
        for kept, num_opened in ((False, 1), (True, 2), (True, 2), (False, 2), (False, 3)):
            assert len(held.view(dataclasses.replace(bucket, kept=kept))) == bucket.used_bytes
            held.end_update()
            assert len(opened) == num_opened
        held.view(dataclasses.replace(bucket, kept=True))
        held.close()
        held.view(bucket)
    assert len(opened) == 5


def test_reader_leaves_kept_segments_that_an_update_did_not_use() -> None:
    held = reader()
    before = segments()
    with contextlib.ExitStack() as stack:
        buckets = [shared_memory_bucket({"a": np.full(2, number, np.float32)}) for number in range(4)]
        kept = [dataclasses.replace(stack.enter_context(bucket), kept=True) for bucket in buckets]
        for update in ([0, 1, 2], [0, 1, 2], [0], [3, 0]):  # numbers of the buckets
            for number in update:
                ((_, tensor),) = held.read(kept[number])
                assert tensor.tolist() == [number, number]
            held.end_update()
            assert [handle for handle, _ in held._opened] == [kept[number].handle for number in update]
        held.read(kept[1])  # the sender has given up all other buffers
        assert [handle for handle, _ in held._opened] == [kept[1].handle]
    held.close()
    assert segments() == before


def test_reader_another_medium_or_a_bucket_beyond_its_buffer_or_a_wrong_checksum_raises() -> None:
    with shared_memory_bucket({"a": np.ones(2, np.float32)}, checksum=True) as bucket:
        with pytest.raises(WeightSyncError, match="arrived by ipc, but the engine was built for shared_memory"):
            reader().read(dataclasses.replace(bucket, medium="ipc"))
        slot = dataclasses.replace(bucket.tensors[0], size_bytes=257)
        with pytest.raises(EngineError, match="a bucket of 257 bytes arrived in a buffer of 256 bytes"):
            reader().read(dataclasses.replace(bucket, tensors=(slot,)))
        whole = dataclasses.replace(bucket.tensors[0], size_bytes=256, shape=(64,))
        reader().read(dataclasses.replace(bucket, tensors=(whole,), checksum=None))
        with pytest.raises(EngineError, match="checksum"):
            reader().read(dataclasses.replace(bucket, checksum=1))


def test_check_tensor_names_the_nearest_weight_or_both_shapes() -> None:
    slot = TensorSlot("model.norm.weight", "float32", (4,), 0, 16)
    check_tensor(slot, (4,), ["model.norm.weight"])
    with pytest.raises(WeightSyncError, match=r"no weight 'model.norm.weight'\s+hint: did you mean 'model.norm2"):
        check_tensor(slot, None, ["model.norm2.weight"])
    with pytest.raises(WeightSyncError, match=r"\s+hint: trainer and engine hold different models"):
        check_tensor(slot, None, ["embedding"])
    with pytest.raises(WeightSyncError, match=r"arrived with shape \(4,\); the engine's model has \(5,\)"):
        check_tensor(slot, (5,), [])
