"""Who is a member of the group that broadcasts weights, and what torch is told of it; nothing is sent."""

import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from rlhf_data.errors import EngineError
from rlhf_rollout.weights import nccl

HANDLE = nccl.BroadcastHandle("127.0.0.1", 1, "group", num_ranks=7, first_rank=3, number=0, size_bytes=4)


@pytest.fixture
def joins(monkeypatch):
    """Return what an engine's worker asks for to join the group of `HANDLE`: hosts, its rank and the members."""
    hosts = []
    monkeypatch.setattr(nccl, "stay_on_loopback", hosts.append)
    monkeypatch.setattr(nccl.distributed, "TCPStore", lambda *place, **options: "store")
    monkeypatch.setattr(nccl, "BroadcastGroup", lambda name, store, rank, num_ranks, device: (name, rank, num_ranks))
    return lambda: (hosts, nccl._join(HANDLE, torch.device("cpu")))


@pytest.mark.parametrize(("own", "rank"), [(0, 3), (1, 4), (3, 6)])
def test_workers_of_an_engine_on_several_gpus_have_consecutive_ranks(joins, monkeypatch, own, rank):
    monkeypatch.setattr(nccl.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(nccl.distributed, "get_rank", lambda: own)
    assert joins() == (["127.0.0.1"], ("group", rank, 7))


def test_worker_of_an_engine_on_one_gpu_has_its_first_rank(joins):
    assert joins() == (["127.0.0.1"], ("group", 3, 7))


def test_group_that_other_engines_take_the_place_of_is_left(monkeypatch):
    left = []
    monkeypatch.setattr(nccl.BroadcastGroup, "close", lambda group: left.append(group.name))
    broadcaster = nccl._Broadcaster(1, "127.0.0.1")
    names = []
    for engines in (["one"], ["one"], ["one", "other"], ["other"]):
        broadcaster.open_buffer(4, engines)
        names.append(broadcaster.group.name)
    assert names[0] == names[1]
    assert left == names[1:3]


def test_nccls_own_limit_is_behind_that_of_a_broadcast(monkeypatch):
    """When it is reached, NCCL ends the whole process."""
    made = {}

    class Group:
        Options = SimpleNamespace

        def __init__(self, store, rank, num_ranks, options):
            made.update(rank=rank, num_ranks=num_ranks, limit=options._timeout)

    monkeypatch.setattr(nccl.distributed, "ProcessGroupNCCL", Group, raising=False)
    monkeypatch.setattr(nccl.distributed, "PrefixStore", lambda name, store: (name, store))
    nccl.BroadcastGroup("group", None, 2, 3, torch.device("cuda"))._meet()
    assert made == {"rank": 2, "num_ranks": 3, "limit": timedelta(seconds=120)}
    assert timedelta(seconds=nccl.TIMEOUT_S) < made["limit"]


def test_gloo_that_goes_on_waiting_for_a_member_is_given_up(monkeypatch):
    """It connects several times, and waits each time for as long as it is told."""
    given_up = threading.Event()
    monkeypatch.setattr(nccl, "TIMEOUT_S", 0.01)
    monkeypatch.setattr(nccl.distributed, "PrefixStore", lambda name, store: store)
    monkeypatch.setattr(nccl.distributed, "ProcessGroupGloo", lambda *place: given_up.wait(20))
    group = nccl.BroadcastGroup("group", None, 0, 2, torch.device("cpu"))
    with pytest.raises(EngineError, match=r"did not meet within 0\.01 s\n\nhint: an engine may have died"):
        group.broadcast(torch.zeros(1, dtype=torch.uint8))
    given_up.set()
    monkeypatch.setattr(nccl, "TIMEOUT_S", 60)
    monkeypatch.setattr(nccl.distributed, "ProcessGroupGloo", lambda *place: torch.zeros(-1))
    with pytest.raises(EngineError, match="be non-negative"):
        group.broadcast(torch.zeros(1, dtype=torch.uint8))
