"""A training rank on CPUs computes with the cores that its process may use, not with all of the machine."""

import os
from types import SimpleNamespace

from rlhf_rollout.weights import source
from rlhf_train.learning import worker
from rlhf_train.learning.rank_actor import RankActor


def load(monkeypatch, num_ranks, num_busy_engines=0):
    """Return the number of threads that a rank gets."""
    given = {}
    monkeypatch.setattr(worker, "TrainWorker", lambda *_, **options: given.update(options))
    monkeypatch.setattr(source, "WeightSource", lambda *_, **options: None)
    job = SimpleNamespace(
        plan=SimpleNamespace(device="cpu"),
        sampling=SimpleNamespace(temperature=1.0),
        engine=SimpleNamespace(weight_transfer="shared_memory", tensor_parallel_size=1),
        num_busy_engines=num_busy_engines,
        algorithm=None,
        seed=1,
        ema_beta=None,
        pack_tokens=1,
        takes_turns=False,
        trainer_sleep=False,
        sync_checksum=False,
    )
    RankActor.load(RankActor.__new__(RankActor), 0, num_ranks, {}, job, ("127.0.0.1", 1))
    return given["num_threads"]


def test_a_rank_has_a_thread_per_core_that_it_may_use(monkeypatch):
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        assert load(monkeypatch, num_ranks=1) == 1
    finally:
        os.sched_setaffinity(0, cores)
    assert load(monkeypatch, num_ranks=2) == max(len(cores) // 2, 1)


def test_engines_that_generate_meanwhile_get_cores_too(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)))
    assert load(monkeypatch, num_ranks=2) == 6
    assert load(monkeypatch, num_ranks=2, num_busy_engines=4) == 2
    assert load(monkeypatch, num_ranks=8, num_busy_engines=8) == 1
