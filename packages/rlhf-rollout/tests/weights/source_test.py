"""Packing weights into buckets, the buffer they lie in, and failing engines; the engine at the other end is a fake."""

import asyncio
import gc
import os
import zlib
from collections.abc import Iterator

import pytest
import torch

from rlhf_data.errors import ConfigError, EngineError, WeightSyncError
from rlhf_rollout.engines.fake import FakeEngine
from rlhf_rollout.weights import ipc, shared_memory
from rlhf_rollout.weights.bucket import WeightBucket
from rlhf_rollout.weights.source import WeightSource
from weight_recorder import WEIGHTS, Recorder, crc, segments


def test_updates_leave_no_file_open() -> None:
    source = WeightSource("shared_memory", bucket_bytes=512)
    num_open = []
    gc.disable()  # it would close what was forgotten
    try:
        for version in range(3):
            source.send(iter(WEIGHTS.items()), [FakeEngine()], version)
            num_open.append(len(os.listdir("/proc/self/fd")))
    finally:
        gc.enable()
    assert num_open[0] == num_open[1] == num_open[2]


def test_send_fills_buckets_in_order_at_aligned_offsets() -> None:
    engine = Recorder()
    WeightSource("shared_memory", bucket_bytes=1024).send(iter(WEIGHTS.items()), [engine], 1)
    assert engine.events == ["begin 1", "receive", "receive", "finish"]
    # 384 bytes, then 14 at 512; 512 more at 768 would end at 1280, beyond 1024.
    assert [[(spec.name, spec.offset_bytes) for spec in bucket.tensors] for bucket in engine.buckets] == [
        [("embed", 0), ("norm", 512)],
        [("head", 0)],
    ]
    norm = engine.buckets[0].tensors[1]
    assert (norm.dtype, norm.shape, norm.size_bytes) == ("bfloat16", (7,), 14)
    assert engine.buckets[0].checksum is None
    assert engine.contents[1] == WEIGHTS["head"].numpy().tobytes()


@pytest.mark.parametrize("bucket_bytes", [100, 1])
def test_send_weight_above_the_bucket_gets_its_own(bucket_bytes: int) -> None:
    engine = Recorder()
    report = WeightSource("shared_memory", bucket_bytes=bucket_bytes).send(iter(WEIGHTS.items()), [engine], 1)
    assert report.num_buckets == 3
    assert [len(content) for content in engine.contents] == [384, 14, 512]


def test_send_reads_transposed_and_gathered_tensors_lazily() -> None:
    taken: list[str] = []

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        for name in ("a", "b"):
            taken.append(name)
            yield name, torch.arange(6.0).view(2, 3).t()

    engine = Recorder()
    WeightSource("shared_memory").send(gathered(), [engine], 1)
    assert taken == ["a", "b"]
    assert engine.buckets[0].tensors[0].shape == (3, 2)
    assert torch.frombuffer(bytearray(engine.contents[0][:24]), dtype=torch.float32).tolist() == [0, 3, 1, 4, 2, 5]


def test_send_hands_a_bucket_to_all_engines_at_once() -> None:
    # Each call waits until the other engine's has begun: calls one after another would never pass.
    gate = asyncio.Barrier(2)
    engines = [Recorder(gate=gate), Recorder(gate=gate)]
    WeightSource("shared_memory").send(iter(WEIGHTS.items()), engines, 1)
    assert engines[0].events == engines[1].events == ["begin 1", "receive", "finish"]


@pytest.mark.parametrize("error", [WeightSyncError, KeyboardInterrupt])
@pytest.mark.parametrize("fail_at", ["begin", "receive", "finish"])
def test_send_failing_engine_raises_and_frees_the_segment(fail_at: str, error: type[BaseException]) -> None:
    weights = iter(WEIGHTS.items())
    with pytest.raises(error, match=f"told to fail at {fail_at}"):
        WeightSource("shared_memory", bucket_bytes=400).send(weights, [Recorder(), Recorder(fail_at, error=error)], 1)
    assert segments() == set()
    # Ranks that gather along must not wait for this one: the weights were taken to their end.
    assert next(weights, None) is None


def test_send_failing_source_raises_and_frees_the_segment() -> None:
    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.zeros(4)
        raise RuntimeError("gathering failed")

    with pytest.raises(RuntimeError, match="gathering failed"):
        WeightSource("shared_memory").send(gathered(), [Recorder()], 1)
    assert segments() == set()


def test_send_without_engines_raises() -> None:
    with pytest.raises(WeightSyncError, match="no engine"):
        WeightSource("shared_memory").send(iter(()), [], 1)


def test_weight_source_unknown_medium_raises_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean `shared_memory`"):
        WeightSource("sharedmemory")
    with pytest.raises(ConfigError, match="bucket_bytes is 0"):
        WeightSource("shared_memory", bucket_bytes=0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_weight_source_ipc_without_gpu_raises_with_hint() -> None:
    with pytest.raises(ConfigError, match="hint: use shared_memory"):
        WeightSource("ipc")


def test_send_with_checksum_lets_every_bucket_carry_that_of_its_bytes() -> None:
    engine = Recorder()
    WeightSource("shared_memory", bucket_bytes=1024, checksum=True).send(iter(WEIGHTS.items()), [engine], 1)
    # The gap behind "embed" does not count.
    together = zlib.crc32(WEIGHTS["norm"].view(torch.uint8).numpy(), crc(WEIGHTS["embed"]))
    assert [bucket.checksum for bucket in engine.buckets] == [together, crc(WEIGHTS["head"])]


def test_send_publishes_each_filling_before_an_engine_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    class Buffer(shared_memory.Buffer):
        def publish(self) -> None:
            order.append("publish")

    class Reading(Recorder):
        async def receive_weights(self, bucket: WeightBucket) -> None:
            order.append("read")

    monkeypatch.setattr(shared_memory, "Buffer", Buffer)
    WeightSource("shared_memory", bucket_bytes=1024).send(iter(WEIGHTS.items()), [Reading()], 1)
    # The second bucket may be filled before or after the first one is read.
    assert order in (["publish", "read"] * 2, ["publish", "publish", "read", "read"])


def test_send_failing_engine_waits_for_the_others_before_the_segment_goes() -> None:
    is_asked = asyncio.Event()

    class Failing(Recorder):
        async def receive_weights(self, bucket: WeightBucket) -> None:
            await asyncio.wait_for(is_asked.wait(), 60)
            await super().receive_weights(bucket)

    class Slow(Recorder):
        async def receive_weights(self, bucket: WeightBucket) -> None:
            is_asked.set()
            await asyncio.sleep(0.1)
            await super().receive_weights(bucket)  # maps the segment, which must still be there

    slow = Slow()
    with pytest.raises(WeightSyncError, match="told to fail at receive"):
        WeightSource("shared_memory").send(iter(WEIGHTS.items()), [Failing("receive"), slow], 1)
    assert slow.events == ["begin 1", "receive"]


@pytest.mark.parametrize(
    ("room", "num_buckets"),
    [(1 << 30, [12, 1, 1]), (8192, [12, 3, 3]), (1, [12, 12, 12]), (None, [12, 12, 12])],
)
def test_updates_after_the_first_have_as_few_buckets_as_there_is_room_for(room, num_buckets):
    weights = {f"weight {index}": torch.full((512,), float(index)) for index in range(12)}  # 2,048 bytes each
    source = WeightSource("shared_memory", bucket_bytes=2048, checksum=True, room=room and (lambda: room))
    engine = Recorder()
    for version, expected in enumerate(num_buckets, start=1):
        report = source.send(iter(weights.items()), [engine], version, ["one"])
        assert (report.num_buckets, report.size_bytes, report.failures) == (expected, 12 * 2048, {})


@pytest.mark.parametrize(
    ("free_gib", "cached_gib", "mib"), [(80, 0, 2048), (1, 30, 2048), (2, 0, 1024), (1, 2, 1536), (0, 0, 0)]
)
def test_a_large_bucket_on_a_gpu_takes_at_most_half_of_the_memory_that_there_is(free_gib, cached_gib, mib, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free_gib << 30, 140 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: (cached_gib + 5) << 30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 5 << 30)
    assert ipc.room() == mib << 20


def test_updates_after_one_that_an_engine_did_not_load_have_small_buckets():
    weights = {f"weight {index}": torch.full((512,), float(index)) for index in range(12)}
    source = WeightSource("shared_memory", bucket_bytes=2048, room=lambda: 1 << 30)

    def num_buckets(*engines):
        return source.send(iter(weights.items()), engines, 1).num_buckets

    assert num_buckets(Recorder()) == 12
    assert num_buckets(Recorder()) == 1
    with pytest.raises(WeightSyncError, match="told to fail"):
        num_buckets(Recorder("finish"))
    assert num_buckets(Recorder()) == 12
    assert num_buckets(Recorder()) == 1
    # An engine whose process is gone may keep the bucket's memory.
    assert num_buckets(Recorder(), Recorder("finish", error=EngineError)) == 1
    assert [num_buckets(Recorder(), Recorder()) for _ in range(3)] == [12, 12, 12]


def handles(engine: Recorder) -> list[tuple[str, int]]:
    return [bucket.handle for bucket in engine.buckets]


def test_sender_keeps_its_buffers_for_the_engines_that_have_opened_them() -> None:
    source = WeightSource("shared_memory", bucket_bytes=1024, keep_buffer=True)
    engine = Recorder()
    for version in (1, 2):
        assert source.send(iter(WEIGHTS.items()), [engine], version, ["one"]).num_buckets == 2
    first, second, *again = handles(engine)
    assert first != second and again == [first, second]
    # What lies between the weights is of earlier fillings.
    assert [content[:384] for content in engine.contents[::2]] == [WEIGHTS["embed"].numpy().tobytes()] * 2
    assert engine.contents[1] == engine.contents[3] == WEIGHTS["head"].numpy().tobytes()
    assert len(segments()) == 2
    # Other engines, one that has started again, and a weight that does not fit get other buffers.
    larger = {"wide": torch.ones(300)}
    for names, weights in ((["one", "two"], WEIGHTS), (["one", "three"], WEIGHTS), (["one", "three"], larger)):
        engines = [Recorder(), Recorder()]
        source.send(iter(weights.items()), engines, 3, names)
        found = handles(engines[0])
        assert not {first, second} & {*found} and handles(engines[1]) == found
        first, second = found[0], found[-1]
        assert len(segments()) == len(found)  # one buffer per bucket, as there are fewer than three
    assert engines[0].contents[0][: 300 * 4] == torch.ones(300).numpy().tobytes()
    source.close()
    source.close()
    assert segments() == set()
