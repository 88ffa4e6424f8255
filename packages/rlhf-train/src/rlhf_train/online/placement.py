"""Where every process runs, as data: a pure function from what was asked and what there is to a plan."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlhf_data.errors import ConfigError

ROLES = ("actor", "critic", "reference")
SHARED_GPU = 0.9  # what processes on one GPU divide between them; Ray only counts it


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """Processes of one kind, each hosting `roles`.

    Attributes:
        name: of the group.
        roles: the models each of its processes holds; empty for generation engines.
        bundles: the index of the bundle each process lives in.
        gpus_a_rank: whole GPUs that a process uses; it may share them with other groups.
    """

    name: str
    roles: tuple[str, ...]
    bundles: tuple[int, ...]
    gpus_a_rank: int

    @property
    def num_ranks(self) -> int:
        """Processes: data-parallel ranks, or engines."""
        return len(self.bundles)


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


def plan_placement(request: PlacementRequest, num_gpus: int) -> PlacementPlan:
    """Return the plan.

    On CPUs everything shares the machine: all roles in one process group beside the engines and the reward models. On
    GPUs, models apart get bundles of their own; where those are more than there are, everything shares the actor's
    devices and a note says so.

    Raises:
        ConfigError: colocated models of unequal size, or more GPUs than there are.
    """
    if request.reward_ranks < 0:
        raise ConfigError(f"the reward models ask for {request.reward_ranks} processes; 0 is for none")
    for name, count in {**request.ranks, "vllm_num_engines": request.num_engines}.items():
        if count < 1:
            raise ConfigError(f"{name} asks for {count} processes; at least 1 is needed")
    if num_gpus == 0:
        counts = (request.ranks["actor"], request.num_engines, request.reward_ranks)
        return _together("cpu", request, [(0,) * count for count in counts])
    notes: tuple[str, ...] = ()
    if not request.colocate_all_models:
        plan = _apart(request)
        asked = sum(plan.bundles)
        if asked <= num_gpus:
            return plan
        notes = (f"models apart need {asked} GPUs and there are {num_gpus}: all models share the actor's",)
    _check_together(request, num_gpus)
    places = tuple(range(request.ranks["actor"]))
    return _together("cuda", request, [places, places, places if request.reward_ranks else ()], notes)


def _together(
    device: str, request: PlacementRequest, places: Sequence[tuple[int, ...]], notes: tuple[str, ...] = ()
) -> PlacementPlan:
    """Return the plan of one training group that shares its devices; `places` are its, the engines', the scorers'."""
    gpus = int(device == "cuda")
    trainers, engines, scorers = places
    return PlacementPlan(
        device=device,
        bundles=(gpus,) * (max(trainers) + 1),
        groups=(GroupPlan("train", _roles(request), trainers, gpus),),
        engines=GroupPlan("engines", (), engines, gpus),
        colocated=True,
        notes=notes,
        scorers=_scorers(scorers, gpus),
    )


def _check_together(request: PlacementRequest, num_gpus: int) -> None:
    ranks = request.ranks["actor"]
    asked = dict(request.ranks) | ({"reward": request.reward_ranks} if request.reward_ranks else {})
    unequal = {role: count for role, count in asked.items() if count != ranks}
    if unequal:
        message = f"models that share devices need equally many: actor has {ranks}, {unequal}"
        raise ConfigError(message, hint="set every *_num_nodes x *_num_gpus_per_node to the actor's")
    if request.num_engines != ranks or request.tensor_parallel_size != 1:
        message = f"colocated engines take {request.num_engines} x {request.tensor_parallel_size} GPUs, not {ranks}"
        raise ConfigError(message, hint=f"use --vllm_num_engines {ranks} --vllm_tensor_parallel_size 1")
    if ranks > num_gpus:
        message = f"{ranks} GPUs asked, {num_gpus} in the cluster"
        raise ConfigError(message, hint="lower --actor_num_gpus_per_node")


def _apart(request: PlacementRequest) -> PlacementPlan:
    """Return the plan in which every group has bundles of its own, but for those that were to share."""
    roles = _roles(request)
    hosted = [(role,) for role in roles]
    if request.colocate_actor_ref and "reference" in roles:
        actor, reference = request.ranks["actor"], request.ranks["reference"]
        if actor != reference:
            message = f"actor and reference share processes: the actor has {actor}, the reference {reference}"
            hint = "set --ref_num_nodes and --ref_num_gpus_per_node to the actor's, or drop --colocate_actor_ref"
            raise ConfigError(message, hint=hint)
        hosted = [("actor", "reference"), *((role,) for role in roles if role not in ("actor", "reference"))]
    bundles: list[int] = []

    def reserve(count: int, gpus: int = 1) -> tuple[int, ...]:
        bundles.extend([gpus] * count)
        return tuple(range(len(bundles) - count, len(bundles)))

    groups = tuple(GroupPlan("+".join(names), names, reserve(request.ranks[names[0]]), 1) for names in hosted)
    engine_gpus = request.tensor_parallel_size
    engines = GroupPlan("engines", (), reserve(request.num_engines, engine_gpus), engine_gpus)
    critics = next((group.bundles for group in groups if "critic" in group.roles), None)
    if request.colocate_critic_reward and request.reward_ranks and critics is not None:
        places, critic = critics, len(critics)
        if request.reward_ranks != critic:
            message = f"critic and reward models share devices: the critic has {critic}, they have"
            hint = "set --reward_num_nodes and --reward_num_gpus_per_node to the critic's, or drop"
            raise ConfigError(f"{message} {request.reward_ranks}", hint=f"{hint} --colocate_critic_reward")
    else:
        places = reserve(request.reward_ranks)
    return PlacementPlan("cuda", tuple(bundles), groups, engines, False, scorers=_scorers(places, 1))


def _roles(request: PlacementRequest) -> tuple[str, ...]:
    return tuple(role for role in ROLES if role in request.ranks)


def _scorers(bundles: tuple[int, ...], gpus: int) -> GroupPlan | None:
    return GroupPlan("reward", ("reward",), bundles, gpus) if bundles else None
