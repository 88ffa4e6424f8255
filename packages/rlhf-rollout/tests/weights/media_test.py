"""What every medium must do, on every medium that works without a GPU; then what is special about each.

Engines are in this process, and their workers are threads. Without a GPU, gloo broadcasts.
"""

import asyncio
import contextlib
import gc
import os
import pkgutil
import socket
import threading
import weakref
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch

import rlhf_rollout.weights
from rlhf_data.errors import EngineError, WeightSyncError
from rlhf_rollout.weights import MEDIA, nccl, shared_memory, tcp
from rlhf_rollout.weights.bucket import TensorSlot, WeightBucket, bucket_checksum
from rlhf_rollout.weights.buffer import buffer_class
from rlhf_rollout.weights.reader import BucketReader
from rlhf_rollout.weights.source import SyncReport, WeightSource
from weight_recorder import WEIGHTS, segments

CPU = torch.device("cpu")
each_medium = pytest.mark.parametrize("medium", [medium for medium in MEDIA if medium != "ipc"])
U8, BF16, F32, I64 = torch.uint8, torch.bfloat16, torch.float32, torch.int64
# Odd sizes in buckets of 1024 bytes: two in one, one that fills it, larger ones, and an empty one at last.
SIZES = [
    (3, U8),
    (129, BF16),
    (256, F32),
    (1, I64),
    (131, I64),
    (2051, U8),
    (513, BF16),
    (1024, U8),
    (0, F32),
    (7, F32),
]
ODD = {f"weight {index}": torch.arange(size).to(dtype) * index % 251 for index, (size, dtype) in enumerate(SIZES, 1)}


def weights_of(version: int) -> dict[str, torch.Tensor]:
    return {
        "embed": torch.arange(96, dtype=torch.float32).view(32, 3) + version,
        "norm": torch.full((7,), 0.5 * version, dtype=torch.bfloat16),
        "head": torch.arange(64, dtype=torch.int64) * version,
    }


class Engine:
    """An engine of one worker. It may fail when it begins, at a bucket by its number, or when it ends."""

    def __init__(self, medium: str) -> None:
        self.reader = BucketReader(medium, CPU)
        self.read: dict[str, torch.Tensor] = {}
        self.handles: list = []
        self.kept: set[bool] = set()
        self.finished = 0
        self.fails_at: str | int | None = None
        self.error: type[Exception] = EngineError

    def _fail(self, at: str | int) -> None:
        if self.fails_at == at:
            raise self.error(f"told to fail at {at}")

    async def begin_weight_update(self, policy_version: int) -> None:
        self._fail("begin")
        self.handles.clear()
        self.read = {}

    async def receive_weights(self, bucket: WeightBucket) -> None:
        self._fail(len(self.handles))
        self.handles.append(bucket.handle)
        self.kept.add(bucket.kept)
        self.read |= await asyncio.to_thread(self.reader.read, bucket)

    async def finish_weight_update(self) -> None:
        self._fail("finish")
        self.finished += 1
        self.reader.end_update()


def send(source: WeightSource, engines: Sequence[Engine], version: int, names: Sequence[str]) -> SyncReport:
    return source.send(iter(weights_of(version).items()), engines, version, names)


def check_weights(engines: Sequence[Engine], expected: dict[str, torch.Tensor]) -> None:
    """Check that every engine has all weights, in the order in which they were sent."""
    for engine in engines:
        assert list(engine.read) == list(expected)
        for name, tensor in expected.items():
            assert engine.read[name].dtype == tensor.dtype and torch.equal(engine.read[name], tensor)


def num_held(engines: Sequence[Engine]) -> int:
    """Return how many segments the sender holds, once the engines hold none."""
    for engine in engines:
        engine.reader.close()
    return len(segments())


@pytest.fixture
def short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "TIMEOUT_S", 5.0)  # also for updates that must succeed


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf_rollout.weights.bucket._PAUSE_S", 0.0)


# -- the contract -----------------------------------------------------------------------------------------------------


def test_media_are_the_files_that_have_a_buffer() -> None:
    names = [module.name for module in pkgutil.iter_modules(rlhf_rollout.weights.__path__)]
    found = [name for name in names if hasattr(import_module(f"rlhf_rollout.weights.{name}"), "Buffer")]
    assert sorted(found) == sorted(MEDIA)
    for medium in MEDIA:
        assert callable(buffer_class(medium).receiver())


@each_medium
@pytest.mark.parametrize("keep_buffer", [False, True])
def test_every_engine_gets_every_weight_of_every_update(medium, keep_buffer) -> None:
    source = WeightSource(medium, checksum=True, keep_buffer=keep_buffer, bucket_bytes=1024)
    engines = [Engine(medium), Engine(medium)]
    for version in (1, 2, 3):
        report = send(source, engines, version, ["a", "b"])
        assert report[:3] == (384 + 14 + 512, 2, {})
        check_weights(engines, weights_of(version))
    assert [engine.finished for engine in engines] == [3, 3]
    is_kept = keep_buffer and medium == "shared_memory"  # the others' memory is read anew in any case
    assert engines[0].kept == {is_kept} and num_held(engines) == (2 if is_kept else 0)
    source.close()
    assert num_held(engines) == 0


@each_medium
def test_odd_sizes_in_more_buckets_than_buffers_arrive_whole_and_in_order(medium) -> None:
    """A weight larger than the buffer closes it, and the larger one may have its descriptor."""
    source = WeightSource(medium, bucket_bytes=1024, checksum=True)
    engines = [Engine(medium), Engine(medium)]
    for version in (1, 2):
        report = source.send(iter(ODD.items()), engines, version, ["a", "b"])
        # Weights 1 and 2 share a bucket, as do 8 and the empty 9; each of the others has one of its own, but 10 where a
        # single buffer has grown for weight 6.
        num_buckets = 7 if medium == "nccl" else 8
        assert report[:3] == (sum(tensor.nbytes for tensor in ODD.values()), num_buckets, {})
        check_weights(engines, ODD)


@each_medium
@pytest.mark.parametrize(("fails_at", "has_met"), [("begin", True), (0, False), (1, True), ("finish", True)])
def test_an_engine_that_fails_is_named_and_holds_up_nobody(medium, fails_at, has_met, short_limit) -> None:
    source = WeightSource(medium, bucket_bytes=1024)
    engines = [Engine(medium), Engine(medium)]
    if has_met:
        send(source, engines, 1, ["a", "b"])
    engines[1].fails_at = fails_at
    left = iter(weights_of(2).items())
    report = source.send(left, engines, 2, ["a", "b"])
    assert next(left, None) is None  # ZeRO-3 gathers weights together with other ranks, also for nobody
    assert f"EngineError: told to fail at {fails_at}" in report.failures[1]
    # A broadcast waits for all: where one is missing, no engine gets the bucket.
    if medium == "nccl" and isinstance(fails_at, int):
        assert set(report.failures) == {0, 1} and engines[0].finished == has_met
    else:
        assert set(report.failures) == {1}
        check_weights(engines[:1], weights_of(2))
    engines[1].fails_at = None
    assert send(source, engines, 3, ["a", "b"]).failures == {}
    check_weights(engines, weights_of(3))
    assert num_held(engines) == 0


@each_medium
def test_weights_that_do_not_fit_end_the_update_and_the_next_one_works(medium, short_limit) -> None:
    source = WeightSource(medium, bucket_bytes=1024, keep_buffer=True)
    engines = [Engine(medium), Engine(medium)]
    send(source, engines, 1, ["a", "b"])
    before = engines[0].handles[0]
    engines[1].fails_at = 0
    engines[1].error = WeightSyncError
    with pytest.raises(WeightSyncError, match="told to fail"):
        send(source, engines, 2, ["a", "b"])
    assert num_held(engines) == 0  # the buffer of an update that failed is not kept
    engines[1].fails_at = None
    assert send(source, engines, 3, ["a", "b"]).failures == {}
    check_weights(engines, weights_of(3))
    assert engines[0].handles[0][:3] != before[:3]
    source.close()
    assert num_held(engines) == 0


@pytest.mark.parametrize("medium", MEDIA)
@pytest.mark.parametrize("num_failures", [1, 2])
def test_weights_that_do_not_arrive_are_read_again_where_a_second_try_is_safe(
    medium, num_failures, no_pause, caplog
) -> None:
    reader = BucketReader(medium, CPU)
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
        assert "a bucket of weights did not arrive, and is read again: reset by peer" in caplog.text
        return
    with pytest.raises(EngineError, match="reset by peer"):
        reader.read(bucket)
    assert len(opened) == (2 if medium in ("tcp", "shared_memory") else 1)


def test_weights_that_arrived_wrong_are_read_from_the_sender_again(no_pause) -> None:
    reader = BucketReader("tcp", CPU)
    arrivals = iter([torch.tensor([1, 2, 9], dtype=torch.uint8), torch.tensor([1, 2, 3], dtype=torch.uint8)])
    reader._open_memory = lambda handle, device: next(arrivals)
    slots = (TensorSlot("a", "uint8", (3,), 0, 3),)
    bucket = WeightBucket("tcp", slots, handle=7, checksum=bucket_checksum(np.array([1, 2, 3], np.uint8), slots))
    assert reader.view(bucket).tolist() == [1, 2, 3]


# -- shared memory ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ("memfd_create", "cannot create shared memory: .*full\n\nhint: weight sync needs Linux"),
        ("ftruncate", "no memory for 64 bytes of weights: .*full\n\nhint: end other programs"),
    ],
)
def test_shared_memory_that_cannot_be_made_leaves_nothing(call, says, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(24, "full")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(WeightSyncError, match=says):
        shared_memory.Buffer(64, engines=["one"])
    assert segments() == set()


def test_shared_memory_has_no_name_is_taken_as_it_is_written_and_outlives_its_maker_where_it_is_mapped() -> None:
    buffer = shared_memory.Buffer(64 << 20, engines=["one"])
    path = Path(buffer.handles[0][0])
    assert os.readlink(path).startswith("/memfd:")  # which a killed process cannot leave behind
    assert path.stat().st_blocks == 0
    buffer.reserve(8192)
    assert path.stat().st_blocks * 512 == 8192
    buffer.data[7] = 3
    segment = shared_memory.map_segment(buffer.handles[0])
    buffer.close()
    buffer.close()
    assert not path.exists() and segment[7] == 3
    with pytest.raises(WeightSyncError, match="cannot be opened"):
        shared_memory.map_segment(buffer.handles[0])


# -- TCP --------------------------------------------------------------------------------------------------------------


def test_tcp_answers_only_those_who_know_its_token() -> None:
    others = set(threading.enumerate())
    buffer = buffer_class("tcp").sender(1, "127.0.0.1")(4096, ["one"])
    buffer.reserve(3)
    buffer.data[:3] = torch.tensor([1, 2, 3])
    buffer.publish()
    read = tcp.Buffer.open_memory
    host, port, token, *rest = buffer.handles[0]
    assert read(buffer.handles[0], CPU).tolist() == [1, 2, 3]
    for wrong in (bytes(len(token)), token[:5]):
        with socket.create_connection((host, port), timeout=30) as connection:
            connection.sendall(wrong)
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(10) == b""
    with pytest.raises(EngineError, match="the sender ended the connection"):
        read((host, port, bytes(len(token)), *rest), CPU)
    buffer.close()
    for thread in set(threading.enumerate()) - others:
        thread.join(30)
        assert not thread.is_alive()
    with pytest.raises(EngineError, match=rf"cannot read weights from {host}:{port}(.|\n)*hint: the nodes"):
        read(buffer.handles[0], CPU)


def test_tcp_frees_a_closed_buffer_before_garbage_is_collected() -> None:
    buffer = tcp.Buffer(4096, ["one"], "127.0.0.1")
    memory = weakref.ref(buffer.data)
    gc.disable()
    try:
        buffer.close()
        del buffer
        assert memory() is None
    finally:
        gc.enable()


def test_tcp_keeps_connections_of_many_workers_until_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of which nothing runs yet: the host accepts for it as many connections as may wait."""
    monkeypatch.setattr(tcp._Server, "serve_forever", lambda server, poll: None)
    buffer = tcp.Buffer(4, ["one"], "127.0.0.1")
    host, port, *_ = buffer.handles[0]
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(socket.create_connection((host, port), timeout=10))
    buffer._server.server_close()


def test_tcp_serves_the_used_part_of_a_buffer_at_the_address_that_was_given() -> None:
    engine = Engine("tcp")
    WeightSource("tcp", bucket_bytes=1024, host="127.0.0.2").send(iter(WEIGHTS.items()), [engine], 1)
    assert [(handle[0], handle[-1]) for handle in engine.handles] == [("127.0.0.2", 512 + 14), ("127.0.0.2", 512)]


def test_tcp_server_that_was_not_closed_keeps_no_process_alive() -> None:
    others = set(threading.enumerate())
    buffer = tcp.Buffer(4, ["one"], "127.0.0.1")
    assert [thread.daemon for thread in set(threading.enumerate()) - others] == [True]
    buffer.close()


# -- broadcasts -------------------------------------------------------------------------------------------------------


def test_broadcasts_use_the_same_group_until_a_process_takes_an_engines_place() -> None:
    source = WeightSource("nccl", bucket_bytes=1024, workers_per_engine=1)
    old, other, new = (Engine("nccl") for _ in range(3))
    groups = []
    # An engine without a name is taken for a new one.
    for engines, names in (
        ([old, other], ["old", "other"]),
        ([old, other], ["old", "other"]),
        ([new], ["new"]),
        ([new, other], ["new", "other"]),
        ([new, other], None),
    ):
        version = len(groups)
        send(source, engines, version, names)
        check_weights(engines, weights_of(version))
        groups.append({handle.group for engine in engines for handle in engine.handles})
    assert all(len(group) == 1 for group in groups)
    assert groups[0] == groups[1] and len(set.union(*groups)) == 4
    assert {(handle.host, handle.num_ranks, handle.first_rank) for handle in other.handles} == {("127.0.0.1", 3, 2)}


def test_a_bucket_is_filled_while_engines_read_the_last_one_and_overwrites_nothing() -> None:
    num_buckets = 6
    asked = [threading.Event() for _ in range(num_buckets + 1)]  # for the weight of each bucket, or for another one
    done: list[int] = []

    class Late(Engine):
        """Takes part in each broadcast only when the next bucket has been filled."""

        async def receive_weights(self, bucket: WeightBucket) -> None:
            number = len(self.handles)
            # The sender asks for the weight after the next when it has copied the next.
            following = asked[min(number + 2, num_buckets)]
            assert await asyncio.to_thread(following.wait, 30), "the next bucket is not filled meanwhile"
            await super().receive_weights(bucket)
            done.append(number)

    expected = {f"weight {number}": torch.full((201,), float(number)) for number in range(num_buckets)}

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for number, item in enumerate(expected.items()):
            # Engines have read all but two of the buckets before: the last one, and the one that was just filled.
            asked[number].set()
            assert len(done) >= number - 2
            yield item
        asked[num_buckets].set()

    engine = Late("nccl")
    report = WeightSource("nccl", bucket_bytes=1024).send(weights(), [engine], 1)
    assert (report.num_buckets, report.failures, done) == (num_buckets, {}, list(range(num_buckets)))
    check_weights([engine], expected)


def test_group_that_lost_a_member_sends_no_further_bucket() -> None:
    broadcaster = nccl._Broadcaster(1, "127.0.0.1")
    broadcaster.open_buffer(4, ["one"])
    assert [handle.size_bytes for handle in broadcaster.handles(4)] == [4]
    broadcaster.leave()
    with pytest.raises(EngineError, match="the group that broadcasts weights has lost a member"):
        broadcaster.handles(4)


def test_store_that_nobody_answers_at_is_an_error_with_a_hint(short_limit: None) -> None:
    handle = nccl.BroadcastHandle("127.0.0.1", 9, "group", num_ranks=2, first_rank=1, number=0, size_bytes=4)
    with pytest.raises(EngineError, match=r"cannot be joined at 127.0.0.1:9(.|\s)*hint: the nodes of a run"):
        nccl.Buffer.receiver()(handle, CPU)
