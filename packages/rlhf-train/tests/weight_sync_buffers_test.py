"""The memory that buckets lie in: how it is taken, kept for the next update, opened by readers, and given back."""

import os
import pkgutil
import socket
from importlib import import_module
from inspect import signature
from pathlib import Path

import numpy as np
import pytest
import torch

import rlhf_rollout.weight_sync
import rlhf_train.weight_sync
from rlhf_data.errors import EngineError, WeightSyncError
from rlhf_rollout.weight_sync import MEDIA
from rlhf_rollout.weight_sync.bucket import TensorSlot, WeightBucket, bucket_checksum
from rlhf_rollout.weight_sync.reader import BucketReader
from rlhf_rollout.weight_sync.shared_memory import map_segment
from rlhf_rollout.weight_sync.tcp import open_memory
from rlhf_train.weight_sync.shared_memory import SharedMemoryBuffer
from rlhf_train.weight_sync.source import WeightSource
from rlhf_train.weight_sync.tcp import TcpBuffer
from weight_recorder import WEIGHTS, Recorder, segments


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
    reader.close()  # other tests look for memory that is still mapped


class Remote(Recorder):
    """An engine on another node."""

    def __init__(self) -> None:
        super().__init__()
        self.read: dict[str, torch.Tensor] = {}
        self.reader = BucketReader("tcp", torch.device("cpu"))

    async def receive_weights(self, bucket: WeightBucket) -> None:
        self.buckets.append(bucket)
        self.read |= self.reader.read(bucket)


def test_engines_read_every_filling_of_a_buffer_on_another_node() -> None:
    engines = [Remote(), Remote()]
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
    with pytest.raises(EngineError, match="the sender ended the connection"):
        open_memory((host, port, bytes(len(token)), *rest), torch.device("cpu"))
    buffer.close()
    with pytest.raises(EngineError, match=rf"cannot read weights from {host}:{port}(.|\n)*hint: the nodes"):
        open_memory(buffer.handles[0], torch.device("cpu"))


def test_an_engine_whose_network_fails_leaves_the_others_their_update() -> None:
    """The one that got no weights is named, and the caller may send them again to it alone."""

    class Unreachable(Remote):
        async def receive_weights(self, bucket: WeightBucket) -> None:
            host, _, *rest = bucket.handle
            with socket.socket() as closed:
                closed.bind((host, 0))
                port = closed.getsockname()[1]
            open_memory((host, port, *rest), torch.device("cpu"))

    engines = [Remote(), Unreachable(), Remote()]
    report = WeightSource("tcp").send(WEIGHTS.items(), engines, 1)
    assert list(report.failures) == [1] and "cannot read weights from" in report.failures[1]
    for engine in (engines[0], engines[2]):
        assert all(torch.equal(engine.read[name], tensor) for name, tensor in WEIGHTS.items())


def test_shared_memory_buffer_has_no_name_that_a_killed_process_could_leave_behind() -> None:
    buffer = SharedMemoryBuffer(4096, engines=["one"])
    assert os.readlink(buffer.handles[0][0]).startswith("/memfd:")
    buffer.close()


@pytest.mark.parametrize("medium", MEDIA)
@pytest.mark.parametrize("num_failures", [1, 2])
def test_weights_that_do_not_arrive_are_read_again_where_a_second_try_is_safe(medium, num_failures, monkeypatch):
    monkeypatch.setattr("rlhf_rollout.weight_sync.bucket._PAUSE_S", 0.0)
    reader = BucketReader(medium, torch.device("cpu"))
    failures = [EngineError("reset by peer")] * num_failures
    opened = []

    def open_unsteady(handle, device):
        opened.append(handle)
        if failures:
            raise failures.pop()
        return torch.arange(256, dtype=torch.uint8)

    reader._open_memory = open_unsteady
    bucket = WeightBucket(medium, (TensorSlot("a", "uint8", (3,), 0, 3),), handle=7)
    if num_failures == 1 and medium in ("tcp", "shared_memory"):
        assert reader.read(bucket)[0][1].tolist() == [0, 1, 2]
        assert opened == [7, 7]
        return
    with pytest.raises(EngineError, match="reset by peer"):
        reader.read(bucket)
    assert len(opened) == (2 if medium in ("tcp", "shared_memory") else 1)


def test_weights_that_arrived_wrong_are_read_from_the_sender_again(monkeypatch):
    monkeypatch.setattr("rlhf_rollout.weight_sync.bucket._PAUSE_S", 0.0)
    reader = BucketReader("tcp", torch.device("cpu"))
    arrivals = iter([torch.tensor([1, 2, 9], dtype=torch.uint8), torch.tensor([1, 2, 3], dtype=torch.uint8)])
    reader._open_memory = lambda handle, device: next(arrivals)
    slots = (TensorSlot("a", "uint8", (3,), 0, 3),)
    bucket = WeightBucket("tcp", slots, handle=7, checksum=bucket_checksum(np.array([1, 2, 3], np.uint8), slots))
    assert reader.view(bucket).tolist() == [1, 2, 3]
