"""A discrete-event simulation of an online run: generation beside training, with bounded staleness.

* Engines with continuous batching: the responses of an engine advance one token per decode step, whose duration
  depends on how many there are. Responses without a free slot wait in the order in which they came. The prefill of a
  prompt halts its engine.
* Admission: trained + queued + in flight <= (version + 1 + max_staleness) x batch size, where the version counts the
  batches that the learner has finished. All samples of a prompt go to the engine with the least work.
* The learner takes the oldest complete groups as soon as they fill a batch and leave time for all others: in no later
  batch must more groups reach the bound than it has places.
* At a weight update, engines finish all requests that they have (drain) or halt (keep, and restart, which keeps what is
  written).
"""

import bisect
import heapq
import itertools
import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

AtUpdate = Literal["drain", "keep", "restart"]


class Group(NamedTuple):
    """The work of one prompt: its tokens, and those of each response."""

    prompt_tokens: int
    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Measured seconds.

    Attributes:
        decode_step_s, decode_token_s: a decode step takes `decode_step_s` plus `decode_token_s` per response that runs.
        train_batch_s, train_token_s: a batch takes `train_batch_s` plus, divided by the training cards,
            `train_token_s` per token of its prompts and responses.
        prefill_token_s: per token of a prompt, once for all of its samples.
        sync_s: sending the weights, without waiting for requests.
        slowdown: how many times as long an engine takes for everything while the learner trains, because both sides
            share a GPU, or the cores and the memory of a CPU.
        train_slowdown: likewise for a batch whose training begins while engines have work.
    """

    decode_step_s: float = 0.0
    decode_token_s: float = 0.0
    train_token_s: float = 0.0
    train_batch_s: float = 0.0
    prefill_token_s: float = 0.0
    sync_s: float = 0.0
    slowdown: float = 1.0
    train_slowdown: float = 1.0

    def __post_init__(self) -> None:
        if self.decode(1) <= 0:
            raise ValueError(f"the seconds of a decode step must be > 0, they are {self.decode(1)}")

    def decode(self, running: int) -> float:
        """Return the seconds of a decode step with so many responses."""
        return self.decode_step_s + self.decode_token_s * running


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Who works, and by which rules.

    Attributes:
        num_engines, num_trainers: cards of each side.
        slots: responses that an engine decodes at the same time.
        batch_size: groups per training batch.
        max_staleness: see `SampleStream`; 0 is the synchronous run.
        at_update: what becomes of requests in flight when the weights change.
        shared: all cards do both in turn. Needs `max_staleness` 0 and as many engines as trainers.
    """

    num_engines: int = 1
    num_trainers: int = 1
    slots: int = 256
    batch_size: int = 1
    max_staleness: int = 0
    at_update: AtUpdate = "drain"
    shared: bool = False

    def __post_init__(self) -> None:
        sizes = (self.num_engines, self.num_trainers, self.slots, self.batch_size)
        if min(sizes) < 1 or self.max_staleness < 0:
            raise ValueError(
                f"engines, trainers, slots, batch {sizes} must be >= 1, staleness {self.max_staleness} >= 0"
            )
        if self.shared and (self.max_staleness or self.num_engines != self.num_trainers):
            raise ValueError("a shared layout is synchronous and has as many engines as trainers")


@dataclass(frozen=True, slots=True)
class Prediction:
    """The result of a simulation.

    Attributes:
        seconds: from the first admission to the last update of the weights.
        samples_per_s, step_s: means over all of it.
        generation_idle: share of the time in which an engine runs nothing, mean over engines.
        training_idle: share of the time in which the learner does not train: it waits for a batch, or for the weights
            to be sent.
        staleness_mean, staleness_max: batches trained between a group's admission and its own batch, over groups.
        batches: indices of the groups of each batch.
        ends: when the weights of each batch were sent.
    """

    seconds: float
    samples_per_s: float
    step_s: float
    generation_idle: float
    training_idle: float
    staleness_mean: float
    staleness_max: int
    batches: tuple[tuple[int, ...], ...] = field(repr=False)
    ends: tuple[float, ...] = field(repr=False)

    def figures(self) -> dict[str, float]:
        """Return all numbers by name."""
        names = [name for name in self.__dataclass_fields__ if name not in ("batches", "ends")]
        return {name: getattr(self, name) for name in names}


class _Engine:
    """The responses of one engine. `clock` counts decode steps, so that a response ends at a fixed value of it."""

    def __init__(self, step_s: Sequence[float]) -> None:
        self._step_s = step_s  # by number of running responses
        self._clock = 0.0
        self._time = 0.0  # up to which `clock` counts
        self._halted_until = 0.0
        self._slowdown = 1.0
        self._running: list[tuple[float, int, int, int]] = []  # clock at the end, order, group, length
        self._waiting: deque[tuple[int, int]] = deque()  # group, length
        self._order = itertools.count()
        self.busy_s = 0.0
        self.changes = 0  # an event that was planned before the last change is void

    @property
    def load(self) -> int:
        return len(self._running) + len(self._waiting)

    def add(self, now: float, group: int, lengths: Sequence[int], prefill_s: float) -> None:
        self._advance(now)
        self._waiting.extend((group, length) for length in lengths)
        self._halted_until = max(self._halted_until, now) + prefill_s * self._slowdown
        self._fill()

    def finish(self, now: float) -> list[int]:
        """Return the group of each response that has ended by now."""
        self._advance(now)
        ended = []
        while self._running and self._running[0][0] <= self._clock + 1e-6:
            ended.append(heapq.heappop(self._running)[2])
        self._fill()
        return ended

    def halt(self, now: float, until: float) -> None:
        self._advance(now)
        self._halted_until = max(self._halted_until, until)
        self.changes += 1

    def slow_down(self, now: float, factor: float) -> None:
        self._advance(now)
        self._slowdown = factor

    def next_end(self) -> float:
        """Return when the next response ends, if nothing changes."""
        if not self._running:
            return math.inf
        left = max(self._running[0][0] - self._clock, 0.0)
        return max(self._time, self._halted_until) + left * self._slowdown * self._step_s[len(self._running)]

    def _advance(self, now: float) -> None:
        if self._running:
            self.busy_s += now - self._time
            going_s = now - max(self._time, self._halted_until)
            if going_s > 0:
                self._clock += going_s / (self._slowdown * self._step_s[len(self._running)])
        self._time = now
        self.changes += 1

    def _fill(self) -> None:
        while self._waiting and len(self._running) < len(self._step_s) - 1:
            group, length = self._waiting.popleft()
            heapq.heappush(self._running, (self._clock + length, next(self._order), group, length))


class _Run:
    """One simulation: events in the order of time, each of which may plan further ones."""

    def __init__(self, costs: Costs, layout: Layout, groups: Sequence[Group], num_steps: int) -> None:
        self._costs = costs
        self._layout = layout
        self._groups = groups
        self._num_steps = num_steps
        step_s = [costs.decode(max(number, 1)) for number in range(layout.slots + 1)]
        self._engines = [_Engine(step_s) for _ in range(layout.num_engines)]
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = itertools.count()
        self.now = 0.0
        self._version = 0  # batches that are trained
        self._is_learning = False  # from taking a batch to the end of the update
        self._is_closed = False  # engines get no further requests
        self._is_draining = False  # the learner waits for the requests that they have
        self._versions: list[int] = []  # by group, at its admission
        self._left: dict[int, int] = {}  # responses that a group lacks, by group
        self._held: list[int] = []  # admitted groups that wait for the end of an update
        self._untaken: list[int] = []  # admitted groups that no batch has, ascending
        self._queue: list[int] = []  # the complete ones among them, ascending
        self.learning_s = 0.0
        self.staleness: list[int] = []
        self.batches: list[tuple[int, ...]] = []
        self.ends: list[float] = []

    def group(self, index: int) -> Group:
        return self._groups[index % len(self._groups)]

    @property
    def busy_s(self) -> list[float]:
        return [engine.busy_s for engine in self._engines]

    def run(self) -> None:
        self._admit()
        while self._events and self._version < self._num_steps:
            self.now, _, action, arguments = heapq.heappop(self._events)
            action(*arguments)

    def _plan(self, time: float, action: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._events, (time, next(self._order), action, arguments))

    def _plan_end(self, number: int) -> None:
        engine = self._engines[number]
        if (time := engine.next_end()) < math.inf:
            self._plan(time, self._on_end, number, engine.changes)

    def _admit(self) -> None:
        """Admit as many groups as the bound allows, with at most twice as many responses as there are slots."""
        layout = self._layout
        limit = min(self._version + 1 + layout.max_staleness, self._num_steps) * layout.batch_size
        most = max(math.ceil(2 * layout.slots * layout.num_engines / len(self._groups[0].lengths)), 1)
        while len(self._versions) < limit and len(self._left) < most:
            index = len(self._versions)
            self._versions.append(self._version)
            self._untaken.append(index)
            self._left[index] = len(self.group(index).lengths)
            if self._is_closed:
                self._held.append(index)
            else:
                self._submit(index)

    def _submit(self, index: int) -> None:
        group = self.group(index)
        number = min(range(len(self._engines)), key=lambda each: self._engines[each].load)
        prefill_s = group.prompt_tokens * self._costs.prefill_token_s
        self._engines[number].add(self.now, index, group.lengths, prefill_s)
        self._plan_end(number)

    def _on_end(self, number: int, changes: int) -> None:
        engine = self._engines[number]
        if changes != engine.changes:
            return
        for index in engine.finish(self.now):
            self._left[index] -= 1
            if not self._left[index]:
                del self._left[index]
                self._plan(self.now, self._on_complete, index)
        self._plan_end(number)
        self._admit()
        if self._is_draining and len(self._left) == len(self._held):
            self._send_weights()

    def _on_complete(self, index: int) -> None:
        bisect.insort(self._queue, index)
        self._take()

    def _take(self) -> None:
        """Begin to train, if the learner is free and there is a batch."""
        size = self._layout.batch_size
        batch = tuple(self._queue[:size])  # groups in their order have deadlines in this order
        if self._is_learning or len(batch) < size or not self._leaves_time(batch):
            return
        del self._queue[:size]
        taken = set(batch)
        self._untaken = [index for index in self._untaken if index not in taken]
        self._is_learning = True
        self.batches.append(batch)
        self.staleness.extend(self._version - self._versions[index] for index in batch)
        tokens = sum(len(g.lengths) * g.prompt_tokens + sum(g.lengths) for g in map(self.group, batch))
        seconds = self._costs.train_batch_s + self._costs.train_token_s * tokens / self._layout.num_trainers
        if any(engine.load for engine in self._engines):
            seconds *= self._costs.train_slowdown
        self.learning_s += seconds
        self._slow_down(self._costs.slowdown)
        self._plan(self.now + seconds, self._on_trained)

    def _leaves_time(self, batch: Sequence[int]) -> bool:
        """Return whether all other groups can still be trained within the bound, if they are complete by then."""
        for later in range(self._layout.max_staleness):
            # Groups before this one have their deadline in one of the next `later` batches.
            end = bisect.bisect_right(self._versions, self._version + later - self._layout.max_staleness)
            num_left = bisect.bisect_left(self._untaken, end) - bisect.bisect_left(batch, end)
            if num_left > later * self._layout.batch_size:
                return False
        return True

    def _slow_down(self, factor: float) -> None:
        if self._costs.slowdown != 1:
            for number, engine in enumerate(self._engines):
                engine.slow_down(self.now, factor)
                self._plan_end(number)

    def _on_trained(self) -> None:
        self._slow_down(1.0)
        self._is_closed = True
        self._is_draining = self._layout.at_update == "drain" and len(self._left) > 0
        if not self._is_draining:
            self._send_weights()

    def _send_weights(self) -> None:
        self._is_draining = False
        until = self.now + self._costs.sync_s
        for number, engine in enumerate(self._engines):
            engine.halt(self.now, until)
            self._plan_end(number)
        self._plan(until, self._on_sent)

    def _on_sent(self) -> None:
        self._version += 1
        self.ends.append(self.now)
        self._is_closed = False
        self._is_learning = False
        held, self._held = self._held, []
        for index in held:
            self._submit(index)
        self._admit()
        self._take()


def simulate(costs: Costs, layout: Layout, groups: Sequence[Group], num_steps: int) -> Prediction:
    """Return what a run of `num_steps` steps would take.

    Args:
        costs: measured seconds.
        layout: who works, and by which rules.
        groups: the prompts in their order, which begins again after the last. All have the same number of responses.
        num_steps: training batches, at least 1.
    """
    if num_steps < 1 or not groups or len({len(group.lengths) for group in groups}) != 1:
        raise ValueError(f"{num_steps} steps with {len(groups)} groups: steps, groups and equal group sizes are needed")
    run = _Run(costs, layout, groups, num_steps)
    run.run()
    num_samples = num_steps * layout.batch_size * len(groups[0].lengths)
    return Prediction(
        seconds=run.now,
        samples_per_s=num_samples / run.now,
        step_s=run.now / num_steps,
        generation_idle=1 - statistics.fmean(run.busy_s) / run.now,
        training_idle=1 - run.learning_s / run.now,
        staleness_mean=statistics.fmean(run.staleness),
        staleness_max=max(run.staleness),
        batches=tuple(run.batches),
        ends=tuple(run.ends),
    )
