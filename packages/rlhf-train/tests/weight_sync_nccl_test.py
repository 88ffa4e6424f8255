"""Weights that are broadcast: all engines get all bytes, groups are kept and renewed, and a lost engine ends nothing.

Here gloo broadcasts, between the threads of one process.
"""

import asyncio
import threading
from collections.abc import Iterator, Sequence

import pytest
import torch

from rlhf_data.errors import EngineError, WeightSyncError
from rlhf_rollout.weight_sync import nccl as receiving
from rlhf_rollout.weight_sync.bucket import WeightBucket
from rlhf_rollout.weight_sync.nccl import BroadcastHandle
from rlhf_rollout.weight_sync.reader import BucketReader
from rlhf_train.weight_sync.source import SyncReport, WeightSource


def weights_of(version: int) -> dict[str, torch.Tensor]:
    return {
        "embed": torch.arange(96, dtype=torch.float32).view(32, 3) + version,
        "norm": torch.full((7,), 0.5 * version, dtype=torch.bfloat16),
        "head": torch.arange(64, dtype=torch.int64) * version,
    }


class Engine:
    """An engine of `num_workers` workers, which receive in threads. It may fail at a bucket, or never come to one."""

    def __init__(self, num_workers: int = 1) -> None:
        self.readers = [BucketReader("nccl", torch.device("cpu")) for _ in range(num_workers)]
        self.read: list[dict[str, torch.Tensor]] = [{} for _ in self.readers]
        self.handles: list[BroadcastHandle] = []
        self.finished = 0
        self.is_dead = False
        self.fails_at: int | None = None
        self.error: type[Exception] = EngineError

    async def begin_weight_update(self, policy_version: int) -> None:
        if self.is_dead:
            raise EngineError("dead")
        self.handles.clear()

    async def receive_weights(self, bucket: WeightBucket) -> None:
        if len(self.handles) == self.fails_at:
            raise self.error("told to fail")
        self.handles.append(bucket.handle)
        await asyncio.gather(*(asyncio.to_thread(self._receive, bucket, number) for number in range(len(self.read))))

    def _receive(self, bucket: WeightBucket, number: int) -> None:
        self.read[number] |= self.readers[number].read(bucket)

    async def finish_weight_update(self) -> None:
        self.finished += 1
        for reader in self.readers:
            reader.close()


def send(source: WeightSource, engines: Sequence[Engine], version: int, names: Sequence[str]) -> SyncReport:
    return source.send(iter(weights_of(version).items()), engines, version, names)


def check_weights(engines: Sequence[Engine], version: int) -> None:
    for engine in engines:
        for read in engine.read:
            assert read.keys() == weights_of(version).keys()
            assert all(torch.equal(read[name], tensor) for name, tensor in weights_of(version).items())


@pytest.fixture
def short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiving, "TIMEOUT_S", 5.0)  # also for updates that must succeed


def test_every_worker_gets_every_bucket_and_the_group_is_kept() -> None:
    source = WeightSource("nccl", bucket_bytes=1024, checksum=True)
    engines = [Engine(), Engine()]
    groups = set()
    for version in (1, 2, 3):
        report = send(source, engines, version, ["a", "b"])
        assert (report.num_buckets, report.failures) == (2, {})
        check_weights(engines, version)
        groups |= {handle.group for engine in engines for handle in engine.handles}
    assert len(groups) == 1
    assert [engine.finished for engine in engines] == [3, 3]
    assert {(handle.num_ranks, handle.first_rank) for handle in engines[1].handles} == {(3, 2)}


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


def test_odd_sizes_in_more_buckets_than_buffers_arrive_whole_and_in_order() -> None:
    source = WeightSource("nccl", bucket_bytes=1024, checksum=True)
    engines = [Engine(), Engine()]
    for _ in range(2):
        for engine in engines:
            engine.read = [{}]
        report = source.send(iter(ODD.items()), engines, 1, ["a", "b"])
        # Weights 1 and 2, then each in one of its own, but the last two: buckets are 2051 bytes long since weight 6.
        assert (report.num_buckets, report.failures) == (7, {})
        assert report.size_bytes == sum(tensor.nbytes for tensor in ODD.values())
        for engine in engines:
            assert list(engine.read[0]) == list(ODD)
            assert all(torch.equal(engine.read[0][name], tensor) for name, tensor in ODD.items())


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

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(num_buckets):
            # Engines have read all but two of the buckets before: the last one, and the one that was just filled.
            asked[number].set()
            assert len(done) >= number - 2
            yield f"weight {number}", torch.full((201,), float(number))
        asked[num_buckets].set()

    engine = Late()
    report = WeightSource("nccl", bucket_bytes=1024).send(weights(), [engine], 1)
    assert (report.num_buckets, report.failures, done) == (num_buckets, {}, list(range(num_buckets)))
    for number in range(num_buckets):
        assert torch.equal(engine.read[0][f"weight {number}"], torch.full((201,), float(number)))


def test_another_process_in_an_engines_place_gets_a_new_group() -> None:
    source = WeightSource("nccl", bucket_bytes=1024)
    old, other, new = Engine(), Engine(), Engine()
    send(source, [old, other], 1, ["old", "other"])
    before = old.handles[0].group
    send(source, [new], 2, ["new"])
    assert new.handles[0].group != before
    check_weights([new], 2)
    send(source, [new, other], 3, ["new", "other"])
    check_weights([new, other], 3)


def test_engines_without_names_are_taken_for_new_ones() -> None:
    source = WeightSource("nccl")
    engine = Engine()
    groups = []
    for version in (1, 2):
        source.send(iter(weights_of(version).items()), [engine], version)
        groups.append(engine.handles[0].group)
    check_weights([engine], 2)
    assert groups[0] != groups[1]


@pytest.mark.parametrize("fails_at", [0, 1])
def test_lost_engine_fails_the_update_of_all_within_the_limit_and_the_next_update_works(
    short_limit: None, fails_at: int
) -> None:
    source = WeightSource("nccl", bucket_bytes=1024)
    engines = [Engine(), Engine()]
    if fails_at:
        send(source, engines, 1, ["a", "b"])  # they have met already
    engines[1].fails_at = fails_at
    left = iter(weights_of(2).items())
    report = source.send(left, engines, 2, ["a", "b"])
    assert next(left, None) is None  # ZeRO-3 gathers weights together with other ranks, also for nobody
    assert set(report.failures) == {0, 1} and "told to fail" in report.failures[1]
    assert engines[0].finished == engines[1].finished == bool(fails_at)
    engines[1].fails_at = None
    assert send(source, engines, 3, ["a", "b"]).failures == {}
    check_weights(engines, 3)


def test_engine_that_is_dead_before_the_update_holds_up_nobody() -> None:
    source = WeightSource("nccl", bucket_bytes=1024)
    engines = [Engine(), Engine()]
    send(source, engines, 1, ["a", "b"])
    engines[0].is_dead = True
    report = send(source, engines, 2, ["a", "b"])
    assert report.failures == {0: "EngineError: dead"} and report.num_buckets == 2
    check_weights(engines[1:], 2)
    assert {(handle.num_ranks, handle.first_rank) for handle in engines[1].handles} == {(2, 1)}


def test_weights_that_do_not_fit_end_the_update_and_the_next_one_has_a_new_group(short_limit: None) -> None:
    source = WeightSource("nccl", bucket_bytes=1024)
    engines = [Engine(), Engine()]
    send(source, engines, 1, ["a", "b"])
    before = engines[0].handles[0].group
    engines[1].fails_at = 0
    engines[1].error = WeightSyncError
    with pytest.raises(WeightSyncError, match="told to fail"):
        send(source, engines, 2, ["a", "b"])
    engines[1].fails_at = None
    assert send(source, engines, 3, ["a", "b"]).failures == {}
    check_weights(engines, 3)
    assert engines[0].handles[0].group != before


def test_store_that_nobody_answers_at_is_an_error_with_a_hint(short_limit: None) -> None:
    handle = BroadcastHandle("127.0.0.1", 9, "group", num_ranks=2, first_rank=1, number=0, size_bytes=4)
    with pytest.raises(EngineError, match=r"cannot be joined at 127.0.0.1:9(.|\s)*hint: the nodes of a run"):
        receiving.opener()(handle, torch.device("cpu"))
