"""A training rank on CPUs computes with the cores that its process may use, not with all of the machine."""

import os
from types import SimpleNamespace

from rlhf_train.online import worker
from rlhf_train.online.ray_actors import RankActor
from rlhf_train.weight_sync import source


def test_a_rank_has_a_thread_per_core_that_it_may_use(monkeypatch):
    given = {}
    monkeypatch.setattr(worker, "TrainWorker", lambda *_, **options: given.update(options))
    monkeypatch.setattr(source, "WeightSource", lambda *_, **options: None)
    plan = SimpleNamespace(device="cpu")
    sampling = SimpleNamespace(temperature=1.0)
    engine = SimpleNamespace(weight_transfer="shared_memory")
    job = SimpleNamespace(
        plan=plan, sampling=sampling, engine=engine, algorithm=None, seed=1, ema_beta=None, sync_checksum=False
    )
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        RankActor.load(RankActor.__new__(RankActor), 0, 1, {}, job, None)
    finally:
        os.sched_setaffinity(0, cores)
    assert given["num_threads"] == 1
    RankActor.load(RankActor.__new__(RankActor), 0, 2, {}, job, ("127.0.0.1", 1))
    assert given["num_threads"] == max(len(cores) // 2, 1)
