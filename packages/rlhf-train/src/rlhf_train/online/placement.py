"""Where every process runs: a pure function from the requested layout and the number of GPUs to a plan."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from rlhf_data.errors import ConfigError

ROLES = ("actor", "critic", "reference", "teacher")
SHARED_GPU = 0.9  # GPU share that processes on one GPU split; Ray uses it for accounting only


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """The processes of one kind: a rank set that trains, the engines, or the reward models.

    Attributes:
        name: for people, such as "actor+reference".
        roles: the models that each process holds; empty for engines.
        bundles: index of the bundle of each process; the first bundle if a process spans several.
        gpus_per_rank: GPUs that one process uses. Processes of other kinds may use the same ones.
    """

    name: str
    roles: tuple[str, ...]
    bundles: tuple[int, ...]
    gpus_per_rank: int

    @property
    def num_ranks(self) -> int:
        """Number of processes: data-parallel ranks, engines, or replicas of the reward models."""
        return len(self.bundles)


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    """Bundles of resources, and the processes in them.

    Attributes:
        device: "cuda" or "cpu".
        bundles: number of GPUs of each bundle.
        trainers: the rank sets that train.
        engines: the generation engines; none in a run that trains on recorded rollouts.
        colocated: whether engines and training processes share devices.
        notes: decisions that differ from the request, one sentence each.
        scorers: places of the reward models, each of which holds one replica of every model; None without reward
            models.
        unavailable: features that this layout needs and that do not exist, one phrase each. A run is refused unless it
            is empty.
    """

    device: str
    bundles: tuple[int, ...]
    trainers: tuple[ProcessPlan, ...]
    engines: ProcessPlan
    colocated: bool
    notes: tuple[str, ...] = ()
    scorers: ProcessPlan | None = None
    unavailable: tuple[str, ...] = ()

    @property
    def all_processes(self) -> tuple[ProcessPlan, ...]:
        """All processes: trainers, engines and reward models."""
        others = (self.engines, *((self.scorers,) if self.scorers else ()))
        return (*self.trainers, *(placed for placed in others if placed.bundles))

    @property
    def num_gpus(self) -> int:
        """Number of GPUs of the whole layout."""
        return sum(self.bundles)

    @property
    def shares_gpus(self) -> bool:
        """Whether engines and training processes use the same GPUs."""
        return self.device == "cuda" and self.colocated and self.engines.num_ranks > 0

    def trainers_of(self, role: str) -> ProcessPlan:
        """Return the rank set that holds `role`."""
        return next(placed for placed in self.trainers if role in placed.roles)

    def gpu_share(self, placed: ProcessPlan, rank: int) -> float:
        """Return the GPU share that Ray accounts for a process: whole GPUs, or an equal part of a shared GPU."""
        bundle = placed.bundles[rank]
        num_sharing = sum(other.bundles.count(bundle) for other in self.all_processes)
        return float(placed.gpus_per_rank) if num_sharing == 1 or not placed.gpus_per_rank else SHARED_GPU / num_sharing

    def describe(self) -> str:
        """Return a table for people, with one line per kind of process."""
        on_gpu = self.device == "cuda"
        head = f"{self.num_gpus} GPU(s)" if on_gpu else "no GPU, everything shares the CPU"
        width = max(len(placed.name) for placed in self.all_processes)
        rows = []
        for placed in self.all_processes:
            holds = " + ".join(placed.roles) or "vLLM"
            where = f"GPU {self._gpus(placed)}" if on_gpu else "CPU"
            rows.append(f"  {placed.name.ljust(width)}  {placed.num_ranks} x {holds}, {where}")
        return "\n".join([head, *rows, *(f"  note: {note}" for note in self.notes)])

    def _gpus(self, placed: ProcessPlan) -> str:
        """Return the GPU numbers of processes, as `0-3` for processes of one GPU or `0-1, 2-3` for larger ones.

        Numbers count over the whole layout.
        """
        starts = [sum(self.bundles[:bundle]) for bundle in placed.bundles]
        spans = [(start, start + placed.gpus_per_rank - 1) for start in starts]
        if placed.gpus_per_rank == 1 and all(right == left + 1 for left, right in pairwise(starts)):
            spans = [(starts[0], starts[-1])]
        return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRequest:
    """The layout that the user asks for.

    Attributes:
        ranks: role to number of data-parallel processes. 0 places the role with the actor; unused roles are absent.
        num_engines: number of generation engines; 0 for a run that trains on recorded rollouts.
        tensor_parallel_size: GPUs per engine.
        colocate_all_models: place all models and engines on the same devices.
        colocate_actor_ref: place actor and reference in the same processes.
        reward_ranks: replicas of every reward model; 0 places them with the actor; None without reward models.
        colocate_critic_reward: place reward models on the critic's devices.
        num_nodes: the largest number of nodes that any one model asks for.
        gpus_per_node: GPUs per node; None when all GPUs are in one node.

    Raises:
        ConfigError: a number of processes is too small.
    """

    ranks: Mapping[str, int]
    num_engines: int = 1
    tensor_parallel_size: int = 1
    colocate_all_models: bool = False
    colocate_actor_ref: bool = False
    reward_ranks: int | None = None
    colocate_critic_reward: bool = False
    num_nodes: int = 1
    gpus_per_node: int | None = None

    def __post_init__(self) -> None:
        asked = {**self.ranks, "reward": self.reward_ranks or 0}
        least = {"actor": (self.ranks["actor"], 1), "vllm_num_engines": (self.num_engines, 0)}
        least |= {name: (count, 0) for name, count in asked.items() if name != "actor"}
        for name, (count, smallest) in least.items():
            if count < smallest:
                raise ConfigError(f"{name} asks for {count} processes; at least {smallest} is needed")


def plan_placement(request: PlacementRequest, num_gpus: int) -> PlacementPlan:
    """Return the placement of all processes.

    Without GPUs, one rank set holds all roles, beside the engines and the reward models. With GPUs, models get bundles
    of their own unless the request places them together. If the request needs several GPUs, there is only one, and each
    model asks for one process, all share that GPU and a note says so.

    Args:
        request: the layout to plan.
        num_gpus: GPUs that are available; 0 for a plan on CPUs.

    Raises:
        ConfigError: models that should share processes have different sizes, or the layout needs more GPUs than there
            are.
    """
    if num_gpus == 0:
        scorers = request.ranks["actor"] if request.reward_ranks == 0 else request.reward_ranks or 0
        counts = (request.ranks["actor"], request.num_engines, scorers)
        return _on_cpu(request, [(0,) * count for count in counts])
    plan = _wanted(request)
    if plan.num_gpus <= num_gpus:
        return plan
    if num_gpus == 1 and _is_single(request):
        note = f"models apart need {plan.num_gpus} GPUs and there is 1: all models share it"
        return replace(_wanted(replace(request, colocate_all_models=True)), notes=(note,))
    raise _too_large(request, plan, num_gpus)


def gpus_needed(request: PlacementRequest) -> int:
    """Return the number of GPUs that the request needs. Raises ConfigError like `plan_placement`."""
    return _wanted(request).num_gpus


def _wanted(request: PlacementRequest) -> PlacementPlan:
    """Return the layout of the request, on as many GPUs as it needs."""
    plan = _shared(request) if request.colocate_all_models else _apart(request)
    if request.num_nodes > 1 or plan.num_gpus > (request.gpus_per_node or plan.num_gpus):
        size = f"{request.gpus_per_node} per node" if request.gpus_per_node else f"{request.num_nodes} nodes"
        nodes = f"a run on more than one node ({plan.num_gpus} GPUs, {size})"
        return replace(plan, unavailable=(*plan.unavailable, nodes))
    return plan


def _on_cpu(request: PlacementRequest, places: Sequence[tuple[int, ...]]) -> PlacementPlan:
    """Return the plan without GPUs; `places` holds the bundles of the trainers, the engines and the reward models."""
    trainers, engines, scorers = places
    return PlacementPlan(
        device="cpu",
        bundles=(0,) * (max(trainers) + 1),
        trainers=(ProcessPlan("train", _roles(request), trainers, 0),),
        engines=ProcessPlan("engines", (), engines, 0),
        colocated=True,
        scorers=_scorers(scorers, 0),
    )


def _shared(request: PlacementRequest) -> PlacementPlan:
    """Return the plan in which all models and engines use the same GPUs, each starting at GPU 0."""
    actor = request.ranks["actor"]
    size = request.tensor_parallel_size
    sizes = {role: request.ranks[role] or actor for role in _roles(request)}
    together = tuple(role for role in sizes if sizes[role] == actor)
    trainers = [ProcessPlan("train", together, tuple(range(actor)), 1)]
    trainers += [ProcessPlan(role, (role,), tuple(range(n)), 1) for role, n in sizes.items() if role not in together]
    num_scorers = actor if request.reward_ranks == 0 else request.reward_ranks or 0
    width = max(*sizes.values(), num_scorers, request.num_engines * size)
    return PlacementPlan(
        device="cuda",
        bundles=(1,) * width,
        trainers=tuple(trainers),
        engines=ProcessPlan("engines", (), tuple(range(0, request.num_engines * size, size)), size),
        colocated=True,
        scorers=_scorers(tuple(range(num_scorers)), 1),
        unavailable=_unavailable_together(request, sizes | ({"reward": num_scorers} if num_scorers else {})),
    )


def _unavailable_together(request: PlacementRequest, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Return the features that do not exist for models of these sizes and engines on the same GPUs."""
    found = []
    actor = sizes["actor"]
    engines = request.num_engines
    size = request.tensor_parallel_size
    if any(count != actor for count in sizes.values()):
        counts = ", ".join(f"{role} {count}" for role, count in sizes.items())
        found.append(f"models with unequal numbers of processes on shared GPUs ({counts})")
    if engines and size > 1:
        found.append(f"tensor-parallel engines on GPUs that they share with training ({engines} x {size} GPUs)")
    elif engines not in (0, actor):
        found.append(f"{engines} engine(s) on the GPUs of {actor} training process(es)")
    return tuple(found)


def _apart(request: PlacementRequest) -> PlacementPlan:
    """Return the plan in which all processes have GPUs of their own, except those that the request colocates."""
    hosted = _hosted(request)
    bundles: list[int] = []

    def reserve(count: int, gpus: int = 1) -> tuple[int, ...]:
        bundles.extend([gpus] * count)
        return tuple(range(len(bundles) - count, len(bundles)))

    trainers = tuple(ProcessPlan("+".join(names), names, reserve(request.ranks[names[0]]), 1) for names in hosted)
    engine_gpus = request.tensor_parallel_size
    engines = ProcessPlan("engines", (), reserve(request.num_engines, engine_gpus), engine_gpus)
    critics = next((placed.bundles for placed in trainers if "critic" in placed.roles), None)
    if request.colocate_critic_reward and request.reward_ranks is not None and critics is not None:
        places = critics
        count = request.reward_ranks or len(critics)
        if count != len(critics):
            message = (
                f"sharing needs equal numbers of processes: the critic has {len(critics)}, the reward models {count}"
            )
            hint = "set --reward_num_nodes and --reward_num_gpus_per_node to the critic's, or drop"
            raise ConfigError(message, hint=f"{hint} --colocate_critic_reward")
    elif request.reward_ranks == 0:
        places = trainers[0].bundles
    else:
        places = reserve(request.reward_ranks or 0)
    return PlacementPlan("cuda", tuple(bundles), trainers, engines, False, scorers=_scorers(places, 1))


def _hosted(request: PlacementRequest) -> list[tuple[str, ...]]:
    """Return the roles of each rank set when models do not share all GPUs, the actor's rank set first."""
    roles = _roles(request)
    with_actor = {role for role in roles if request.ranks[role] == 0}
    if request.colocate_actor_ref and "reference" in roles:
        actor = request.ranks["actor"]
        reference = request.ranks["reference"]
        if reference not in (0, actor):
            message = f"sharing needs equal numbers of processes: the actor has {actor}, the reference {reference}"
            hint = "set --ref_num_nodes and --ref_num_gpus_per_node to the actor's, or drop --colocate_actor_ref"
            raise ConfigError(message, hint=hint)
        with_actor.add("reference")
    return [("actor", *(r for r in roles if r in with_actor)), *((r,) for r in roles[1:] if r not in with_actor)]


def _too_large(request: PlacementRequest, plan: PlacementPlan, num_gpus: int) -> ConfigError:
    """Return the error for a layout that needs more GPUs than there are.

    The hint never advises fewer processes than were asked for, unless every model asks for one.
    """
    counts = ", ".join(f"{placed.name} {placed.num_ranks * placed.gpus_per_rank}" for placed in plan.all_processes)
    how = "on shared GPUs" if plan.colocated else "apart"
    message = f"models {how} need {plan.num_gpus} GPUs ({counts}), and there are {num_gpus}"
    hint = f"run where there are {plan.num_gpus} GPUs"
    shared = _wanted(replace(request, colocate_all_models=True))
    if _is_single(request):
        hint = f"--colocate_all_models --actor_num_gpus_per_node {num_gpus} --vllm_num_engines {num_gpus} shares all"
        hint = f"{hint} {num_gpus} GPUs"
    elif not plan.colocated and shared.num_gpus <= num_gpus and not shared.unavailable:
        hint = f"{hint}, or add --colocate_all_models, with which all models share {shared.num_gpus} GPUs"
    return ConfigError(message, hint=hint)


def _is_single(request: PlacementRequest) -> bool:
    """Return whether no model and no engine asks for more than one GPU."""
    counts = (*request.ranks.values(), request.reward_ranks or 0, request.num_engines, request.tensor_parallel_size)
    return max(*counts, request.num_nodes) == 1


def _roles(request: PlacementRequest) -> tuple[str, ...]:
    return tuple(role for role in ROLES if role in request.ranks)


def _scorers(bundles: tuple[int, ...], gpus: int) -> ProcessPlan | None:
    return ProcessPlan("reward", ("reward",), bundles, gpus) if bundles else None
