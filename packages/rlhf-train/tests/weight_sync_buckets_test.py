"""Packing weights into buckets, and what happens when a sync goes wrong; the engine at the other end is a fake."""

import asyncio
import contextlib
import os
import pkgutil
import socket
import zlib
from collections.abc import Iterator
from importlib import import_module
from inspect import signature
from pathlib import Path

import pytest
import torch

import rlhf_rollout.weight_sync
import rlhf_train.weight_sync
from rlhf_data.errors import ConfigError, EngineError, WeightSyncError
from rlhf_rollout.engines.fake import FakeEngine
from rlhf_rollout.weight_sync import MEDIA
from rlhf_rollout.weight_sync.bucket import WeightBucket
from rlhf_rollout.weight_sync.reader import BucketReader
from rlhf_rollout.weight_sync.shared_memory import map_segment
from rlhf_rollout.weight_sync.tcp import open_memory
from rlhf_train.weight_sync import shared_memory
from rlhf_train.weight_sync.shared_memory import SharedMemoryBuffer
from rlhf_train.weight_sync.source import WeightSource
from rlhf_train.weight_sync.tcp import TcpBuffer

WEIGHTS = {
    "embed": torch.arange(96, dtype=torch.float32).view(32, 3),  # 384 bytes
    "norm": torch.full((7,), 0.5, dtype=torch.bfloat16),  # 14 bytes
    "head": torch.arange(64, dtype=torch.int64),  # 512 bytes
}


def segments() -> set[str]:
    """Return the descriptors of this process that are memory for weights."""
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
        error: type[Exception] = WeightSyncError,
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


def test_send_brings_every_weight_to_every_engine() -> None:
    engines = [FakeEngine(), FakeEngine()]
    sender = WeightSource("shared_memory", bucket_bytes=512, checksum=True)
    report = sender.send(iter(WEIGHTS.items()), engines, 5)
    for engine in engines:
        assert engine.weight_checksums == {name: crc(tensor) for name, tensor in WEIGHTS.items()}
        assert (engine.policy_version, engine.num_updates) == (5, 1)
    # Behind 384 bytes the next weight would begin at 512, the end of the bucket; so each weight gets its own.
    assert (report.size_bytes, report.num_buckets) == (384 + 14 + 512, 3)
    assert segments() == set()


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


def test_send_weight_above_the_bucket_gets_its_own() -> None:
    engine = Recorder()
    report = WeightSource("shared_memory", bucket_bytes=100).send(iter(WEIGHTS.items()), [engine], 1)
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


@pytest.mark.parametrize("fail_at", ["begin", "receive", "finish"])
def test_send_failing_engine_raises_and_frees_the_segment(fail_at: str) -> None:
    weights = iter(WEIGHTS.items())
    with pytest.raises(WeightSyncError, match=f"told to fail at {fail_at}"):
        WeightSource("shared_memory", bucket_bytes=400).send(weights, [Recorder(), Recorder(fail_at)], 1)
    assert segments() == set()
    # Ranks that gather along must not wait for this one: the weights were taken to their end.
    assert next(weights, None) is None


@pytest.mark.parametrize("fail_at", ["begin", "receive", "finish"])
def test_send_leaves_out_an_engine_that_dies_and_completes_the_others(fail_at: str) -> None:
    """Every call of the dead engine is made once, those after its death are not; the other one misses nothing."""
    dead, lives = Recorder(fail_at, error=EngineError), Recorder()
    report = WeightSource("shared_memory", bucket_bytes=400).send(iter(WEIGHTS.items()), [dead, lives], 3)
    assert lives.events == ["begin 3", *["receive"] * 3, "finish"]
    assert dead.events == {"begin": ["begin 3"], "receive": ["begin 3", "receive"], "finish": lives.events}[fail_at]
    assert list(report.failures) == [0] and "EngineError: told to fail" in report.failures[0]
    assert (report.size_bytes, segments()) == (384 + 14 + 512, set())


def test_send_to_engines_that_all_die_still_reads_every_weight() -> None:
    weights = iter(WEIGHTS.items())
    engines = [Recorder("begin", error=EngineError), Recorder("receive", error=RuntimeError)]
    report = WeightSource("shared_memory", bucket_bytes=400).send(weights, engines, 1)
    assert sorted(report.failures) == [0, 1]
    assert next(weights, None) is None and segments() == set()


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


def test_shared_memory_buffer_without_memory_raises_with_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(WeightSyncError, match=r"no memory for 384 bytes.*: Cannot allocate(.|\n)*hint: end other"):
        WeightSource("shared_memory").send(iter(WEIGHTS.items()), [Recorder()], 1)
    assert segments() == set()


def test_shared_memory_buffer_takes_memory_only_as_it_is_written() -> None:
    buffer = SharedMemoryBuffer(64 << 20, engines=["one"])
    path = Path(buffer.handles[0][0])
    assert path.stat().st_blocks == 0
    buffer.reserve(8192)
    assert path.stat().st_blocks * 512 == 8192
    buffer.close()
    assert not path.exists()


@pytest.mark.parametrize("medium", MEDIA)
def test_every_medium_has_a_module_at_the_sender_and_at_the_receiver(medium: str) -> None:
    sender = import_module(f"rlhf_train.weight_sync.{medium}")
    receiver = import_module(f"rlhf_rollout.weight_sync.{medium}")
    open_buffer = sender.opener(1)
    made = open_buffer if medium != "nccl" else sender.NcclBuffer
    assert made.medium == medium
    assert list(signature(open_buffer).parameters) == ["size_bytes", "engines"]
    assert list(signature(receiver.opener()).parameters) == ["handle", "device"]


def test_every_file_of_a_half_that_opens_memory_is_a_medium() -> None:
    for package in (rlhf_train.weight_sync, rlhf_rollout.weight_sync):
        names = [module.name for module in pkgutil.iter_modules(package.__path__)]
        media = [name for name in names if hasattr(import_module(f"{package.__name__}.{name}"), "opener")]
        assert sorted(media) == sorted(MEDIA)


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


def test_send_smallest_bucket_holds_one_weight_each() -> None:
    assert WeightSource("shared_memory", bucket_bytes=1).send(iter(WEIGHTS.items()), [Recorder()], 1).num_buckets == 3


def test_send_publishes_each_filling_before_an_engine_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    class Buffer(SharedMemoryBuffer):
        def publish(self) -> None:
            order.append("publish")

    class Reading(Recorder):
        async def receive_weights(self, bucket: WeightBucket) -> None:
            order.append("read")

    monkeypatch.setattr(shared_memory, "opener", lambda workers_per_engine: Buffer)
    WeightSource("shared_memory", bucket_bytes=1024).send(iter(WEIGHTS.items()), [Reading()], 1)
    assert order == ["publish", "read", "publish", "read"]


def test_send_failing_engine_waits_for_the_others_before_the_segment_goes() -> None:
    class Slow(Recorder):
        async def receive_weights(self, bucket: WeightBucket) -> None:
            await asyncio.sleep(0.1)
            await super().receive_weights(bucket)  # maps the segment, which must still be there

    slow = Slow()
    with pytest.raises(WeightSyncError, match="told to fail at receive"):
        WeightSource("shared_memory").send(iter(WEIGHTS.items()), [Recorder("receive"), slow], 1)
    assert slow.events == ["begin 1", "receive"]


def handles(engine: Recorder) -> set[tuple[str, int]]:
    return {bucket.handle for bucket in engine.buckets}


def test_sender_keeps_its_buffer_for_the_engines_that_have_opened_it() -> None:
    source = WeightSource("shared_memory", bucket_bytes=1024, keep_buffer=True)
    engine = Recorder()
    for version in (1, 2):
        assert source.send(iter(WEIGHTS.items()), [engine], version, ["one"]).num_buckets == 2
    [first] = handles(engine)
    assert all(bucket.kept for bucket in engine.buckets)
    # What lies between the weights is of earlier fillings.
    assert [content[:384] for content in engine.contents[::2]] == [WEIGHTS["embed"].numpy().tobytes()] * 2
    assert engine.contents[1] == engine.contents[3] == WEIGHTS["head"].numpy().tobytes()
    assert len(segments()) == 1
    # Other engines, one that has started again, and a weight that does not fit get another buffer.
    larger = {"wide": torch.ones(300)}
    for names, weights in ((["one", "two"], WEIGHTS), (["one", "three"], WEIGHTS), (["one", "three"], larger)):
        engines = [Recorder(), Recorder()]
        source.send(iter(weights.items()), engines, 3, names)
        [found] = handles(engines[0])
        assert found != first and handles(engines[1]) == {found}
        first = found
        assert len(segments()) == 1
    assert engines[0].contents[0][: 300 * 4] == torch.ones(300).numpy().tobytes()
    source.close()
    source.close()
    assert segments() == set()


def test_sender_does_not_keep_the_buffer_of_a_failed_update() -> None:
    source = WeightSource("shared_memory", keep_buffer=True)
    with pytest.raises(WeightSyncError, match="told to fail at receive"):
        source.send(iter(WEIGHTS.items()), [Recorder("receive")], 1, ["one"])
    assert segments() == set()
    engine = Recorder()
    source.send(iter(WEIGHTS.items()), [engine], 2, ["one"])
    source.send(iter(WEIGHTS.items()), [engine], 3, ["one"])
    assert len(handles(engine)) == 1
    source.close()


@pytest.mark.parametrize("medium", ["tcp", "shared_memory"])
def test_sender_keeps_no_buffer_that_engines_do_not_map_or_that_it_was_not_told_to_keep(medium: str) -> None:
    class Noting(Recorder):
        async def receive_weights(self, bucket: WeightBucket) -> None:
            self.buckets.append(bucket)

    source = WeightSource(medium, keep_buffer=medium == "tcp")
    engine = Noting()
    for version in (1, 2):
        source.send(iter(WEIGHTS.items()), [engine], version, ["one"])
    assert not any(bucket.kept for bucket in engine.buckets)
    assert len(handles(engine)) == 2


def test_shared_memory_buffer_closes_twice_and_its_memory_outlives_it_where_it_is_mapped() -> None:
    buffer = SharedMemoryBuffer(4096, engines=["one"])
    buffer.reserve(4096)
    buffer.data[7] = 3
    segment = map_segment(buffer.handles[0])
    buffer.close()
    buffer.close()
    assert segment[7] == 3
    with pytest.raises(WeightSyncError, match="cannot be opened"):
        map_segment(buffer.handles[0])


def test_reader_opens_a_buffer_that_has_the_path_of_an_earlier_one() -> None:
    """A weight larger than the buffer closes it, and the larger one gets its descriptor."""
    read: dict[str, torch.Tensor] = {}
    reader = BucketReader("shared_memory", torch.device("cpu"))

    class Reading(Recorder):
        async def receive_weights(self, bucket: WeightBucket) -> None:
            await super().receive_weights(bucket)
            read.update(reader.read(bucket))

    engine = Reading()
    WeightSource("shared_memory", bucket_bytes=384).send(iter(WEIGHTS.items()), [engine], 1)
    paths = [bucket.handle[0] for bucket in engine.buckets]
    assert len(paths) == 3 and paths[1] == paths[2]
    assert all(torch.equal(read[name], tensor) for name, tensor in WEIGHTS.items())


def test_engines_read_every_filling_of_a_buffer_on_another_node() -> None:
    class Reading(Recorder):
        def __init__(self) -> None:
            super().__init__()
            self.read: dict[str, torch.Tensor] = {}
            self.reader = BucketReader("tcp", torch.device("cpu"))

        async def receive_weights(self, bucket: WeightBucket) -> None:
            self.buckets.append(bucket)
            self.read |= self.reader.read(bucket)

    engines = [Reading(), Reading()]
    assert (
        WeightSource("tcp", bucket_bytes=1024, checksum=True).send(iter(WEIGHTS.items()), engines, 1).num_buckets == 2
    )
    for engine in engines:
        assert [bucket.handle[-1] for bucket in engine.buckets] == [512 + 14, 512]
        assert all(torch.equal(engine.read[name], tensor) for name, tensor in WEIGHTS.items())


def test_a_buffer_answers_only_those_who_know_its_token() -> None:
    buffer = TcpBuffer(4096, engines=["one"])
    buffer.reserve(3)
    buffer.data[:3] = torch.tensor([1, 2, 3])
    buffer.publish()
    host, port, token, *rest = buffer.handles[0]
    assert open_memory(buffer.handles[0], torch.device("cpu")).tolist() == [1, 2, 3]
    for wrong in (bytes(len(token)), token[:5]):
        with socket.create_connection((host, port), timeout=30) as connection:
            connection.sendall(wrong)
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(10) == b""
    with pytest.raises(WeightSyncError, match="the sender ended the connection"):
        open_memory((host, port, bytes(len(token)), *rest), torch.device("cpu"))
    buffer.close()
    with pytest.raises(WeightSyncError, match=rf"cannot read weights from {host}:{port}(.|\n)*hint: the nodes"):
        open_memory(buffer.handles[0], torch.device("cpu"))


def test_shared_memory_buffer_has_no_name_that_a_killed_process_could_leave_behind() -> None:
    before = set(os.listdir("/dev/shm"))
    buffer = SharedMemoryBuffer(4096, engines=["one"])
    assert set(os.listdir("/dev/shm")) <= before
    buffer.close()
