"""Processes of a run in a real cluster: one that dies, and reward models."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

import rlhf_train
from listening import LOOPBACK, listening
from rlhf_data.errors import ConfigError, EngineError
from rlhf_models.testing import tiny_reward_model_dir
from rlhf_rollout.engines import EngineSpec
from rlhf_rollout.host import free_port
from rlhf_rollout.rewards.sources import CallOptions, RewardSource
from rlhf_train import processes
from rlhf_train.cluster.placement import PlacementRequest, plan_placement
from rlhf_train.generation.run_spec import RewardSpec
from rlhf_train.processes import (
    Reserved,
    check_files,
    placed_bundles,
    ray_cluster,
    start_processes,
    start_scorers,
    wait,
)

JOIN = """
import json, os, sys
from rlhf_cli.preflight.devices import find_gpus
from rlhf_train.processes import _start_one, placed_bundles, ray_cluster, wait
from rlhf_train.cluster.placement import PlacementRequest, plan_placement
from rlhf_data.errors import EngineError

nodes, address = find_gpus()
import ray
from rlhf_rollout.engines import EngineSpec
from rlhf_rollout.ray_actors import EngineActor
from rlhf_train.learning.rank_actor import RankActor

class Looks:
    def look(self):
        import rlhf_train
        return [os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("OMP_WAIT_POLICY"), rlhf_train.__file__]

class Engine(Looks, EngineActor):
    def __init__(self, gpus):
        super().__init__("fake", EngineSpec(model=""), gpus)

class Rank(Looks, RankActor):
    pass

# Two GPUs for an engine and a rank on one of them; then a worker without GPUs, and one with those that Ray gives it.
shared = PlacementRequest(ranks={"actor": 1}, tensor_parallel_size=2, colocate_all_models=True)
plan = plan_placement(shared, nodes)
engine = ray.remote(concurrency_groups={"requests": 1, "control": 1})(Engine)
rank = ray.remote(Rank)
with ray_cluster(plan, address):
    with placed_bundles(plan) as reserved:
        actors = [_start_one(engine, plan.engines, 0, reserved), _start_one(rank, plan.trainers[0], 0, reserved)]
        seen = wait([actor.look.remote() for actor in actors])
    actors = [rank.options(num_cpus=0, num_gpus=num_gpus).remote() for num_gpus in (0, 2)]
    seen += wait([actor.look.remote() for actor in actors])
    try:
        with placed_bundles(plan_placement(PlacementRequest(ranks={"actor": 3}), [])):
            refused = None
    except EngineError as error:
        refused = str(error)
print(json.dumps({"nodes": nodes, "address": address, "seen": seen, "refused": refused}))
"""


@pytest.fixture
def left_running(monkeypatch):
    """A cluster as `ray start --head` leaves it, of 2 CPUs and 2 GPUs that Ray is not to set; return its address."""
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as folder:
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        monkeypatch.setenv("RAY_TMPDIR", folder)
        port = free_port()
        command = [sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start", "--head", "--block"]
        command += ["--num-cpus=2", "--num-gpus=2", f"--port={port}", "--include-dashboard=false"]
        environment = os.environ | {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1", "PYTHONPATH": ""}
        environment.pop("CUDA_VISIBLE_DEVICES", None)
        head = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, start_new_session=True)
        try:
            deadline = time.monotonic() + 180
            while not (Path(folder) / "ray/ray_current_cluster").exists():
                assert head.poll() is None and time.monotonic() < deadline, "ray start did not come up"
                time.sleep(0.2)
            yield port
        finally:
            head.terminate()
            head.wait(timeout=60)


def test_run_joins_the_cluster_that_ray_start_left_and_each_worker_takes_its_own_gpu(left_running):
    own = os.pathsep.join(path for path in sys.path if path and not path.startswith((sys.prefix, sys.base_prefix)))
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": own}
    environment.pop("OMP_WAIT_POLICY", None)
    done = subprocess.run([sys.executable, "-c", JOIN], env=environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["address"].endswith(f":{left_running}")
    assert result["nodes"] == [2]
    assert [devices for devices, _, _ in result["seen"]] == ["0,1", "0", None, "0,1"]
    assert [policy for _, policy, _ in result["seen"]] == [None, None, "PASSIVE", None]
    assert {source for _, _, source in result["seen"]} == {rlhf_train.__file__}
    assert result["refused"].startswith("the run needs 4 CPUs and 0 GPUs, and the Ray cluster has 2 and 2")


@pytest.fixture(scope="module")
def cluster():
    """A cluster of its own, for all tests below that need one."""
    with ray_cluster(plan_placement(PlacementRequest(ranks={"actor": 1}, reward_ranks=2), []), None):
        yield


KNOCK = """
import sys
from ray._raylet import GcsClient
print(len(GcsClient(address=sys.argv[1]).get_all_node_info(timeout=60)))
"""


def test_own_cluster_listens_on_the_loopback_address_only_and_asks_for_its_token(cluster, monkeypatch, tmp_path):
    import ray

    assert ray.cluster_resources()["CPU"] == 2 + 4  # an engine, three others; Ray starts as many workers on any machine
    wait([ray.remote(lambda: None).remote()])  # a worker is up, too
    family = [psutil.Process(), *psutil.Process().children(recursive=True)]
    started = " ".join(word for process in family for word in process.cmdline())
    assert "gcs_server" in started
    assert not [name for name in ("monitor.py", "dashboard.py") if name in started]
    heard = listening(family)
    assert heard and heard <= LOOPBACK

    monkeypatch.setenv("HOME", str(tmp_path))  # an account without a token of its own
    command = [sys.executable, "-c", KNOCK, ray.get_runtime_context().gcs_address]

    def knock(**variables):
        environment = os.environ | {"RAY_AUTH_MODE": "token"} | variables
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
        return done.stdout.strip() or done.stderr

    assert knock() == "1"
    assert "Unauthenticated" in knock(RAY_AUTH_TOKEN="0" * 64)
    assert "Unauthenticated" in knock(RAY_AUTH_MODE="disabled", RAY_AUTH_TOKEN="")


SIGNALLED = """
import sys, time
from rlhf_data.options.exits import exit_status
from rlhf_train.processes import placed_bundles, ray_cluster
from rlhf_train.cluster.placement import PlacementRequest, plan_placement
from rlhf_train.run.interrupts import Interrupts

plan = plan_placement(PlacementRequest(ranks={"actor": 1}), [])

def run():
    with Interrupts() as interrupts, ray_cluster(plan, None):
        interrupts.listen()
        with placed_bundles(plan):
            print("placed", flush=True)
            time.sleep(600)

sys.exit(exit_status(run))
"""


def test_sigterm_ends_a_process_with_its_own_status_though_the_servers_of_its_cluster_are_dead(monkeypatch):
    """As when systemd sends SIGTERM to all processes. Ray would wait for 60 s and then end the process with status 1.

    The servers are in other process groups: a signal to that of the process alone does not reach them.
    """
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)
        command = [sys.executable, "-c", SIGNALLED]
        with subprocess.Popen(command, stdout=-1, stderr=-1, text=True, start_new_session=True) as run:
            try:
                assert run.stdout.readline() == "placed\n", run.stderr.read()
                children = psutil.Process(run.pid).children()
                servers = [child for child in children if child.name() in ("gcs_server", "raylet")]
                assert len(servers) == 2 and run.pid not in [os.getpgid(server.pid) for server in servers]
                for server in servers:
                    server.kill()
                os.killpg(run.pid, signal.SIGTERM)
                _, errors = run.communicate(timeout=180)
            finally:
                run.kill()
        assert (run.returncode, errors.splitlines()[-1]) == (128 + signal.SIGTERM, "interrupted")
        assert not list(Path(folder).glob("ray/session_2*"))


class Mortal:
    """Ends its process."""

    def end(self) -> None:
        os._exit(1)


def test_process_that_dies_is_an_engine_error_with_a_hint(cluster):
    import ray

    with placed_bundles(plan_placement(PlacementRequest(ranks={"actor": 1}), [])):
        # By value: Ray's workers need not find this file.
        ray.cloudpickle.register_pickle_by_value(__import__(__name__, fromlist=["Mortal"]))
        actor = ray.remote(Mortal).remote()
        with pytest.raises(EngineError, match=r"(?s)a process of the run is gone.*hint: .*out of memory"):
            wait([actor.end.remote()])


class Sleeper:
    """Is never ready."""

    def ready(self) -> None:
        time.sleep(3600)

    def call(self, method: str, *_: object) -> None:
        time.sleep(3600)


class Ready(Sleeper):
    """Is ready, and hangs at the next call."""

    def ready(self) -> None:
        pass


@pytest.fixture
def start(cluster):
    """A function that starts an actor of a class of this file; they end with the test."""
    import ray

    ray.cloudpickle.register_pickle_by_value(__import__(__name__, fromlist=["Sleeper"]))
    actors = []

    def start_one(kind):
        actors.append(ray.remote(kind).options(num_cpus=0).remote())
        return actors[-1]

    yield start_one
    for actor in actors:
        ray.kill(actor)


@pytest.mark.parametrize(
    ("kind", "shares_gpus", "start_timeout_s", "what"),
    [
        (Sleeper, True, 3.0, "the start of the engines"),
        (Sleeper, False, 3.0, "the start of the engines and reward models"),
        (Ready, True, 120.0, "the engines' falling asleep"),
    ],
)
def test_start_that_hangs_is_an_engine_error_with_a_hint(monkeypatch, start, kind, shares_gpus, start_timeout_s, what):
    spec = EngineSpec(model="none", enable_sleep=True, start_timeout_s=start_timeout_s, control_timeout_s=3.0)
    job = SimpleNamespace(
        plan=SimpleNamespace(shares_gpus=shares_gpus, engine_waves=[[0]], nodes=(0,)), engine=spec, replay=""
    )
    for name, started in (
        ("start_engines", [SimpleNamespace(handle=start(kind))]),
        ("start_scorers", []),
        ("start_workers", []),
        ("load_models", []),
    ):
        monkeypatch.setattr(processes, name, lambda *words, started=started: started)
    with pytest.raises(EngineError, match=rf"(?s)^{what} took longer than 3 s.*hint: .*Ray's session folder"):
        start_processes(job, None)


def test_trainer_whose_start_hangs_is_an_engine_error(monkeypatch, start):
    spec = EngineSpec(model="none", start_timeout_s=3.0)
    job = SimpleNamespace(plan=SimpleNamespace(shares_gpus=False, engine_waves=[], nodes=(0,)), engine=spec, replay="")
    loading = [start(Sleeper).ready.remote()]
    parts = (("start_engines", []), ("start_scorers", []), ("start_workers", []), ("load_models", loading))
    for name, started in parts:
        monkeypatch.setattr(processes, name, lambda *words, started=started: started)
    with pytest.raises(EngineError, match="the start of the trainers took longer than 3 s"):
        start_processes(job, None)


def test_processes_share_the_cpu_as_the_driver_does(cluster):
    import ray

    assert wait([ray.remote(lambda: os.nice(0)).remote()]) == [os.nice(0)]


def scoring_job(folders, **request):
    """What `start_scorers` reads of a job."""
    sources = tuple(RewardSource(kind="model", targets=(str(folder),)) for folder in folders)
    plan = plan_placement(PlacementRequest(ranks={"actor": 1}, **request), [])
    reward = RewardSpec(sources=sources, calls=CallOptions(batch_size=2), normalize_reward=True)
    models = {"actor": SimpleNamespace(packing=True, torch_compile="auto")}
    return SimpleNamespace(plan=plan, reward=reward, engine=EngineSpec(model="none"), models=models)


def test_reward_models_that_judge_steps_know_what_ends_a_step_and_others_do_not(monkeypatch):
    started = []
    monkeypatch.setattr(processes, "_start_one", lambda *places, **options: started.append((places[2:], options)))
    job = scoring_job(["a", "b"], reward_ranks=2)
    job.reward = replace(job.reward, process_models=("b",), step_separator="\n\n")
    start_scorers(job, "reserved")
    found = [(*places, options["step_separator"], options["parts"]) for places, options in started]
    assert found == [
        *((rank, "reserved", "a", None, 2) for rank in (0, 1)),
        *((rank, "reserved", "b", "\n\n", 2) for rank in (0, 1)),
    ]
    compiled = [options["compiles"] for _, options in started]
    for change in ({"torch_compile": "off"}, {"packing": False, "torch_compile": "auto"}):
        vars(job.models["actor"]).update(change)
        start_scorers(job, "reserved")
        compiled += [options["compiles"] for _, options in started[-1:]]
    assert compiled == [True] * 4 + [False] * 2


def test_reward_models_that_the_plan_has_no_places_for_are_refused():
    with pytest.raises(ConfigError, match="no places for 1 reward models"):
        start_scorers(scoring_job(["model"]), None)
    with pytest.raises(ConfigError, match="places for 0 reward models"):
        start_scorers(scoring_job([], reward_ranks=1), None)
    assert start_scorers(scoring_job([]), None) == []


def start_of(monkeypatch, **engine):
    """The processes of three engines on two GPUs with trainers, and a log of what was waited for and called."""
    log = []

    class Handle:
        """Answers as a Ray actor would."""

        def __init__(self, number):
            self.ready = SimpleNamespace(remote=lambda: log.append(f"{number} ready") or number + 0.5)
            self.call = SimpleNamespace(remote=lambda method, *_: log.append(f"{number} {method}"))

    def start(job, reserved, wave, environs):
        log.append(f"{wave} started")
        return [SimpleNamespace(handle=Handle(number)) for number in wave]

    loads = [{"startup/load": 2.0}, {"startup/load": 3.0}]
    request = PlacementRequest(ranks={"actor": 2}, num_engines=3, colocate_all_models=True)
    job = SimpleNamespace(plan=plan_placement(request, [2]), engine=EngineSpec(model="none", **engine), replay="")
    monkeypatch.setattr(processes, "wait", lambda references, **words: references)
    monkeypatch.setattr(processes, "start_scorers", lambda *words: [])
    monkeypatch.setattr(processes, "start_workers", lambda *words: log.append("trainers started") or [])
    monkeypatch.setattr(processes, "load_models", lambda *words: log.append("trainers load") or loads)
    monkeypatch.setattr(processes, "start_engines", start)
    return start_processes(job, Reserved(None, ())), log


def test_engines_on_one_gpu_that_sleep_start_one_after_another_and_before_the_trainers_load(monkeypatch):
    """On one GPU, vLLM takes what is free: an engine that starts sees those that started before, asleep."""
    processes, log = start_of(monkeypatch, enable_sleep=True)
    assert len(processes.engines) == 3
    turns = ["[0, 1] started", "0 ready", "1 ready", "0 sleep", "1 sleep", "[2] started", "2 ready", "2 sleep"]
    assert log[:10] == ["trainers started", *turns, "trainers load"]


def test_engines_on_one_gpu_that_never_sleep_start_together_with_the_trainers(monkeypatch):
    processes, log = start_of(monkeypatch)
    assert log[:5] == ["trainers started", "[0, 1] started", "[2] started", "trainers load", "0 ready"]
    assert not any("sleep" in line for line in log)
    assert processes.seconds == {"startup/load": 3.0, "startup/engines": 2.5}


def test_a_node_without_a_model_of_the_run_is_named(monkeypatch, tmp_path):
    model = tiny_reward_model_dir(tmp_path / "model")
    plan = plan_placement(PlacementRequest(ranks={"actor": 2}, num_nodes={"actor": 2}), [0, 0])
    models = {"actor": SimpleNamespace(path=str(model)), "critic": SimpleNamespace(path="org/name-on-the-hub")}
    reward = SimpleNamespace(models=())
    job = SimpleNamespace(
        plan=plan, models=models, engine=EngineSpec(model=str(model)), reward=reward, save_path=str(tmp_path / "out")
    )
    asked = []
    here = SimpleNamespace(remote=lambda function: SimpleNamespace(options=lambda **words: function))
    monkeypatch.setattr(processes, "ray", here)
    monkeypatch.setattr(processes, "wait", lambda references, **words: references)
    answers = SimpleNamespace(remote=lambda paths: asked.append(paths) or ("10.0.0.2", paths[:1]))
    monkeypatch.setattr(processes, "_missing", answers)
    with pytest.raises(EngineError, match=rf"the node 10.0.0.2 lacks {model}, which(.|\n)*hint: .* share"):
        check_files(job, Reserved(None, []))
    assert asked == [[str(model), str(tmp_path / "out")]] * 2
