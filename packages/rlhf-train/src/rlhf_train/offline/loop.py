"""The offline loop: shuffled epochs over a data set, mini-batches split over ranks, and an objective for the loss."""

import itertools
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from rlhf_data.errors import ConfigError
from rlhf_data.packing import pack
from rlhf_data.sampler import EpochSampler
from rlhf_train.batching import Denominators, plan_batches
from rlhf_train.engine.protocol import TrainEngine
from rlhf_train.run.metrics import Max, Metric, merge_metrics, on_host, results

Item = TypeVar("Item")
Part = TypeVar("Part")
LossShare = tuple[Tensor, dict[str, Metric]]  # what a micro-batch adds to the loss, and its metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective(ABC, Generic[Item]):
    """A loss over examples. Each micro-batch returns its share: the shares of all micro-batches and ranks add up to the
    loss of the whole batch.

    Attributes:
        packing: concatenate the sequences of a micro-batch instead of padding them.
        reference: forward pass of the reference or teacher model, if the loss needs one; the run sets it.
    """

    model_kind: ClassVar[str] = "actor"  # or "reward"
    needs_teacher: ClassVar[bool] = False
    needs_reference: ClassVar[bool] = False  # whether the loss compares with the log-probs of a reference policy

    packing: bool = False
    reference: Callable[..., Any] | None = None

    def items(self, examples: Sequence[Any]) -> Sequence[Item]:
        """Return one item per example, in the form that `loss` takes. Called once for a whole data set."""
        return examples

    def num_tokens(self, item: Item) -> int:
        """Return the tokens of a forward pass over the item; ranks are balanced by it."""
        return item.num_tokens

    def num_trained_tokens(self, item: Item) -> int:
        """Return the tokens that carry loss. The first token of a sequence has no context to predict it from."""
        return int(item.loss_mask[1:].sum())

    def for_batch(self, engine: TrainEngine, micro_batches: Sequence["MicroBatch[Item]"]) -> "Objective[Item]":
        """Return the objective with the quantities that need a pass over the whole batch. Collective."""
        return self

    @abstractmethod
    def loss(self, engine: TrainEngine, items: Sequence[Item], denominators: Denominators) -> LossShare:
        """Run the model on a micro-batch; return its share of the batch's loss, and its metrics."""


@dataclass(frozen=True, slots=True)
class MicroBatch(Generic[Item]):
    """The items of one forward pass on one rank, and their rows in the batch.

    A rank with fewer micro-batches than another runs an item without a row, whose loss counts zero: collectives need
    the same number of passes on every rank.
    """

    items: Sequence[Item]
    rows: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineSchedule:
    """Batch sizes, epochs and order.

    Attributes:
        train_batch_size: examples per update, over all ranks; the last update of a run takes what is left.
        micro_train_batch_size: examples per forward-backward pass on one rank.
        micro_batch_tokens: most tokens per pass, instead of a number of examples: the examples of a rank are combined
            into as few passes as possible. None for no limit.
        max_epochs: passes over the examples.
        seed: of the shuffling.
    """

    train_batch_size: int
    micro_train_batch_size: int
    micro_batch_tokens: int | None = None
    max_epochs: int = 1
    seed: int = 42

    def __post_init__(self) -> None:
        for name in ("train_batch_size", "micro_train_batch_size", "micro_batch_tokens", "max_epochs"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")

    def num_updates(self, num_examples: int) -> int:
        """Return the number of updates over a data set of that size."""
        return math.ceil(self.max_epochs * num_examples / self.train_batch_size)

    def mini_batches(self, num_examples: int) -> Iterator[np.ndarray]:
        """Yield the indices of the examples of each update: every example exactly `max_epochs` times, shuffled."""
        sampler = EpochSampler(num_examples, self.train_batch_size, seed=self.seed)
        for _ in range(self.num_updates(num_examples)):
            left = self.max_epochs * num_examples - sampler.num_seen
            yield sampler.next_batch()[:left]


def train_offline(
    engine: TrainEngine,
    objective: Objective[Item],
    items: Sequence[Item],
    schedule: OfflineSchedule,
    *,
    on_update: Callable[[int, int, Mapping[str, float]], None],
) -> None:
    """Train on `items`. Collective: every rank holds all of them and computes its part of each mini-batch.

    `on_update` is called on every rank after each update (optimizer step), with its number from 1, their total, and the
    metrics of all ranks together.
    """
    num_updates = schedule.num_updates(len(items))
    mini_batches = ([items[index] for index in members] for members in schedule.mini_batches(len(items)))
    planned = ((chosen, this_ranks_part(objective, chosen, schedule)) for chosen in mini_batches)
    ahead = [next(planned)]
    for update in range(1, num_updates + 1):
        started = time.perf_counter()
        chosen, part = ahead.pop()
        metrics = learn_once(
            engine, objective, chosen, part, meanwhile=lambda: ahead.extend(itertools.islice(planned, 1))
        )
        seconds = time.perf_counter() - started
        num_tokens = sum(map(objective.num_tokens, chosen))
        on_update(update, num_updates, {**metrics, "time/update": seconds, "throughput/tokens": num_tokens / seconds})


def learn_once(
    engine: TrainEngine,
    objective: Objective[Item],
    items: Sequence[Item],
    part: tuple[Sequence[MicroBatch[Item]], Denominators],
    *,
    meanwhile: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Do one update on `items`, of which this rank computes `part`; return the metrics over all ranks. Collective.

    `meanwhile` is called after the passes were launched and before anything waits for the device.
    """
    engine.module.train()
    micro_batches, denominators = part
    objective = objective.for_batch(engine, micro_batches)
    parts: list[Mapping[str, Metric]] = []
    for index, batch in enumerate(micro_batches):
        loss, metrics = objective.loss(engine, batch.items, denominators)
        engine.backward(loss if batch.rows else loss * 0.0, is_last=index == len(micro_batches) - 1)
        parts.append(metrics if batch.rows else {})
    meanwhile()
    stats = engine.step()
    parts.append({"train/grad_norm": Max(stats.grad_norm), "train/learning_rate": Max(stats.learning_rate)})
    return {**_over_ranks(parts), "samples/trained": float(len(items))}


@torch.no_grad()
def evaluate(
    engine: TrainEngine, objective: Objective[Item], items: Sequence[Item], schedule: OfflineSchedule
) -> dict[str, float]:
    """Return the metrics over `items` without an update. Collective."""
    engine.module.eval()
    micro_batches, denominators = this_ranks_part(objective, items, schedule)
    objective = objective.for_batch(engine, micro_batches)
    parts: list[Mapping[str, Metric]] = []
    for batch in micro_batches:
        _, metrics = objective.loss(engine, batch.items, denominators)
        parts.append(metrics if batch.rows else {})
    return _over_ranks(parts)


def this_ranks_part(
    objective: Objective[Item], items: Sequence[Item], schedule: OfflineSchedule
) -> tuple[list[MicroBatch[Item]], Denominators]:
    """Return this rank's micro-batches of a batch, as many as any rank has, and the whole batch's counts."""
    num_tokens = [objective.num_tokens(item) for item in items]
    trained = [objective.num_trained_tokens(item) for item in items]
    plans = plan_batches(
        num_tokens,
        trained,
        num_ranks=torch.distributed.get_world_size(),
        num_mini_batches=1,
        micro_train_batch_size=schedule.micro_train_batch_size,
        micro_rollout_batch_size=schedule.micro_train_batch_size,
        max_response_tokens=max(trained),
        seed=0,
    )
    rank = torch.distributed.get_rank()
    parts: Sequence[Sequence[int]] = plans[rank].mini_batches[0].micro_batches
    if schedule.micro_batch_tokens is not None:
        bins = [pack([num_tokens[row] for row in plan.rows], schedule.micro_batch_tokens) for plan in plans]
        parts = bins[rank] + [[]] * (max(map(len, bins)) - len(bins[rank]))
    rows = [[plans[rank].rows[index] for index in part] for part in parts]
    micro_batches = [MicroBatch([items[row] for row in part] or [items[0]], part) for part in rows]
    return micro_batches, plans[rank].mini_batches[0].denominators


def _over_ranks(parts: Sequence[Mapping[str, Metric]]) -> dict[str, float]:
    return results(merge_metrics(of_all_ranks(on_host(merge_metrics(parts)))))


def of_all_ranks(own: Part) -> list[Part]:
    """Return every rank's value of `own`, in the order of ranks. Collective."""
    gathered = [own] * torch.distributed.get_world_size()
    if len(gathered) > 1:
        torch.distributed.all_gather_object(gathered, own)
    return gathered
