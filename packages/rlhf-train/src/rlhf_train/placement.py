"""Where every process runs, as data: a pure function from what was asked and what there is to a plan."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rlhf_data.errors import ConfigError, with_hint

ROLES = ("actor", "critic", "reference")


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
    """

    device: str
    bundles: tuple[int, ...]
    groups: tuple[GroupPlan, ...]
    engines: GroupPlan
    colocated: bool
    notes: tuple[str, ...] = ()

    @property
    def shares_gpus(self) -> bool:
        """Whether engines and training processes use the same GPUs."""
        return self.device == "cuda" and self.colocated

    def group_of(self, role: str) -> GroupPlan:
        """The group whose processes hold `role`."""
        return next(group for group in self.groups if role in group.roles)

    def describe(self) -> str:
        """A table for people: one line a group."""
        lines = [f"device {self.device}, {len(self.bundles)} bundle(s), {sum(self.bundles)} GPU(s)"]
        for group in (*self.groups, self.engines):
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
    """

    ranks: Mapping[str, int]
    num_engines: int = 1
    tensor_parallel_size: int = 1
    colocate_all_models: bool = False
    colocate_actor_ref: bool = False


def plan_placement(request: PlacementRequest, resources: Resources) -> PlacementPlan:
    """Return the plan.

    On CPUs everything shares the machine: all roles in one process group beside the engines. On GPUs, models apart get
    bundles of their own; where those are more than there are, everything shares the actor's devices and a note says so.

    Raises:
        ConfigError: colocated models of unequal size, or more GPUs than there are.
    """
    roles = tuple(role for role in ROLES if role in request.ranks)
    for name, count in {**request.ranks, "vllm_num_engines": request.num_engines}.items():
        if count < 1:
            raise ConfigError(f"{name} asks for {count} processes; at least 1 is needed")
    if resources.num_gpus == 0:
        return _on_cpus(request, roles)
    notes: tuple[str, ...] = ()
    colocate = request.colocate_all_models
    if not colocate:
        _check_actor_ref(request)
        asked = _gpus_apart(request, roles)
        if asked <= resources.num_gpus:
            return _apart(request, roles)
        notes = (f"models apart need {asked} GPUs and there are {resources.num_gpus}: all models share the actor's",)
    return _colocated(request, roles, resources, notes)


def _on_cpus(request: PlacementRequest, roles: tuple[str, ...]) -> PlacementPlan:
    ranks = request.ranks["actor"]
    groups = (GroupPlan("train", roles, ranks, (0,) * ranks, 0),)
    engines = GroupPlan("engines", (), request.num_engines, (0,) * request.num_engines, 0)
    return PlacementPlan("cpu", (0,), groups, engines, True)


def _check_actor_ref(request: PlacementRequest) -> None:
    actor, reference = request.ranks["actor"], request.ranks.get("reference")
    if request.colocate_actor_ref and reference not in (None, actor):
        raise ConfigError(
            with_hint(
                f"actor and reference share processes: the actor has {actor}, the reference {reference}",
                "set --ref_num_nodes and --ref_num_gpus_per_node to the actor's, or drop --colocate_actor_ref",
            )
        )


def _groups_apart(request: PlacementRequest, roles: tuple[str, ...]) -> list[tuple[str, ...]]:
    if request.colocate_actor_ref and "reference" in roles:
        return [("actor", "reference"), *((role,) for role in roles if role not in ("actor", "reference"))]
    return [(role,) for role in roles]


def _gpus_apart(request: PlacementRequest, roles: tuple[str, ...]) -> int:
    trainers = sum(request.ranks[hosted[0]] for hosted in _groups_apart(request, roles))
    return trainers + request.num_engines * request.tensor_parallel_size


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
    return PlacementPlan("cuda", tuple(bundles), tuple(groups), engines, False)


def _colocated(
    request: PlacementRequest, roles: tuple[str, ...], resources: Resources, notes: tuple[str, ...]
) -> PlacementPlan:
    ranks = request.ranks["actor"]
    unequal = {role: count for role, count in request.ranks.items() if count != ranks}
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
    return PlacementPlan("cuda", (1,) * ranks, groups, GroupPlan("engines", (), ranks, indices, 1), True, notes)


def local_resources() -> Resources:
    """Return what this machine has, by CUDA_VISIBLE_DEVICES or the driver's device files: no GPU library is needed."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        num_gpus = len([device for device in visible.split(",") if device.strip() not in ("", "-1")])
    else:
        num_gpus = len([path for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdigit()])
    return Resources(os.cpu_count() or 1, num_gpus)
