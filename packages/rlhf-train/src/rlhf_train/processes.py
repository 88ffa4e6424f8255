"""Starts the processes of a run on Ray: a cluster, a placement group from the plan, and actors in it."""

import logging
import math
import os
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from rlhf_data.errors import ConfigError, EngineError
from rlhf_rollout.mps import MpsDaemon
from rlhf_rollout.ray_actors import (
    RayEngine,
    RayScorer,
    RemoteEngine,
    RewardModelActor,
    node_address,
    own_gpus,
)
from rlhf_train.cluster.gpu_meter import GpuMeter
from rlhf_train.cluster.places import PlacementPlan, ProcessPlan
from rlhf_train.cluster.ray_session import check_resources, join, started_cluster, wait
from rlhf_train.generation.divided_rewards import DividedScorer, RewardRank
from rlhf_train.generation.run_spec import RunSpec
from rlhf_train.learning.learning_spec import LearningSpec
from rlhf_train.learning.rank_actor import RankActor
from rlhf_train.learning.ranks import RankSet
from rlhf_train.online_job import OnlineJob

PLACEMENT_TIMEOUT_S = 60.0
REMOVAL_TIMEOUT_S = 10.0
SCORER_RESTARTS = 10  # per actor of a reward model
_RAY_UNITS = 10_000  # the finest fraction of a CPU that Ray can account for is 1 / 10,000

_logger = logging.getLogger(__name__)


@contextmanager
def ray_cluster(plan: PlacementPlan, address: str | None) -> Iterator[None]:
    """Join the Ray cluster at `address`; without an address, start one for this run and stop it afterwards.

    A process that is connected to a cluster already keeps that connection.
    """
    if ray.is_initialized():
        yield
    elif address is not None:
        join(address)
        yield
    else:
        # Ray accounts one CPU per process. Declare enough for all of them, even with fewer cores: a process that does
        # not fit would wait forever. And not more than needed: Ray starts a worker for each at once.
        with started_cluster(2 + sum(placed.num_ranks for placed in plan.all_processes), plan.num_gpus):
            yield


class Reserved(NamedTuple):
    """The share of the cluster that belongs to a run.

    Attributes:
        group: has one bundle per node of the plan.
        gpus: for each node, the names of its GPUs for CUDA_VISIBLE_DEVICES. A process sees those of its place.
    """

    group: PlacementGroup
    gpus: Sequence[Sequence[str]]


@contextmanager
def placed_bundles(plan: PlacementPlan) -> Iterator[Reserved]:
    """Reserve the plan's nodes in the cluster for the time of a `with` block.

    Raises EngineError when the cluster is too small, or does not have them free within `PLACEMENT_TIMEOUT_S`.
    """
    processes = Counter(place.node for placed in plan.all_processes for place in placed.places)
    bundles = [
        {"CPU": float(processes[node]), **({"GPU": float(gpus)} if gpus else {})}
        for node, gpus in enumerate(plan.nodes)
    ]
    check_resources(sum(processes.values()), plan.num_gpus)
    reserved = placement_group(bundles, strategy="STRICT_SPREAD")
    try:
        if not reserved.wait(PLACEMENT_TIMEOUT_S):
            have = ray.available_resources()
            message = f"the Ray cluster did not have {bundles} free within {PLACEMENT_TIMEOUT_S:g} s"
            free = f"free: CPU {have.get('CPU', 0)}, GPU {have.get('GPU', 0)}"
            raise EngineError(f"{message}; {free}", hint="end other jobs on the cluster, or ask for fewer GPUs")
        # A process on a GPU that others use, too, could not say to Ray which one it needs. So Ray is asked once which
        # GPUs of each node the run has, and processes are started without any.
        places = [
            {"num_gpus": gpus, "scheduling_strategy": _on(reserved, node)} for node, gpus in enumerate(plan.nodes)
        ]
        looks = [ray.remote(own_gpus).options(num_cpus=0, **place).remote() for place in places if plan.num_gpus]
        yield Reserved(reserved, wait(looks, timeout_s=PLACEMENT_TIMEOUT_S, what="a look at the GPUs of the nodes"))
    finally:
        _remove(reserved)


def _remove(group: PlacementGroup) -> None:
    """Remove a placement group, but wait at most `REMOVAL_TIMEOUT_S` for a cluster that does not answer.

    When its servers are gone, as after a SIGTERM to all processes, Ray waits for 60 s and then aborts this process,
    which would end without the message and the exit status of the run. A cluster that is still there removes the group
    by itself when this process has ended.
    """
    remover = threading.Thread(target=_try_remove, args=[group], name="placement group", daemon=True)
    remover.start()
    remover.join(REMOVAL_TIMEOUT_S)
    if remover.is_alive():
        _logger.warning("the Ray cluster has not taken the run's nodes back within %g s", REMOVAL_TIMEOUT_S)


def _try_remove(group: PlacementGroup) -> None:
    try:
        remove_placement_group(group)
    except Exception as error:  # a run does not fail because of what is left at its end
        _logger.warning("the Ray cluster has not taken the run's nodes back: %s", error)


def _on(reserved: PlacementGroup, node: int) -> PlacementGroupSchedulingStrategy:
    return PlacementGroupSchedulingStrategy(reserved, placement_group_bundle_index=node)


@contextmanager
def mps_daemons(plan: PlacementPlan, reserved: Reserved, *, is_on: bool) -> Iterator[list[Mapping[str, str]]]:
    """Run an MPS daemon on each node with engines that share a GPU, for the time of a `with` block.

    Yields the environment of each engine, which is empty for one that has its GPUs alone or unless MPS `is_on`.
    Leave the block after the engines have ended. Raises ConfigError when a daemon does not start.
    """
    users = plan.crowded_engines if is_on else []
    places = plan.engines.places
    started: dict[int, Any] = {}
    try:
        for node in {places[number].node for number in users}:
            look = ray.remote(_node_id).options(num_cpus=0, scheduling_strategy=_on(reserved.group, node)).remote()
            [node_id] = wait([look], timeout_s=PLACEMENT_TIMEOUT_S, what="a look at a node")
            # Not in the placement group: the daemon must outlive the engines, which end with the group.
            on_node = NodeAffinitySchedulingStrategy(node_id, soft=False)
            started[node] = ray.remote(MpsDaemon).options(num_cpus=0, scheduling_strategy=on_node).remote()
        calls = [daemon.start.remote() for daemon in started.values()]
        found = wait(calls, timeout_s=PLACEMENT_TIMEOUT_S, what="the start of the MPS daemons")
        environs = dict(zip(started, found, strict=True))
        yield [environs[place.node] if number in users else {} for number, place in enumerate(places)]
    finally:
        with suppress(EngineError):  # a run does not fail because of what is left at its end
            stops = [daemon.stop.remote() for daemon in started.values()]
            wait(stops, timeout_s=2 * PLACEMENT_TIMEOUT_S, what="the end of the MPS daemons")


def _node_id() -> str:
    return ray.get_runtime_context().get_node_id()


class Processes(NamedTuple):
    """The processes of a job.

    Attributes:
        engines: the generation engines, in the order of the plan.
        workers: the rank sets that train.
        scorers: for each reward model, in the order of `job.reward.models`, its replicas, or one scorer of all
            processes of a divided model.
        seconds: metrics of the start: how long the slowest process of a kind took.
        meters: sample the GPUs of each node; none without GPUs.
    """

    engines: list[RayEngine]
    workers: list[RankSet]
    scorers: list[list[RayScorer | DividedScorer]]
    seconds: dict[str, float]
    meters: Sequence[Any] = ()


def start_processes(
    job: OnlineJob, reserved: Reserved, environs: Sequence[Mapping[str, str]] | None = None
) -> Processes:
    """Start engines, trainers and reward models, and return them once all are ready.

    They load in parallel, unless engines share GPUs with trainers and sleep while these work. In that case the engines
    load first, those on one GPU one after another, and sleep, so that each finds the memory that it has later.
    `environs` are additional environment variables of each engine.

    Raises:
        EngineError: processes have not started within the engines' `start_timeout_s`.
    """
    check_files(job, reserved)
    spec = job.engine
    in_turn = job.plan.shares_gpus and spec.enable_sleep
    workers = start_workers(job.plan, reserved)  # which import libraries while engines load
    by_number: dict[int, RayEngine] = {}
    for wave in job.plan.engine_waves:
        started = start_engines(job, reserved, wave, environs)
        by_number |= zip(wave, started, strict=True)
        if in_turn:
            fresh = [engine.handle for engine in started]
            _await_ready("the start of the engines", fresh, spec.start_timeout_s)
            asleep = [handle.call.remote("sleep", False) for handle in fresh]
            wait(asleep, timeout_s=spec.control_timeout_s, what="the engines' falling asleep")
    engines = [engine for _, engine in sorted(by_number.items())]
    handles = [engine.handle for engine in engines]
    scorers = [] if job.replay else start_scorers(job, reserved)
    loads = wait(load_models(job, workers), timeout_s=spec.start_timeout_s, what="the start of the trainers")
    scoring = [handle for scorer in chain.from_iterable(scorers) for handle in scorer.handles]
    rest = [*handles, *scoring]
    ready = _await_ready("the start of the engines and reward models", rest, spec.start_timeout_s)
    seconds = {name: max(load[name] for load in loads) for name in loads[0]} if loads else {}
    if engines:
        seconds["startup/engines"] = max(ready[: len(engines)])
    meters = [
        ray.remote(GpuMeter).options(num_cpus=0, scheduling_strategy=_on(reserved.group, node)).remote(gpus)
        for node, gpus in enumerate(reserved.gpus)
    ]
    return Processes(engines, workers, scorers, seconds, meters)


def check_files(job: OnlineJob, reserved: Reserved) -> None:
    """Raise EngineError if another node of the run lacks a model that this machine has, or does not share the folder
    for results."""
    if len(job.plan.nodes) == 1:
        return
    os.makedirs(job.save_path, exist_ok=True)  # its name is new, so that a node has it only if it shares the disk
    models = [*(model.path for model in job.models.values()), job.engine.model, *job.reward.models]
    paths = [path for path in dict.fromkeys([*models, job.save_path]) if os.path.exists(path)]
    looks = [
        ray.remote(_missing).options(num_cpus=0, scheduling_strategy=_on(reserved.group, node)).remote(paths)
        for node in range(len(job.plan.nodes))
    ]
    for address, missing in wait(looks, timeout_s=PLACEMENT_TIMEOUT_S, what="a look at the files of the nodes"):
        if missing:
            message = f"the node {address} lacks {', '.join(missing)}, which this machine has"
            raise EngineError(message, hint="a run on several nodes needs a disk that they share, at the same path")


def _missing(paths: Sequence[str]) -> tuple[str, list[str]]:
    return node_address(), [path for path in paths if not os.path.exists(path)]


def _await_ready(what: str, handles: Sequence[Any], timeout_s: float) -> list[float]:
    return wait([handle.ready.remote() for handle in handles], timeout_s=timeout_s, what=what)


def start_engines(
    run: RunSpec, reserved: Reserved, numbers: Sequence[int], environs: Sequence[Mapping[str, str]] | None = None
) -> list[RayEngine]:
    """Start the engines of these numbers in the plan; return them without waiting until they are loaded.

    Each has a seed of its own: with one seed for all, engines would draw the same numbers for requests without a seed.
    """
    engines = []
    # Trainers and other engines allocate memory while one starts, unless they take turns.
    measures_memory = run.engine.enable_sleep or not run.plan.shares_gpus
    for rank in numbers:
        seed = None if run.engine.seed is None else run.engine.seed + rank
        spec = replace(run.engine, seed=seed, measures_memory=measures_memory)
        extra = {"environ": environs[rank]} if environs and environs[rank] else {}
        start = partial(_start_one, RemoteEngine, run.plan.engines, rank, reserved, "vllm", spec, **extra)
        engines.append(RayEngine(start(), spec, start))
    return engines


def start_scorers(run: OnlineJob, reserved: Reserved) -> list[list[RayScorer | DividedScorer]]:
    """Start the reward models; return the replicas of each without waiting until they are loaded.

    Raises ConfigError when the plan has places for reward models and the job has none, or the other way round.
    """
    placed = run.plan.scorers
    models = run.reward.models
    if (placed is None) != (not models):
        raise ConfigError(f"the plan has {'no ' if placed is None else ''}places for {len(models)} reward models")
    if placed is None:
        return []
    batch_size = run.reward.calls.batch_size
    options = {"dtype": run.engine.dtype, "attn_implementation": "auto", "device": run.plan.device}
    options |= {"normalize": run.reward.normalize_reward, "offload": run.reward.offload_models}
    options["max_length"] = run.engine.max_model_len
    options["parts"] = len(models)
    ranks = range(placed.num_ranks)
    # A reward model has no state, so Ray can restart it, and repeat the calls that were in it.
    scorer = ray.remote(max_restarts=SCORER_RESTARTS, max_task_retries=1)(RewardModelActor)
    scorers: list[list[RayScorer | DividedScorer]] = []
    for path in models:
        if path in run.reward.divided_models:
            part = ray.remote(RewardRank)
            starts = [partial(_start_one, part, placed, rank, reserved, path, **options) for rank in ranks]
            scorers.append([DividedScorer(starts, batch_size=batch_size, on_cpu=run.plan.device == "cpu")])
            continue
        separator = run.reward.step_separator if path in run.reward.process_models else None
        own = {**options, "step_separator": separator, "batch_size": batch_size, "images": run.engine.images}
        own["compiles"] = run.models["actor"].packing and run.models["actor"].torch_compile != "off"
        starts = [partial(_start_one, scorer, placed, rank, reserved, path, **own) for rank in ranks]
        scorers.append([RayScorer(start(), start) for start in starts])
    return scorers


def start_workers(plan: PlacementPlan, reserved: Reserved) -> list[RankSet]:
    """Start the rank sets that train, without models; return them without waiting."""
    rank_sets = [RankSet(placed.roles, _start(ray.remote(RankActor), placed, reserved)) for placed in plan.trainers]
    for ranks in rank_sets:
        ranks.start(RankActor.prepare)
    return rank_sets


def load_models(spec: LearningSpec, rank_sets: Sequence[RankSet]) -> list[Any]:
    """Have the ranks load their models; return references to what `RankActor.load` returns."""
    # The same without the prompts of a job, which ranks need not have.
    spec = LearningSpec(**{field.name: getattr(spec, field.name) for field in fields(LearningSpec)})
    loads = []
    for ranks in rank_sets:
        size = len(ranks.handles)
        master = None
        if size > 1:
            first = [ranks.handles[0].master_address.remote()]
            [master] = wait(first, timeout_s=spec.engine.start_timeout_s, what="the start of a trainer's process")
        models = {role: spec.models[role] for role in ranks.roles}
        loads += ranks.start_each(RankActor.load, [(rank, size, models, spec, master) for rank in range(size)])
    return loads


def _start(actor: Any, placed: ProcessPlan, reserved: Reserved, *args: Any, **kwargs: Any) -> list[Any]:
    """Start one `actor` in each place of `placed`; see `_start_one`."""
    return [_start_one(actor, placed, rank, reserved, *args, **kwargs) for rank in range(placed.num_ranks)]


def _start_one(
    actor: Any, placed: ProcessPlan, rank: int, reserved: Reserved, *args: Any, parts: int = 1, **kwargs: Any
) -> Any:
    """Start an `actor` in the place of `rank`, with `1 / parts` of the place's CPU; return its handle."""
    place = placed.places[rank]
    gpus = [reserved.gpus[place.node][gpu] for gpu in place.gpus]
    # Rounded down to what Ray can count, so that all parts fit together.
    share = math.floor(_RAY_UNITS / parts) / _RAY_UNITS
    options = {"num_cpus": share, "scheduling_strategy": _on(reserved.group, place.node)}
    return actor.options(**options).remote(*args, gpus=gpus, **kwargs)
