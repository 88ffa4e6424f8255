"""The records of where every process of a run lives."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from rlhf_rollout.weights import Medium


class Place(NamedTuple):
    """Where one process runs.

    Attributes:
        node: number of the node in the plan.
        gpus: the process's GPUs, numbered within the plan's share of the node; empty on CPUs. An engine has one worker
            on each.
    """

    node: int = 0
    gpus: tuple[int, ...] = ()

    @property
    def cards(self) -> list[tuple[int, int]]:
        """Node and GPU of each of the process's GPUs."""
        return [(self.node, gpu) for gpu in self.gpus]


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """The processes of one kind: a rank set that trains, the engines, or the reward models.

    Attributes:
        name: for people, such as "actor+reference".
        roles: the models that each process holds; empty for engines.
        places: the place of each process. Several processes may have the same GPU.
    """

    name: str
    roles: tuple[str, ...]
    places: tuple[Place, ...]

    @property
    def num_ranks(self) -> int:
        """Number of processes: data-parallel ranks, engines, or replicas of the reward models."""
        return len(self.places)

    @property
    def cards(self) -> list[tuple[int, int]]:
        """Node and GPU of every GPU of the processes, as often as it is used."""
        return [card for place in self.places for card in place.cards]


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    """The nodes of a run, and the processes on them.

    Attributes:
        device: "cuda" or "cpu".
        nodes: number of GPUs that the run uses on each node.
        trainers: the rank sets that train.
        engines: the generation engines; none in a run that trains on recorded rollouts.
        colocated: whether engines and training processes share devices.
        notes: decisions that differ from the request, one sentence each.
        scorers: places of the reward models, each of which holds one replica of every model; None without reward
            models.
    """

    device: str
    nodes: tuple[int, ...]
    trainers: tuple[ProcessPlan, ...]
    engines: ProcessPlan
    colocated: bool
    notes: tuple[str, ...] = ()
    scorers: ProcessPlan | None = None

    def joined(self, role: str, others: Sequence[str]) -> "PlacementPlan":
        """Return the plan with models of `others` in the processes of `role`."""
        trainers = (
            replace(placed, roles=(*placed.roles, *others)) if role in placed.roles else placed
            for placed in self.trainers
        )
        return replace(self, trainers=tuple(trainers))

    @property
    def all_processes(self) -> tuple[ProcessPlan, ...]:
        """All processes: trainers, engines and reward models."""
        others = (self.engines, *((self.scorers,) if self.scorers else ()))
        return (*self.trainers, *(placed for placed in others if placed.places))

    @property
    def num_gpus(self) -> int:
        """Number of GPUs of the whole layout."""
        return sum(self.nodes)

    @property
    def shares_gpus(self) -> bool:
        """Whether engines and training processes use the same GPUs."""
        return self.device == "cuda" and self.colocated and self.engines.num_ranks > 0

    @property
    def crowded_engines(self) -> list[int]:
        """The engines, by number, with a GPU that another engine uses, too."""
        users = Counter(self.engines.cards)
        return [number for number, place in enumerate(self.engines.places) if any(users[c] > 1 for c in place.cards)]

    @property
    def weight_transfer(self) -> Medium:
        """How weights reach the engines: on their GPUs if a process that trains the policy is on each of them.

        Between nodes they go from GPU to GPU, as TCP sends them once per engine and through the host. A broadcast needs
        a GPU of its own for each member.
        """
        if self.shares_gpus and set(self.engines.cards) <= set(self.trainers_of("actor").cards):
            return "ipc"
        if len(self.nodes) == 1:
            return "shared_memory"
        trained_on = {card for placed in self.trainers for card in placed.cards}
        is_apart = self.device == "cuda" and not trained_on & set(self.engines.cards)
        return "nccl" if is_apart and not self.crowded_engines else "tcp"

    @property
    def engine_waves(self) -> list[list[int]]:
        """The engines by number, in waves: no two engines of a wave share a GPU.

        vLLM sizes an engine's memory by what is free, so that engines on one GPU have to start one after another.
        """
        waves: list[list[int]] = []
        last: dict[tuple[int, int], int] = {}  # the wave of the last engine on a GPU
        for number, place in enumerate(self.engines.places):
            wave = max((last[card] + 1 for card in place.cards if card in last), default=0)
            last |= dict.fromkeys(place.cards, wave)
            if wave == len(waves):
                waves.append([])
            waves[wave].append(number)
        return waves

    def trainers_of(self, role: str) -> ProcessPlan:
        """Return the rank set that holds `role`."""
        return next(placed for placed in self.trainers if role in placed.roles)

    def describe(self) -> str:
        """Return a table for people, with one line per kind of process."""
        on_gpu = self.device == "cuda"
        head = f"{self.num_gpus} GPU(s)" if on_gpu else "no GPU, everything shares the CPU"
        if len(self.nodes) > 1:
            head = f"{head} on {len(self.nodes)} nodes" if on_gpu else f"{head}s of {len(self.nodes)} nodes"
        width = max(len(placed.name) for placed in self.all_processes)
        rows = []
        for placed in self.all_processes:
            holds = " + ".join(placed.roles) or "vLLM"
            where = "; ".join(self._gpus(placed)) if on_gpu else "CPU"
            if not on_gpu and len(self.nodes) > 1:
                where = f"node {', '.join(str(place.node) for place in placed.places)}"
            rows.append(f"  {placed.name.ljust(width)}  {placed.num_ranks} x {holds}, {where}")
        return "\n".join([head, *rows, *(f"  note: {note}" for note in self.notes)])

    def _gpus(self, placed: ProcessPlan) -> list[str]:
        """Return the GPUs of processes on each node, `GPU 0-3` for processes of one GPU or `GPU 0-1, 2-3` for larger
        ones."""
        texts = []
        for node in sorted({place.node for place in placed.places}):
            spans = [place.gpus for place in placed.places if place.node == node]
            merged = tuple(gpu for gpus in spans for gpu in gpus)
            if len(merged) == len(spans) and merged == tuple(range(merged[0], merged[-1] + 1)):
                spans = [merged]
            text = f"GPU {', '.join(_span(gpus) for gpus in spans)}"
            texts.append(f"node {node} {text}" if len(self.nodes) > 1 else text)
        return texts


def _span(gpus: Sequence[int]) -> str:
    if len(gpus) == 1:
        return str(gpus[0])
    is_run = gpus[-1] - gpus[0] == len(gpus) - 1
    return f"{gpus[0]}-{gpus[-1]}" if is_run else "+".join(map(str, gpus))
