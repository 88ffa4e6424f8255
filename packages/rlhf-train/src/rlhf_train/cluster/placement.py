"""Where every process runs: a pure function from the requested layout and the GPUs of each node to a plan."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from rlhf_data.errors import ConfigError
from rlhf_train.cluster.places import Place, PlacementPlan, ProcessPlan

ROLES = ("actor", "critic", "draft", "reference", "teacher")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRequest:
    """The layout that the user asks for.

    Attributes:
        ranks: role to number of data-parallel processes. 0 places the role with the actor; unused roles are absent.
        num_nodes: role, or "reward", to the number of nodes that its processes divide into; 1 where it is absent.
        num_engines: number of generation engines; 0 for a run that trains on recorded rollouts.
        tensor_parallel_size: GPUs per engine, all on one node.
        colocate_all_models: place all models and engines on the same devices.
        colocate_actor_ref: place actor and reference on the same devices.
        reward_ranks: replicas of every reward model; 0 places them with the actor; None without reward models.
        colocate_critic_reward: place reward models on the critic's devices.
    """

    ranks: Mapping[str, int]
    num_nodes: Mapping[str, int] = field(default_factory=dict)
    num_engines: int = 1
    tensor_parallel_size: int = 1
    colocate_all_models: bool = False
    colocate_actor_ref: bool = False
    reward_ranks: int | None = None
    colocate_critic_reward: bool = False

    @property
    def roles(self) -> tuple[str, ...]:
        """The models that train or are compared with, the actor first."""
        return tuple(role for role in ROLES if role in self.ranks)

    @property
    def hosts(self) -> dict[str, str]:
        """For each role, and "reward": itself, or the role with which it has the number of processes in common."""
        hosts = {role: role if self.ranks[role] else "actor" for role in self.roles}
        if self.reward_ranks is not None:
            by_critic = self.colocate_critic_reward and "critic" in hosts
            hosts["reward"] = "reward" if self.reward_ranks else hosts["critic" if by_critic else "actor"]
        return hosts

    @property
    def groups(self) -> list[list[str]]:
        """The roles, and "reward", that share devices; the actor's group is the first one."""
        hosts = self.hosts
        if self.colocate_all_models:
            return [list(hosts)]
        if self.colocate_actor_ref and "reference" in hosts:
            hosts["reference"] = "actor"
        if self.colocate_critic_reward and {"critic", "reward"} <= hosts.keys():
            hosts["reward"] = hosts["critic"]
        return [[name for name in hosts if hosts[name] == host] for host in dict.fromkeys(hosts.values())]


def plan_placement(request: PlacementRequest, nodes: Sequence[int]) -> PlacementPlan:
    """Return the placement of all processes.

    Without GPUs, one rank set holds all roles, beside the engines and the reward models. With GPUs, models get GPUs of
    their own unless the request places them together. Of the models that share GPUs, those with the actor's places
    also share its processes; the others have processes of their own from the first of these GPUs on. Engines that share
    GPUs spread over the actor's, with as many on each as it takes.

    If the request needs several GPUs, there is only one, and each model asks for one process, all share that GPU and a
    note says so. A note also says when a model spans more nodes than it asks for, because none is large enough.

    Args:
        request: the layout to plan.
        nodes: the number of GPUs of each node; without any, the plan is for CPUs.

    Raises:
        ConfigError: the layout needs more GPUs, more nodes or larger nodes than there are.
    """
    if not sum(nodes):
        return _on_cpu(request, len(nodes))
    plan = _on_gpus(request, nodes)
    if plan is not None:
        return plan
    needed = plan_anywhere(request)
    if sum(nodes) == 1 and _is_single(request):
        note = f"models apart need {needed.num_gpus} GPUs and there is 1: all models share it"
        return replace(plan_placement(replace(request, colocate_all_models=True), nodes), notes=(note,))
    raise _too_large(request, needed, nodes)


def plan_anywhere(request: PlacementRequest, gpus_per_node: int | None = None) -> PlacementPlan:
    """Return the placement on as many nodes of `gpus_per_node` GPUs as it takes; None for nodes of any size.

    Raises ConfigError when one engine needs a larger node.
    """
    models = sum(request.ranks.values()) + (request.reward_ranks or 0)
    most = models + request.num_engines * request.tensor_parallel_size
    plan = _on_gpus(request, [gpus_per_node or most] * most)
    assert plan is not None
    return plan


def _on_cpu(request: PlacementRequest, num_nodes: int) -> PlacementPlan:
    """Return the plan without GPUs, on the actor's number of nodes if there are so many."""
    actor = request.ranks["actor"]
    scorers = actor if request.reward_ranks == 0 else request.reward_ranks or 0
    used = min(request.num_nodes.get("actor", 1), max(num_nodes, 1))

    def spread(count: int) -> tuple[Place, ...]:
        return tuple(Place(number * used // count) for number in range(count))

    return PlacementPlan(
        device="cpu",
        nodes=(0,) * used,
        trainers=(ProcessPlan("train", request.roles, spread(actor)),),
        engines=ProcessPlan("engines", (), spread(request.num_engines)),
        colocated=True,
        scorers=ProcessPlan("reward", ("reward",), spread(scorers)) if scorers else None,
    )


def _on_gpus(request: PlacementRequest, nodes: Sequence[int]) -> PlacementPlan | None:
    """Return the layout of the request on these nodes, or None if it does not fit."""
    size = request.tensor_parallel_size
    if request.num_engines and size > max(nodes):
        message = f"an engine needs {size} GPUs of one node, and the largest node has {max(nodes)}"
        raise ConfigError(
            message, hint=f"use ``PlacementRequest.tensor_parallel_size={max(nodes)}`` or less, and more engines"
        )
    used = [0] * len(nodes)
    places: dict[str, tuple[Place, ...]] = {}
    notes = []
    for names in request.groups:
        shapes = {name: _shape(request, name, max(nodes)) for name in names}
        for name, (num_nodes, per_node) in shapes.items():
            if request.hosts[name] == name and num_nodes > request.num_nodes.get(name, 1):
                notes.append(f"{name} spans {num_nodes} nodes of {per_node} GPUs: the largest node has {max(nodes)}")
        widest = map(max, zip(*shapes.values(), strict=True))
        taken = _take(nodes, used, *widest)
        if taken is None:
            return None
        for name, (num_nodes, per_node) in shapes.items():
            places[name] = tuple(Place(node, (gpu,)) for node, gpus in taken[:num_nodes] for gpu in gpus[:per_node])
    if request.colocate_all_models:
        engines = _spread(request, places["actor"], nodes)
    else:
        engines = [place for _ in range(request.num_engines) for place in _take(nodes, used, 1, size) or ()]
    if len(engines) < request.num_engines:
        return None
    return _assembled(request, places, engines, notes)


def _shape(request: PlacementRequest, name: str, largest: int) -> tuple[int, int]:
    """Return the number of nodes of a model's processes, and how many are on each: as the request has it, or more
    nodes with fewer processes if even the `largest` node has fewer GPUs."""
    host = request.hosts[name]
    total = request.ranks.get(host, request.reward_ranks or 0)
    asked = request.num_nodes.get(host, 1)
    num_nodes = next(n for n in range(min(asked, total), total + 1) if total % n == 0 and total // n <= largest)
    return num_nodes, total // num_nodes


def _take(nodes: Sequence[int], used: list[int], num_nodes: int, per_node: int) -> list[Place] | None:
    """Take the first free GPUs of the first nodes that have `per_node` of them, and count them in `used`.

    Returns them by node, or None if there are fewer than `num_nodes` such nodes.
    """
    found = [node for node, total in enumerate(nodes) if total - used[node] >= per_node][:num_nodes]
    if len(found) < num_nodes:
        return None
    taken = [Place(node, tuple(range(used[node], used[node] + per_node))) for node in found]
    for node in found:
        used[node] += per_node
    return taken


def _spread(request: PlacementRequest, actor: Sequence[Place], nodes: Sequence[int]) -> list[Place]:
    """Return places for the engines on the actor's GPUs, each time those that have the fewest engines so far.

    An engine that is larger than the actor's share of a node also uses the GPUs behind it. There are no places if no
    node of the actor is large enough.
    """
    size = request.tensor_parallel_size
    load: dict[int, dict[int, int]] = {}  # node to GPU to number of engines on it
    for node, gpus in actor:
        load.setdefault(node, dict.fromkeys(range(size), 0)).update(dict.fromkeys(gpus, 0))
    homes = [node for node in load if nodes[node] >= size]
    engines = []
    for _ in range(request.num_engines if homes else 0):
        found = []
        for node in homes:
            on_node = load[node]
            gpus = sorted(on_node, key=lambda gpu, on_node=on_node: (on_node[gpu], gpu))[:size]
            found.append((max(on_node[gpu] for gpu in gpus), Place(node, tuple(sorted(gpus)))))
        _, place = min(found)
        for gpu in place.gpus:
            load[place.node][gpu] += 1
        engines.append(place)
    return engines


def _assembled(
    request: PlacementRequest, places: Mapping[str, tuple[Place, ...]], engines: Sequence[Place], notes: Sequence[str]
) -> PlacementPlan:
    """Return the plan of these places, with its nodes numbered from 0 on."""
    cards = [card for group in (engines, *places.values()) for place in group for card in place.cards]
    numbers = {node: number for number, node in enumerate(sorted({node for node, _ in cards}))}
    at = {name: tuple(Place(numbers[node], gpus) for node, gpus in group) for name, group in places.items()}
    together = tuple(role for role in request.roles if at[role] == at["actor"])
    name = "train" if request.colocate_all_models else "+".join(together)
    trainers = [ProcessPlan(name, together, at["actor"])]
    trainers += [ProcessPlan(role, (role,), at[role]) for role in request.roles if role not in together]
    return PlacementPlan(
        device="cuda",
        nodes=tuple(max(gpu + 1 for node, gpu in cards if node == number) for number in numbers),
        trainers=tuple(trainers),
        engines=ProcessPlan("engines", (), tuple(Place(numbers[node], gpus) for node, gpus in engines)),
        colocated=request.colocate_all_models,
        notes=tuple(notes),
        scorers=ProcessPlan("reward", ("reward",), at["reward"]) if "reward" in at else None,
    )


def _too_large(request: PlacementRequest, needed: PlacementPlan, nodes: Sequence[int]) -> ConfigError:
    """Return the error for a layout that needs more GPUs, or more nodes, than there are.

    The hint never advises fewer processes than were asked for, unless every model asks for one.
    """
    counts = ", ".join(f"{placed.name} {len(placed.cards)}" for placed in needed.all_processes)
    how = "on shared GPUs" if needed.colocated else "apart"
    num_gpus = sum(nodes)
    wanted = f"{needed.num_gpus} GPUs"
    found = f"{num_gpus}"
    if needed.num_gpus <= num_gpus:  # they are on the wrong nodes
        wanted = f"{wanted} on {len(needed.nodes)} node(s)"
        found = f"{found} on {len(nodes)} ({', '.join(map(str, nodes))})"
    message = f"models {how} need {wanted} ({counts}), and there are {found}"
    hint = f"run where there are {wanted}"
    shared = _on_gpus(replace(request, colocate_all_models=True), nodes)
    if _is_single(request):
        hint = f"``colocate_all_models`` ``ranks.actor={num_gpus}`` ``num_engines={num_gpus}`` shares all"
        hint = f"{hint} {num_gpus} GPUs"
    elif needed.num_gpus <= num_gpus:
        hint = f"{hint}, or have ``PlacementRequest.ranks`` of each model X fit the nodes"
    elif not needed.colocated and shared is not None:
        hint = f"{hint}, or add ``colocate_all_models``, with which all models share {shared.num_gpus} GPU(s)"
    return ConfigError(message, hint=hint)


def _is_single(request: PlacementRequest) -> bool:
    """Return whether no model and no engine asks for more than one GPU."""
    counts = (*request.ranks.values(), request.reward_ranks or 0, request.num_engines, request.tensor_parallel_size)
    return max(counts) == 1
