"""Where every process runs, as data: a pure function from what was asked and what there is to a plan."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rlhf_data.errors import ConfigError, with_hint

ROLES = ("actor", "critic", "reference")
SHARED_GPU = 0.9  # what processes on one GPU divide between them; Ray only counts it


@dataclass(frozen=True, slots=True)
class Resources:
    """What the cluster has.

    Attributes:
        num_cpus: logical CPUs.
        num_gpus: GPUs; 0 runs everything on CPUs.
    """

    num_cpus: int
    num_gpus: int


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """Processes of one kind: `num_ranks` of them, each hosting `roles`.

    Attributes:
        name: of the group.
        roles: the models each of its processes holds; empty for generation engines.
        num_ranks: processes: data-parallel ranks, or engines.
        bundles: the index of the bundle each process lives in.
        gpus_a_rank: whole GPUs that a process uses; it may share them with other groups.
    """

    name: str
    roles: tuple[str, ...]
    num_ranks: int
    bundles: tuple[int, ...]
    gpus_a_rank: int


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    """Bundles of resources and who lives in them.

    Attributes:
        device: "cuda" or "cpu".
        bundles: GPUs of each bundle.
        groups: the training groups.
        engines: the generation engines.
        colocated: engines and training processes share devices.
        notes: what was decided without being asked, a sentence each.
        scorers: the reward models, all of them in each of its places; None when there are none.
    """

    device: str
    bundles: tuple[int, ...]
    groups: tuple[GroupPlan, ...]
    engines: GroupPlan
    colocated: bool
    notes: tuple[str, ...] = ()
    scorers: GroupPlan | None = None

    @property
    def all_groups(self) -> tuple[GroupPlan, ...]:
        """Trainers, engines and reward models."""
        return (*self.groups, self.engines, *((self.scorers,) if self.scorers else ()))

    @property
    def shares_gpus(self) -> bool:
        """Whether engines and training processes use the same GPUs."""
        return self.device == "cuda" and self.colocated

    def group_of(self, role: str) -> GroupPlan:
        """The group whose processes hold `role`."""
        return next(group for group in self.groups if role in group.roles)

    def gpu_share(self, group: GroupPlan, rank: int) -> float:
        """The part of its bundle's GPUs that a process is counted for: all of them, or as much as the others there."""
        bundle = group.bundles[rank]
        num_sharing = sum(other.bundles.count(bundle) for other in self.all_groups)
        return float(group.gpus_a_rank) if num_sharing == 1 or not group.gpus_a_rank else SHARED_GPU / num_sharing

    def describe(self) -> str:
        """A table for people: one line a group."""
        lines = [f"device {self.device}, {len(self.bundles)} bundle(s), {sum(self.bundles)} GPU(s)"]
        for group in self.all_groups:
            holds = " + ".join(group.roles) or "vLLM"
            unit = f"{group.gpus_a_rank} GPU each" if self.device == "cuda" else "CPU"
            where = ", ".join(map(str, group.bundles))
            lines.append(f"  {group.name:<8} {group.num_ranks} x {holds} ({unit}) in bundle(s) {where}")
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRequest:
    """What was asked for.

    Attributes:
        ranks: role to data-parallel processes; a role that does not exist is absent.
        num_engines: generation engines.
        tensor_parallel_size: GPUs of one engine.
        colocate_all_models: every model and engine on the same devices.
        colocate_actor_ref: actor and reference in the same processes.
        reward_ranks: replicas of every reward model; 0 when there are none.
        colocate_critic_reward: reward models on the critic's devices.
    """

    ranks: Mapping[str, int]
    num_engines: int = 1
    tensor_parallel_size: int = 1
    colocate_all_models: bool = False
    colocate_actor_ref: bool = False
    reward_ranks: int = 0
    colocate_critic_reward: bool = False


def plan_placement(request: PlacementRequest, resources: Resources) -> PlacementPlan:
    """Return the plan.

    On CPUs everything shares the machine: all roles in one process group beside the engines and the reward models. On
    GPUs, models apart get bundles of their own; where those are more than there are, everything shares the actor's
    devices and a note says so.

    Raises:
        ConfigError: colocated models of unequal size, or more GPUs than there are.
    """
    roles = tuple(role for role in ROLES if role in request.ranks)
    if request.reward_ranks < 0:
        raise ConfigError(f"the reward models ask for {request.reward_ranks} processes; 0 is for none")
    for name, count in {**request.ranks, "vllm_num_engines": request.num_engines}.items():
        if count < 1:
            raise ConfigError(f"{name} asks for {count} processes; at least 1 is needed")
    if resources.num_gpus == 0:
        return _on_cpus(request, roles)
    notes: tuple[str, ...] = ()
    colocate = request.colocate_all_models
    if not colocate:
        _check_actor_ref(request)
        _check_critic_reward(request)
        asked = _gpus_apart(request, roles)
        if asked <= resources.num_gpus:
            return _apart(request, roles)
        notes = (f"models apart need {asked} GPUs and there are {resources.num_gpus}: all models share the actor's",)
    return _colocated(request, roles, resources, notes)


def _on_cpus(request: PlacementRequest, roles: tuple[str, ...]) -> PlacementPlan:
    ranks = request.ranks["actor"]
    groups = (GroupPlan("train", roles, ranks, (0,) * ranks, 0),)
    engines = GroupPlan("engines", (), request.num_engines, (0,) * request.num_engines, 0)
    return PlacementPlan("cpu", (0,), groups, engines, True, scorers=_scorers((0,) * request.reward_ranks, 0))


def _scorers(bundles: tuple[int, ...], gpus: int) -> GroupPlan | None:
    return GroupPlan("reward", ("reward",), len(bundles), bundles, gpus) if bundles else None


def _check_actor_ref(request: PlacementRequest) -> None:
    actor, reference = request.ranks["actor"], request.ranks.get("reference")
    if request.colocate_actor_ref and reference not in (None, actor):
        raise ConfigError(
            with_hint(
                f"actor and reference share processes: the actor has {actor}, the reference {reference}",
                "set --ref_num_nodes and --ref_num_gpus_per_node to the actor's, or drop --colocate_actor_ref",
            )
        )


def _check_critic_reward(request: PlacementRequest) -> None:
    critic = request.ranks.get("critic")
    if _on_critic(request) and request.reward_ranks != critic:
        raise ConfigError(
            with_hint(
                f"critic and reward models share devices: the critic has {critic}, they have {request.reward_ranks}",
                "set --reward_num_nodes and --reward_num_gpus_per_node to the critic's, or drop"
                " --colocate_critic_reward",
            )
        )


def _on_critic(request: PlacementRequest) -> bool:
    return request.colocate_critic_reward and request.reward_ranks > 0 and "critic" in request.ranks


def _groups_apart(request: PlacementRequest, roles: tuple[str, ...]) -> list[tuple[str, ...]]:
    if request.colocate_actor_ref and "reference" in roles:
        return [("actor", "reference"), *((role,) for role in roles if role not in ("actor", "reference"))]
    return [(role,) for role in roles]


def _gpus_apart(request: PlacementRequest, roles: tuple[str, ...]) -> int:
    trainers = sum(request.ranks[hosted[0]] for hosted in _groups_apart(request, roles))
    scorers = 0 if _on_critic(request) else request.reward_ranks
    return trainers + scorers + request.num_engines * request.tensor_parallel_size


def _apart(request: PlacementRequest, roles: tuple[str, ...]) -> PlacementPlan:
    bundles: list[int] = []
    groups = []
    for hosted in _groups_apart(request, roles):
        ranks = request.ranks[hosted[0]]
        indices = tuple(range(len(bundles), len(bundles) + ranks))
        groups.append(GroupPlan("+".join(hosted), hosted, ranks, indices, 1))
        bundles += [1] * ranks
    indices = tuple(range(len(bundles), len(bundles) + request.num_engines))
    bundles += [request.tensor_parallel_size] * request.num_engines
    engines = GroupPlan("engines", (), request.num_engines, indices, request.tensor_parallel_size)
    if _on_critic(request):
        places = next(group.bundles for group in groups if "critic" in group.roles)
    else:
        places = tuple(range(len(bundles), len(bundles) + request.reward_ranks))
        bundles += [1] * request.reward_ranks
    return PlacementPlan("cuda", tuple(bundles), tuple(groups), engines, False, scorers=_scorers(places, 1))


def _colocated(
    request: PlacementRequest, roles: tuple[str, ...], resources: Resources, notes: tuple[str, ...]
) -> PlacementPlan:
    ranks = request.ranks["actor"]
    asked = dict(request.ranks) | ({"reward": request.reward_ranks} if request.reward_ranks else {})
    unequal = {role: count for role, count in asked.items() if count != ranks}
    engine_gpus = request.num_engines * request.tensor_parallel_size
    if unequal:
        raise ConfigError(
            with_hint(
                f"models that share devices need equally many: actor has {ranks}, {unequal}",
                "set every *_num_nodes x *_num_gpus_per_node to the actor's",
            )
        )
    if engine_gpus != ranks or request.tensor_parallel_size != 1:
        raise ConfigError(
            with_hint(
                f"colocated engines take {request.num_engines} x {request.tensor_parallel_size} GPUs, not {ranks}",
                f"use --vllm_num_engines {ranks} --vllm_tensor_parallel_size 1",
            )
        )
    if ranks > resources.num_gpus:
        raise ConfigError(
            with_hint(f"{ranks} GPUs asked, {resources.num_gpus} in the cluster", "lower --actor_num_gpus_per_node")
        )
    indices = tuple(range(ranks))
    groups = (GroupPlan("train", roles, ranks, indices, 1),)
    engines = GroupPlan("engines", (), ranks, indices, 1)
    scorers = _scorers(indices if request.reward_ranks else (), 1)
    return PlacementPlan("cuda", (1,) * ranks, groups, engines, True, notes, scorers)


def local_resources() -> Resources:
    """Return what this machine has, by CUDA_VISIBLE_DEVICES or the driver's device files: no GPU library is needed."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        num_gpus = len([device for device in visible.split(",") if device.strip() not in ("", "-1")])
    else:
        num_gpus = len([path for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdigit()])
    return Resources(os.cpu_count() or 1, num_gpus)
