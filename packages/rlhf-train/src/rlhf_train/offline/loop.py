"""The one offline loop: epochs over a data set, mini-batches dealt to ranks, an objective that makes a loss of them."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from rlhf_data.errors import ConfigError
from rlhf_data.sampler import EpochSampler
from rlhf_train.batching import Denominators, plan_batches
from rlhf_train.engine.protocol import TrainEngine
from rlhf_train.metrics import Max, Metric, merge_metrics, results

Example = TypeVar("Example")
ExampleIn = TypeVar("ExampleIn", contravariant=True)


class Objective(Protocol[ExampleIn]):
    """What is learned from examples. Losses are shares: over micro-batches and ranks they add up to the whole."""

    def num_tokens(self, example: ExampleIn) -> int:
        """Tokens that a forward pass runs over; what ranks are balanced by."""
        ...

    def num_trained_tokens(self, example: ExampleIn) -> int:
        """Tokens that carry loss."""
        ...

    def loss(
        self, engine: TrainEngine, examples: Sequence[ExampleIn], denominators: Denominators
    ) -> tuple[Tensor, dict[str, Metric]]:
        """Run the model on a micro-batch; return its share of the loss, and its metrics."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineSchedule:
    """How often and in what portions the data are seen.

    Attributes:
        train_batch_size: examples an optimizer step, over all ranks; the last one of a run takes what is left.
        micro_train_batch_size: examples a forward-backward pass on one rank.
        max_epochs: times each example is seen.
        seed: of the order.
    """

    train_batch_size: int
    micro_train_batch_size: int
    max_epochs: int = 1
    seed: int = 42

    def __post_init__(self) -> None:
        for name in ("train_batch_size", "micro_train_batch_size", "max_epochs"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")

    def num_steps(self, num_examples: int) -> int:
        """Optimizer steps over a data set of that size."""
        return math.ceil(self.max_epochs * num_examples / self.train_batch_size)

    def mini_batches(self, num_examples: int) -> Iterator[np.ndarray]:
        """Yield the indices of each optimizer step: every example exactly `max_epochs` times, shuffled."""
        sampler = EpochSampler(num_examples, self.train_batch_size, seed=self.seed)
        for _ in range(self.num_steps(num_examples)):
            left = self.max_epochs * num_examples - sampler.num_seen
            yield sampler.next_batch()[:left]


def train_offline(
    engine: TrainEngine,
    objective: Objective[Example],
    examples: Sequence[Example],
    schedule: OfflineSchedule,
    *,
    on_step: Callable[[int, int, Mapping[str, float]], None],
) -> None:
    """Train over `examples`. Collective: every rank holds all examples and takes its part of each mini-batch.

    Args:
        engine: the model that learns.
        objective: what it learns from an example.
        examples: the data set, equal on all ranks.
        schedule: batch sizes, epochs, seed.
        on_step: called on every rank after each optimizer step, with its number from 1, their total, and the metrics of
            all ranks together.
    """
    num_steps = schedule.num_steps(len(examples))
    for step, members in enumerate(schedule.mini_batches(len(examples)), start=1):
        started = time.perf_counter()
        chosen = [examples[index] for index in members]
        metrics = optimizer_step(engine, objective, chosen, schedule.micro_train_batch_size)
        seconds = time.perf_counter() - started
        num_tokens = sum(map(objective.num_tokens, chosen))
        on_step(step, num_steps, {**metrics, "time/step": seconds, "throughput/tokens": num_tokens / seconds})


def optimizer_step(
    engine: TrainEngine, objective: Objective[Example], examples: Sequence[Example], micro_batch_size: int
) -> dict[str, float]:
    """Learn once from `examples`; return the metrics of all ranks together. Collective."""
    engine.module.train()
    micro_batches, denominators = _this_ranks_part(objective, examples, micro_batch_size)
    parts: list[Mapping[str, Metric]] = []
    for index, rows in enumerate(micro_batches):
        # A rank without rows runs one for nothing, to keep the ranks in step.
        loss, metrics = objective.loss(engine, [examples[row] for row in rows] or [examples[0]], denominators)
        engine.backward(loss if rows else loss * 0.0, is_last=index == len(micro_batches) - 1)
        parts.append(metrics if rows else {})
    stats = engine.step()
    parts.append({"train/grad_norm": Max(stats.grad_norm), "train/learning_rate": Max(stats.learning_rate)})
    return {**_over_ranks(parts), "samples/trained": float(len(examples))}


@torch.no_grad()
def evaluate(
    engine: TrainEngine, objective: Objective[Example], examples: Sequence[Example], micro_batch_size: int
) -> dict[str, float]:
    """Return the metrics of `examples` without learning from them. Collective."""
    engine.module.eval()
    micro_batches, denominators = _this_ranks_part(objective, examples, micro_batch_size)
    parts: list[Mapping[str, Metric]] = []
    for rows in micro_batches:
        _, metrics = objective.loss(engine, [examples[row] for row in rows] or [examples[0]], denominators)
        parts.append(metrics if rows else {})
    return _over_ranks(parts)


def _this_ranks_part(
    objective: Objective[Example], examples: Sequence[Example], micro_batch_size: int
) -> tuple[list[list[int]], Denominators]:
    plan = plan_batches(
        [objective.num_tokens(example) for example in examples],
        [objective.num_trained_tokens(example) for example in examples],
        num_ranks=torch.distributed.get_world_size(),
        num_mini_batches=1,
        micro_train_batch_size=micro_batch_size,
        micro_rollout_batch_size=micro_batch_size,
        max_response_tokens=max(objective.num_trained_tokens(example) for example in examples),
        seed=0,
    )[torch.distributed.get_rank()]
    mini_batch = plan.mini_batches[0]
    return [[plan.rows[i] for i in batch] for batch in mini_batch.micro_batches], mini_batch.denominators


def _over_ranks(parts: Sequence[Mapping[str, Metric]]) -> dict[str, float]:
    own = merge_metrics(parts)
    gathered: list[dict[str, Metric]] = [own] * torch.distributed.get_world_size()
    if len(gathered) > 1:
        torch.distributed.all_gather_object(gathered, own)
    return results(merge_metrics(gathered))
