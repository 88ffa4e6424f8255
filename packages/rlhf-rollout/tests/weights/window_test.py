"""Engines read buckets at their own pace, no further apart than the sender has buffers. Events decide who is slow."""

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from rlhf_data.errors import EngineError, WeightSyncError
from rlhf_rollout.weights.bucket import WeightBucket
from rlhf_rollout.weights.reader import BucketReader
from rlhf_rollout.weights.source import WeightSource
from weight_recorder import segments

WINDOW = 3
NUM_BUCKETS = 8
WEIGHTS = {f"weight {number}": torch.full((201,), float(number)) for number in range(NUM_BUCKETS)}  # one per bucket
on_hosts = pytest.mark.parametrize("medium", ["shared_memory", "tcp"])


class Engine:
    """An engine that may wait before it reads a bucket, or fail there, as `before` says by the bucket's number."""

    def __init__(self, medium: str, before: Callable[[int], None] = lambda number: None) -> None:
        self.reader = BucketReader(medium, torch.device("cpu"))
        self._before = before
        self.events: list[str] = []
        self.read: dict[str, torch.Tensor] = {}
        self.num_asked = 0
        self.has_read = [threading.Event() for _ in range(NUM_BUCKETS)]

    async def begin_weight_update(self, policy_version: int) -> None:
        self.events.append("begin")

    async def receive_weights(self, bucket: WeightBucket) -> None:
        number = self.num_asked
        self.num_asked += 1
        self.events.append(f"receive {number}")
        await asyncio.to_thread(self._before, number)
        self.read |= await asyncio.to_thread(self.reader.read, bucket)
        self.has_read[number].set()

    async def finish_weight_update(self) -> None:
        self.events.append("finish")
        self.reader.end_update()


def check(engine: Engine) -> None:
    """Check that an engine has read all weights, once and in order, and then put them in force."""
    assert engine.events == ["begin", *[f"receive {number}" for number in range(NUM_BUCKETS)], "finish"]
    assert list(engine.read) == list(WEIGHTS)
    for name, tensor in WEIGHTS.items():
        assert torch.equal(engine.read[name], tensor)


def num_read(engine: Engine) -> int:
    return sum(event.is_set() for event in engine.has_read)


@on_hosts
def test_a_slow_engine_holds_up_the_others_only_when_it_is_behind_by_all_buffers(medium) -> None:
    behind: list[int] = []

    def wait_for_the_other(number: int) -> None:
        """Be behind by all buffers, as long as there are further buckets."""
        last = min(number + WINDOW - 1, NUM_BUCKETS - 1)
        assert fast.has_read[last].wait(30), f"bucket {last} does not come while another engine reads bucket {number}"

    def note(number: int) -> None:
        behind.append(number - num_read(slow))

    slow = Engine(medium, wait_for_the_other)
    fast = Engine(medium, note)
    began_s = time.perf_counter()
    report = WeightSource(medium, bucket_bytes=1024, checksum=True).send(iter(WEIGHTS.items()), [slow, fast], 1)
    assert (report.num_buckets, report.failures) == (NUM_BUCKETS, {})
    assert report.ended_s.keys() == {0, 1}
    assert all(began_s < ended_s < time.perf_counter() for ended_s in report.ended_s.values())
    check(slow)
    check(fast)
    assert max(behind) == WINDOW - 1  # the buffer of the next bucket is the one that the slow engine still reads


@on_hosts
def test_buckets_are_filled_while_engines_read_the_first_one(medium) -> None:
    asked = [threading.Event() for _ in WEIGHTS]

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for event, item in zip(asked, WEIGHTS.items(), strict=True):
            event.set()
            yield item

    def wait_for_the_sender(number: int) -> None:
        # It copies a weight when it has a buffer, and then asks for the next weight.
        last = min(number + WINDOW, NUM_BUCKETS - 1)
        assert asked[last].wait(30), f"weight {last} is not asked for while bucket {number} is read"

    engine = Engine(medium, wait_for_the_sender)
    assert WeightSource(medium, bucket_bytes=1024).send(weights(), [engine], 1).failures == {}
    check(engine)


@on_hosts
@pytest.mark.parametrize("fails_at", [0, 4, NUM_BUCKETS - 1])
def test_an_engine_that_fails_when_it_is_behind_costs_the_others_nothing(medium, fails_at) -> None:
    def fail(number: int) -> None:
        if number == fails_at:
            last = min(number + WINDOW - 1, NUM_BUCKETS - 1)
            assert others[0].has_read[last].wait(30) and others[1].has_read[last].wait(30)
            raise EngineError("killed")

    dead = Engine(medium, fail)
    others = [Engine(medium), Engine(medium)]
    report = WeightSource(medium, bucket_bytes=1024, checksum=True).send(iter(WEIGHTS.items()), [dead, *others], 1)
    assert report.failures == {0: "EngineError: killed"}
    assert dead.events[-1] == f"receive {fails_at}"  # it is asked for nothing any more
    for engine in others:
        check(engine)


def test_weights_that_do_not_fit_a_slow_engine_end_the_update_for_all() -> None:
    def fail(number: int) -> None:
        assert fast.has_read[WINDOW - 1].wait(30)
        raise WeightSyncError("another shape")

    slow = Engine("shared_memory", fail)
    fast = Engine("shared_memory")
    left = iter(WEIGHTS.items())
    with pytest.raises(WeightSyncError, match="another shape"):
        WeightSource("shared_memory", bucket_bytes=1024).send(left, [slow, fast], 1)
    assert next(left, None) is None
    assert slow.events == ["begin", "receive 0"]
    assert fast.events == ["begin", *[f"receive {number}" for number in range(WINDOW)]]
    fast.reader.close()
    assert segments() == set()


@pytest.mark.parametrize("num_buffers", [0, 1, 2])
@pytest.mark.parametrize(
    ("medium", "call"),
    [
        ("shared_memory", (os, "posix_fallocate", OSError(12, "Cannot allocate memory"))),
        ("shared_memory", (torch, "from_file", RuntimeError("unable to mmap"))),
        ("tcp", (torch, "empty", RuntimeError("can't allocate memory"))),
    ],
    ids=["no pages", "no mapping", "no heap"],
)
def test_an_update_uses_as_many_buffers_as_there_is_memory_for(medium, call, num_buffers, monkeypatch) -> None:
    owner, name, error = call
    allocate = getattr(owner, name)
    owned: set[object] = set()

    def full(place: object, *arguments: object, **options: object) -> object:
        """Refuse memory for further buffers. `place` is a descriptor or its path; on the heap each call is another."""
        buffer = len(owned) if medium == "tcp" else place
        if threading.current_thread() is sender and buffer not in owned:
            if len(owned) == num_buffers:
                raise error
            owned.add(buffer)
        return allocate(place, *arguments, **options)

    engine = Engine(medium)
    sender = threading.current_thread()
    monkeypatch.setattr(owner, name, full)
    source = WeightSource(medium, bucket_bytes=1024, checksum=True)
    if not num_buffers:
        with pytest.raises(WeightSyncError, match=r"the host has no memory for \d+ bytes of weights: .*\n\nhint: end"):
            source.send(iter(WEIGHTS.items()), [engine], 1)
    else:
        assert source.send(iter(WEIGHTS.items()), [engine], 1).failures == {}
        check(engine)
    assert segments() == set()


@pytest.mark.parametrize("keep_buffer", [False, True])
def test_an_update_never_takes_more_buffers_than_its_window(keep_buffer) -> None:
    """Each weight is larger than the one before, so that each needs a buffer of its own size."""
    weights = {f"weight {size}": torch.full((size,), float(size)) for size in range(300, 300 + 64 * NUM_BUCKETS, 64)}
    sent: list[int] = []
    held: list[int] = []

    def count(number: int) -> None:
        num_held, num_segments = -1, 0
        while num_held != len(engine.reader._opened):  # both at one time: the reader has a thread of its own
            num_held = len(engine.reader._opened)
            num_segments = len(segments())
        held.append(num_held)
        sent.append(num_segments - num_held)

    engine = Engine("shared_memory", count)
    source = WeightSource("shared_memory", bucket_bytes=1024, keep_buffer=keep_buffer)
    for version in (1, 2):
        source.send(iter(weights.items()), [engine], version, ["one"])
        assert (max(sent), max(held)) == (WINDOW, WINDOW)
        engine.reader.close()
        assert len(segments()) == (WINDOW if keep_buffer else 0)
        engine.num_asked = 0
    source.send(iter(list(weights.items())[:1]), [engine], 3, ["one"])
    engine.reader.close()
    assert len(segments()) == (1 if keep_buffer else 0)  # what an update does not use is not kept
    source.close()
    assert segments() == set()
