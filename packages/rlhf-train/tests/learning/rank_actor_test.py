"""What a training rank asks of its worker and of its sender of weights."""

import os
from types import SimpleNamespace

import pytest

from rlhf_rollout.weights import ipc, source
from rlhf_rollout.weights.bucket import DRAFT
from rlhf_train.learning import worker
from rlhf_train.learning.rank_actor import RankActor


def load(monkeypatch, *, num_ranks=1, num_busy_engines=0, medium="shared_memory", engine_size=1, takes_turns=False):
    """Load a rank without models; return the options of its worker and of its sender."""
    given, sending = {}, {}
    monkeypatch.setattr("rlhf_train.learning.rank_actor.prepare_process", lambda gpus: given.update(gpus=gpus))
    actor = RankActor(("3",))
    actor.prepare()
    monkeypatch.setattr(worker, "TrainWorker", lambda *_, **options: given.update(options))
    monkeypatch.setattr(source, "WeightSource", lambda medium, **options: sending.update(options, medium=medium))
    job = SimpleNamespace(
        plan=SimpleNamespace(device="cpu"),
        sampling=SimpleNamespace(temperature=0.5),
        engine=SimpleNamespace(weight_transfer=medium, tensor_parallel_size=engine_size, adapter_rank=0),
        num_busy_engines=num_busy_engines,
        algorithm=None,
        seed=1,
        ema_beta=0.9,
        pack_tokens=64,
        takes_turns=takes_turns,
        trainer_sleep=True,
        sync_checksum=True,
    )
    seconds = actor.load(0, num_ranks, {}, job, ("127.0.0.1", 1))
    assert seconds["startup/load"] > 0 and seconds["startup/rehearsal"] == 0.0  # nothing is compiled on a CPU
    return given, sending


def test_worker_gets_what_the_job_says(monkeypatch):
    given, _ = load(monkeypatch, num_ranks=2, takes_turns=True)
    del given["num_threads"]
    assert given == {
        "gpus": ("3",),
        "temperature": 0.5,
        "rank": 0,
        "num_ranks": 2,
        "master": ("127.0.0.1", 1),
        "device": "cpu",
        "seed": 1,
        "ema_beta": 0.9,
        "pack_tokens": 64,
        "takes_turns": True,
        "trains_in_turn": True,
    }


def test_a_rank_has_a_thread_per_core_that_it_may_use_beside_engines_that_generate_meanwhile(monkeypatch):
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        assert load(monkeypatch)[0]["num_threads"] == 1
    finally:
        os.sched_setaffinity(0, cores)
    assert load(monkeypatch, num_ranks=2)[0]["num_threads"] == max(len(cores) // 2, 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)))
    for num_ranks, num_busy_engines, expected in ((2, 0, 6), (2, 4, 2), (8, 8, 1)):
        options, _ = load(monkeypatch, num_ranks=num_ranks, num_busy_engines=num_busy_engines)
        assert options["num_threads"] == expected


@pytest.mark.parametrize(
    ("medium", "engine_size", "takes_turns", "keep_buffer", "room"),
    [
        ("shared_memory", 1, False, True, None),
        ("shared_memory", 1, True, False, None),  # who sleeps makes room for others
        ("ipc", 1, False, False, ipc.room),  # an engine that is killed never releases exported memory
        ("ipc", 2, False, False, None),  # the senders to one engine need equal buckets
    ],
)
def test_sender_keeps_its_buffer_where_nobody_needs_the_memory(
    monkeypatch, medium, engine_size, takes_turns, keep_buffer, room
):
    _, sending = load(monkeypatch, medium=medium, engine_size=engine_size, takes_turns=takes_turns)
    assert (sending["medium"], sending["workers_per_engine"], sending["checksum"]) == (medium, engine_size, True)
    assert (sending["keep_buffer"], sending["room"]) == (keep_buffer, room)
    assert isinstance(sending["host"], str)


@pytest.mark.parametrize("named", ["named_weights", "named_adapters"])
def test_weights_go_to_numbered_engines_and_a_rank_without_engines_gathers_them_too(named):
    sent, gathered = [], []

    def tensors():
        yield "w", 1
        gathered.append("all")

    def send(weights, *arguments):
        sent.append((list(weights), *arguments))
        return source.SyncReport(12, 1, {1: "late"}, {0: 5e9, 1: 6e9})

    rank = RankActor.__new__(RankActor)
    rank._worker = SimpleNamespace(rank=2, engines={"actor": SimpleNamespace(**{named: tensors})})
    rank._sends_adapters = named == "named_adapters"
    rank._sender = SimpleNamespace(send=send)
    assert rank.send_weights({}, 3) == (0, {})
    assert (sent, gathered) == ([], ["all"])
    one, other = (SimpleNamespace(process=name) for name in ("one", "other"))
    assert rank.send_weights({4: one, 7: other}, 3) == (12, {7: "late"})
    assert sent == [([("w", 1)], [one, other], 3, ["one", "other"])]
    own, first, second = rank.take_work().spans[-3:]
    assert own.name == "send_weights of version 3" and own.begin_s <= first.begin_s == second.begin_s <= own.end_s
    assert (first.track, first.end_s, first.args) == (("engine 4", "weights from rank 2"), 5e9, {"bytes": 12})
    assert (second.track, second.args) == (("engine 7", "weights from rank 2"), {"bytes": 12, "failed": "late"})
    rank._worker.engines["draft"] = SimpleNamespace(named_weights=lambda: iter([("w", 2)]))
    rank.send_weights({4: one, 7: other}, 4)
    assert sent.pop()[0] == [("w", 1), (f"{DRAFT}w", 2)]
