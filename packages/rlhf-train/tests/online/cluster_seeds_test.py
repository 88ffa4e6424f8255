"""Engines that start together draw different numbers for requests without a seed."""

import dataclasses
from types import SimpleNamespace

import ray

from rlhf_rollout.engines import EngineSpec
from rlhf_train import processes
from rlhf_train.cluster.placement import PlacementRequest, plan_placement


def test_engines_of_a_run_get_seeds_of_their_own_and_are_alike_otherwise(monkeypatch):
    started = []

    class Remote:
        @staticmethod
        def options(**options):
            return SimpleNamespace(remote=lambda *args, gpus: started.append(args) or len(started))

    monkeypatch.setattr(processes, "RemoteEngine", Remote)
    plan = plan_placement(PlacementRequest(ranks={"actor": 1}, num_engines=3), [0])
    spec = EngineSpec(model="m", seed=42)
    reserved = processes.Reserved(None, [])
    engines = processes.start_engines(SimpleNamespace(engine=spec, plan=plan), reserved, range(3))
    assert [engine.handle for engine in engines] == [1, 2, 3]
    assert started == [("vllm", dataclasses.replace(spec, seed=42 + number)) for number in range(3)]
    # One that is restarted has the settings that it had.
    monkeypatch.setattr(ray, "kill", lambda handle: None)
    engines[1].restart()
    assert (engines[1].handle, started[-1]) == (4, started[1])
    started.clear()
    unseeded = EngineSpec(model="m")  # each engine draws its own
    processes.start_engines(SimpleNamespace(engine=unseeded, plan=plan), reserved, range(3))
    assert started == [("vllm", unseeded)] * 3


def test_only_engines_that_start_beside_nothing_else_on_their_gpu_measure_its_memory(monkeypatch):
    measuring = []

    def start(remote, placed, rank, reserved, kind, spec):
        measuring.append(spec.measures_memory)

    monkeypatch.setattr(processes, "_start_one", start)
    spec = EngineSpec(model="m")
    for colocated, sleeps in ((True, False), (True, True), (False, False)):
        plan = plan_placement(PlacementRequest(ranks={"actor": 1}, colocate_all_models=colocated), [2])
        job = SimpleNamespace(engine=dataclasses.replace(spec, enable_sleep=sleeps), plan=plan)
        processes.start_engines(job, processes.Reserved(None, []), [0])
    assert measuring == [False, True, True]
