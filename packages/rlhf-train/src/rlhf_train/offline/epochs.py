"""The offline loop: shuffled epochs over a data set, with mini-batches split over ranks. An objective is the loss."""

import itertools
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from rlhf_data.bounds import bounded, check_bounds
from rlhf_data.images.reader import ImageReader
from rlhf_data.sampler import EpochSampler
from rlhf_train.batching import Denominators, plan_batches
from rlhf_train.costs import PassCosts
from rlhf_train.engine.protocol import TrainEngine
from rlhf_train.offline.collectives import of_all_ranks
from rlhf_train.run.load_balance import LoadBalance
from rlhf_train.run.metrics import Max, Metric, merge_metrics, on_host, results

Item = TypeVar("Item")
LossShare = tuple[Tensor, dict[str, Metric]]  # what a micro-batch adds to the loss, and its metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective(ABC, Generic[Item]):
    """A loss over examples.

    `loss` returns the share of one micro-batch. The shares of all micro-batches and ranks add up to the loss of the
    update.

    Attributes:
        model_kind: "actor" for a language model, "reward" for a model that returns a score.
        needs_teacher: whether the loss needs a teacher model.
        needs_reference: whether the loss needs log-probs of a reference policy.
        lower_is_better: metrics, without their prefix, whose lower values are better. The others' higher values are.
        packing: concatenate the sequences of a micro-batch instead of padding them.
        ranks_per_batch: neighbouring ranks that have the same micro-batches, and compute the same losses and metrics.
        costs: of the trained model, by which ranks get equal work; set by the run. Without them they get equal numbers
            of tokens.
        reference: forward pass of the reference or teacher model, if the loss needs one; set by the run.
        reader: of the images of sequences, for all models of the loss; None for text alone.
    """

    model_kind: ClassVar[str] = "actor"
    needs_teacher: ClassVar[bool] = False
    needs_reference: ClassVar[bool] = False
    lower_is_better: ClassVar[tuple[str, ...]] = ("loss",)

    packing: bool = False
    ranks_per_batch: int = 1
    costs: PassCosts | None = None
    reference: Callable[..., Any] | None = None
    reader: ImageReader | None = None

    def items(self, examples: Sequence[Any]) -> Sequence[Item]:
        """Return one item per example, in the form that `loss` takes. Called once for a whole data set."""
        return examples

    def lengths(self, item: Item) -> Sequence[int]:
        """Return the tokens of each sequence of the item that a forward pass reads."""
        return (item.num_tokens,)

    def num_tokens(self, item: Item) -> int:
        """Return the tokens that a forward pass over the item reads."""
        return sum(self.lengths(item))

    def num_trained_tokens(self, item: Item) -> int:
        """Return the tokens that carry loss, without a sequence's first token, which nothing precedes to predict it."""
        return int(item.loss_mask[1:].sum())

    @property
    def saved_fields(self) -> dict[str, Any]:
        """Fields of the config.json of every saved model, which its use needs."""
        return {}

    def for_batch(self, engine: TrainEngine, micro_batches: Sequence["MicroBatch[Item]"]) -> "Objective[Item]":
        """Return the objective with quantities set that need a pass over the whole mini-batch. Collective."""
        return self

    def read_ahead(self, micro_batches: Sequence["MicroBatch[Item]"]) -> None:
        """Begin to read the images of micro-batches, if they have any, while the device computes."""
        if self.reader is not None:
            self.reader.read_ahead(ref for batch in micro_batches for item in batch.items for ref in item.images)

    @abstractmethod
    def loss(self, engine: TrainEngine, items: Sequence[Item], denominators: Denominators) -> LossShare:
        """Run the model on a micro-batch; return its share of the update's loss, and metrics.

        `denominators` count over the whole update.
        """


@dataclass(frozen=True, slots=True)
class MicroBatch(Generic[Item]):
    """The items of one forward pass on one rank, and their rows in the mini-batch.

    Collectives need the same number of passes on every rank. A rank that has fewer runs an arbitrary item with no
    `rows`, and multiplies its loss by zero.
    """

    items: Sequence[Item]
    rows: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineSchedule:
    """Batch sizes, epochs and order of examples.

    Attributes:
        train_batch_size: examples per update, over all ranks; the last update of a run takes the rest.
        micro_train_batch_size: examples per forward-backward pass on one rank.
        micro_batch_tokens: largest number of tokens per pass. If set, it replaces `micro_train_batch_size`: a rank's
            examples are combined into as few passes as possible. None for no limit.
        max_epochs: passes over the examples.
        seed: of the shuffling.

    Raises:
        ConfigError: a size below 1.
    """

    train_batch_size: int = bounded(ge=1)
    micro_train_batch_size: int = bounded(ge=1)
    micro_batch_tokens: int | None = bounded(None, ge=1)
    max_epochs: int = bounded(1, ge=1)
    seed: int = 42

    def __post_init__(self) -> None:
        check_bounds(self)

    def num_updates(self, num_examples: int) -> int:
        """Return the number of updates of a run over `num_examples` examples."""
        return math.ceil(self.max_epochs * num_examples / self.train_batch_size)

    def mini_batches(self, num_examples: int, done: int = 0) -> Iterator[np.ndarray]:
        """Yield the indices of each update's examples. Every example occurs exactly `max_epochs` times, shuffled.

        The first `done` updates are left out.
        """
        sampler = EpochSampler(num_examples, self.train_batch_size, seed=self.seed)
        sampler.num_seen = done * self.train_batch_size
        for _ in range(done, self.num_updates(num_examples)):
            left = self.max_epochs * num_examples - sampler.num_seen
            yield sampler.next_batch()[:left]


def train_offline(
    engine: TrainEngine,
    objective: Objective[Item],
    items: Sequence[Item],
    schedule: OfflineSchedule,
    *,
    done: int = 0,
    balance: LoadBalance | None = None,
    on_update: Callable[[int, int, Mapping[str, float]], None],
) -> None:
    """Train on `items`. Collective: every rank holds all items and computes its part of each mini-batch.

    The first `done` updates are left out. After each other one, `on_update` is called on every rank with its number
    from 1, the number of updates, and the metrics over all ranks. `balance` adds the load-balancing loss of a mixture
    of experts.
    """
    num_updates = schedule.num_updates(len(items))
    # One mini-batch is read and planned ahead: `meanwhile` does so while the device computes the one before.
    planned = _planned(objective, items, schedule, done)
    ahead = list(itertools.islice(planned, 1))
    for update in range(done + 1, num_updates + 1):
        started = time.perf_counter()
        chosen, part = ahead.pop()
        metrics = learn_once(
            engine,
            objective,
            chosen,
            part,
            balance=balance,
            meanwhile=lambda: ahead.extend(itertools.islice(planned, 1)),
        )
        seconds = time.perf_counter() - started
        num_tokens = sum(map(objective.num_tokens, chosen))
        on_update(update, num_updates, {**metrics, "time/update": seconds, "throughput/tokens": num_tokens / seconds})


def _planned(
    objective: Objective[Item], items: Sequence[Item], schedule: OfflineSchedule, done: int
) -> Iterator[tuple[list[Item], tuple[list[MicroBatch[Item]], Denominators]]]:
    """Yield the items of each mini-batch, and this rank's part of them."""
    for members in schedule.mini_batches(len(items), done):
        chosen = [items[index] for index in members]
        part = this_ranks_part(objective, chosen, schedule)
        objective.read_ahead(part[0][:1])
        yield chosen, part


def learn_once(
    engine: TrainEngine,
    objective: Objective[Item],
    items: Sequence[Item],
    part: tuple[Sequence[MicroBatch[Item]], Denominators],
    *,
    balance: LoadBalance | None = None,
    meanwhile: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Run one update on `items`, of which this rank computes `part`; return metrics over all ranks. Collective.

    `balance` adds its loss, and the metric `train/aux_loss`. `meanwhile` is called when all passes are launched and
    before anything waits for the device.
    """
    engine.module.train()
    micro_batches, denominators = part
    objective = objective.for_batch(engine, micro_batches)
    parts: list[Mapping[str, Metric]] = []
    if balance is not None:
        balance.count(
            [(partial(objective.loss, engine, batch.items, denominators), bool(batch.rows)) for batch in micro_batches]
        )
    for index, batch in enumerate(micro_batches):
        objective.read_ahead(micro_batches[index : index + 2])
        loss, metrics = objective.loss(engine, batch.items, denominators)
        if not batch.rows:
            loss, metrics = loss * 0.0, {}
        if balance is not None:
            loss, metrics["train/aux_loss"] = balance.add_to(loss, has_rows=bool(batch.rows))
        engine.backward(loss, is_last=index == len(micro_batches) - 1)
        parts.append(metrics)
    meanwhile()
    stats = engine.step()
    parts.append({"train/grad_norm": Max(stats.grad_norm), "train/learning_rate": Max(stats.learning_rate)})
    return {**_over_ranks(parts, objective), "samples/trained": float(len(items))}


@torch.no_grad()
def evaluate(
    engine: TrainEngine, objective: Objective[Item], items: Sequence[Item], schedule: OfflineSchedule
) -> dict[str, float]:
    """Return the metrics over `items`, without an update. Collective."""
    engine.module.eval()
    micro_batches, denominators = this_ranks_part(objective, items, schedule)
    objective = objective.for_batch(engine, micro_batches)
    parts: list[Mapping[str, Metric]] = []
    for index, batch in enumerate(micro_batches):
        objective.read_ahead(micro_batches[index : index + 2])
        _, metrics = objective.loss(engine, batch.items, denominators)
        parts.append(metrics if batch.rows else {})
    return _over_ranks(parts, objective)


def this_ranks_part(
    objective: Objective[Item], items: Sequence[Item], schedule: OfflineSchedule
) -> tuple[list[MicroBatch[Item]], Denominators]:
    """Return this rank's micro-batches of a mini-batch, the same number on every rank, and the mini-batch's counts."""
    num_tokens = [objective.num_tokens(item) for item in items]
    trained = [objective.num_trained_tokens(item) for item in items]
    costs = None
    if (own_costs := objective.costs) is not None:
        attending = [sum(map(own_costs.of, objective.lengths(item))) for item in items]
        costs = [cost + own_costs.of(0, count) for cost, count in zip(attending, trained, strict=True)]
    plans = plan_batches(
        num_tokens,
        trained,
        costs,
        num_ranks=torch.distributed.get_world_size() // objective.ranks_per_batch,
        num_mini_batches=1,
        micro_train_batch_size=schedule.micro_train_batch_size,
        micro_rollout_batch_size=schedule.micro_train_batch_size,
        max_response_tokens=max(trained),
        seed=0,
        micro_batch_tokens=schedule.micro_batch_tokens,
    )
    own = plans[torch.distributed.get_rank() // objective.ranks_per_batch]
    micro_batches = []
    for part in own.mini_batches[0].micro_batches:
        rows = [own.rows[index] for index in part]
        micro_batches.append(MicroBatch([items[row] for row in rows] or [items[0]], rows))
    return micro_batches, own.mini_batches[0].denominators


def _over_ranks(parts: Sequence[Mapping[str, Metric]], objective: Objective[Item]) -> dict[str, float]:
    gathered = of_all_ranks(on_host(merge_metrics(parts)))
    return results(merge_metrics(gathered[:: objective.ranks_per_batch]))


def score_moments(metrics: Mapping[str, float]) -> tuple[float, float]:
    """Return the mean and the standard deviation of a reward model's scores in an evaluation's `metrics`."""
    mean = metrics["eval/score"]
    return mean, math.sqrt(max(metrics["eval/squared_score"] - mean**2, 0.0))
