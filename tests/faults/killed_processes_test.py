"""Engines are killed while they generate and while they get weights, and a node goes with all trainers.

Ray's test cluster has several nodes on this machine.
"""

import dataclasses
import fcntl
import json
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util import placement_group_table

from rlhf_data.errors import EngineError
from rlhf_models.lora import LoraSpec
from rlhf_models.testing import tiny_model_dir
from rlhf_train.cluster.placement import PlacementRequest, plan_placement
from rlhf_train.cluster.places import Place, ProcessPlan
from rlhf_train.cluster.ray_session import LostProcessError
from rlhf_train.generation.run_spec import AsyncSpec
from rlhf_train.online import run_online
from rlhf_train.online_job import CheckpointSpec, OnlineJob
from rlhf_train.processes import check_files, placed_bundles
from rlhf_train.run.observer import Observer
from trainer_testing import NUM_CLUSTER_CPUS, tiny_job
from warm_commands import warm_commands


def actors(name: str) -> list[psutil.Process]:
    """Return the processes of Ray actors of a class."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            command = process.cmdline()
        except psutil.Error:
            continue
        if command and command[0].startswith(f"ray::{name}"):
            found.append(process)
    return found


def kill_engine() -> None:
    [engine] = actors("EngineActor")
    os.kill(engine.pid, signal.SIGKILL)


def kill_engine_soon() -> None:
    """Kill the engine while it answers requests, which takes a few tenths of a second."""
    threading.Timer(0.05, kill_engine).start()


class Saboteur(Observer):
    """Does something once, at the n-th time that a phase begins."""

    def __init__(self, plan: dict[tuple[str, int], Callable[[], None]]) -> None:
        self.plan = plan
        self.count: Counter[str] = Counter()
        self.warnings: list[str] = []
        self.ended_by: list[type] = []

    def ending(self, error: BaseException) -> None:
        self.ended_by.append(type(error))

    def phase(self, name: str) -> None:
        self.count[name] += 1
        self.plan.pop((name, self.count[name]), lambda: None)()

    def warning(self, text: str) -> None:
        self.warnings.append(text)


def add_node(cluster: Cluster, num_cpus: int) -> Any:
    """Start a node, for which Ray gives it 30 s, too short on a busy machine; try three times."""
    for _ in range(2):
        try:
            return cluster.add_node(num_cpus=num_cpus, include_dashboard=False)
        except Exception as error:  # Ray reports a time-out as a plain Exception
            print(f"a node did not start: {error}")
    return cluster.add_node(num_cpus=num_cpus, include_dashboard=False)


@pytest.fixture(scope="module")
def cluster():
    """A head without CPUs, and the nodes for the runs, by their ids: see `two_nodes`. Ranks and engines are forks."""
    with pytest.MonkeyPatch.context() as patch, warm_commands(["worker"]):
        patch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
        cluster = Cluster()
        add_node(cluster, 0)
        cluster.nodes = {}
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        yield cluster
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture
def two_nodes(cluster):
    """The cluster with two nodes, also after a test that has lost one."""
    while len(cluster.nodes) < 2:
        node = add_node(cluster, NUM_CLUSTER_CPUS)
        cluster.nodes[node.node_id] = node
    return cluster


def check_that_a_node_without_a_file_is_named(job: OnlineJob) -> None:
    """Check it with a file that only this process has."""
    with open(job.engine.model + "/config.json", "rb") as file:
        descriptor = fcntl.fcntl(file, fcntl.F_DUPFD, 900)
    path = f"/proc/self/fd/{descriptor}"
    lacking = dataclasses.replace(job, engine=dataclasses.replace(job.engine, model=path))
    try:
        with placed_bundles(job.plan) as reserved:
            check_files(job, reserved)
            address = re.escape(ray.util.get_node_ip_address())
            with pytest.raises(EngineError, match=rf"the node {address} lacks {path}, which this machine has"):
                check_files(lacking, reserved)
    finally:
        os.close(descriptor)
        Path(job.save_path).rmdir()


@pytest.mark.parametrize("asynchronous", [AsyncSpec(max_staleness=1), None], ids=["at once", "in turn"])
def test_run_survives_killed_engines_and_the_loss_of_its_node(two_nodes, tmp_path, asynchronous):
    """Engines die while they generate in the synchronous run, and while they get weights in the asynchronous one.

    That one is shorter, and keeps its two nodes, each with a rank. The synchronous one continues on the other node. Its
    engine gets adapters alone, and has lost the weights under them, too.
    """
    num_steps = 4 if asynchronous is None else 3
    model_path = str(tiny_model_dir(tmp_path / "model"))
    job = tiny_job(model_path, tmp_path, num_steps=num_steps, checkpoints=CheckpointSpec(folder="", every=1))
    sampling = dataclasses.replace(job.sampling, max_tokens=48)
    job = dataclasses.replace(job, sampling=sampling, asynchronous=asynchronous)
    if asynchronous is None:
        actor = job.models["actor"]
        # Fast enough that answers without the newest adapter would be seen.
        learning = dataclasses.replace(actor.optimizer, learning_rate=2e-2)
        actor = dataclasses.replace(actor, lora=LoraSpec(rank=4), optimizer=learning)
        engine = dataclasses.replace(job.engine, adapter_rank=4)
        job = dataclasses.replace(job, models=job.models | {"actor": actor}, engine=engine)
    else:
        ranks = {"actor": 2, "critic": 0, "reference": 0}
        plan = plan_placement(PlacementRequest(ranks=ranks, num_nodes={"actor": 2}), [0] * 2)
        # The flags --actor_num_nodes 2 --actor_num_gpus_per_node 1 would put the engine beside rank 0.
        plan = dataclasses.replace(plan, engines=ProcessPlan("engines", (), (Place(1),)))
        engine = dataclasses.replace(job.engine, weight_transfer=plan.weight_transfer)
        job = dataclasses.replace(job, plan=plan, engine=engine)
        check_that_a_node_without_a_file_is_named(job)
    nodes = set()

    def look():
        groups = (group for group in placement_group_table().values() if group["state"] == "CREATED")
        nodes.update(*(group["bundles_to_node_id"].values() for group in groups))

    def lose_node():
        [node] = nodes
        two_nodes.remove_node(two_nodes.nodes.pop(node), allow_graceful=False)

    saboteur = Saboteur({("train", 1): look})
    if asynchronous is None:
        saboteur.plan |= {("generate", 2): kill_engine_soon, ("train", 3): lose_node}
    else:
        saboteur.plan["sync", 2] = kill_engine  # the first sync is that of the start
    summary = run_online(job, saboteur)

    assert not saboteur.plan  # everything happened
    assert len(nodes) == len(job.plan.nodes)
    assert saboteur.ended_by == ([LostProcessError] if asynchronous is None else [])
    said = "\n".join(saboteur.warnings)
    assert said.count("engine 0 is back") == 1
    if asynchronous is None:
        # The ranks live a little longer than their node, perhaps to the end of the step.
        assert re.search("all processes start again and continue after step [23]", said)
    lines = [json.loads(line) for line in (Path(job.save_path) / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "time/step" in line]
    assert [line["step"] for line in steps] == list(range(1, num_steps + 1))
    assert [(line["samples/trained"], line["samples/failed"], line["samples/stale"]) for line in steps] == [
        (32, 0, 0)
    ] * num_steps
    assert sum(line["samples/generated"] for line in steps) == 32 * num_steps
    assert max(line["policy/staleness_max"] for line in steps) <= job.max_staleness * job.batch.num_updates
    if asynchronous is None:
        # Rollouts come from the weights that the trainers have: a restarted engine does not answer with older ones.
        assert max(gaps := [line["mismatch/logprob_gap_max"] for line in steps]) < 1e-3, gaps
    assert summary.artifacts["final model"] == "model"
    deadline = time.monotonic() + 60
    while actors("EngineActor") or actors("RankActor"):
        assert time.monotonic() < deadline, "processes of the run are left"
        time.sleep(0.1)
