"""Kahneman-Tversky optimization (KTO): learns from single answers that were judged good or bad."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from rlhf_data.errors import ConfigError, DataError
from rlhf_data.examples.preference import UnpairedExample
from rlhf_data.examples.sft import SftExample
from rlhf_train.batching import Denominators
from rlhf_train.engine.protocol import TrainEngine
from rlhf_train.losses.aggregate import sequence_mean
from rlhf_train.losses.preference import kto_loss
from rlhf_train.offline.epochs import LossShare, MicroBatch, Objective
from rlhf_train.offline.sequences import Compared, answer_logprobs, mean_metrics, reference_logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class KtoObjective(Objective[Compared]):
    """Makes desirable answers more likely, and undesirable ones less likely, relative to the reference.

    The loss compares the log-ratio of policy to reference with the policy's KL divergence from the reference. The
    divergence is estimated before each update, on the update's prompts with answers to other prompts. The estimate uses
    all examples of the update, so that it does not depend on the split over ranks and micro-batches.

    Attributes:
        beta: > 0; a larger value keeps the policy closer to the reference.
        desirable_loss_weight, undesirable_loss_weight: weights of the two kinds of answers. Choose them so that both
            kinds have about the same total weight.
        kl: the divergence in nats, >= 0; set by `for_batch`.
    """

    needs_reference: ClassVar[bool] = True
    lower_is_better: ClassVar[tuple[str, ...]] = ("loss", "kl", "undesirable_reward")

    beta: float = 0.1
    desirable_loss_weight: float = 1.0
    undesirable_loss_weight: float = 1.0
    kl: float = 0.0

    def __post_init__(self) -> None:
        for name in ("beta", "desirable_loss_weight", "undesirable_loss_weight"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be above 0")

    def items(self, examples: Sequence[UnpairedExample]) -> Sequence[Compared]:
        """See `Objective`. Each item has the example, and its prompt with the answer of another example.

        The latter sequence is cut to the length of the longest example. Raises DataError for fewer than two examples.
        """
        if len(examples) < 2:
            message = "KTO needs at least two examples, to pair prompts with answers to other prompts"
            raise DataError(message, hint="give more rows")
        longest = max(example.num_tokens for example in examples)
        # A random cycle through all examples: each one's partner is another example, and is used exactly once.
        order = np.random.default_rng(0).permutation(len(examples))
        partner = dict(zip(order, np.roll(order, 1), strict=True))
        return [
            Compared(example, (example, _mismatched(example, examples[partner[row]], longest)))
            for row, example in enumerate(examples)
        ]

    def lengths(self, item: Compared) -> Sequence[int]:
        return item.lengths

    def num_trained_tokens(self, item: Compared) -> int:
        return int(item.sequences[0].loss_mask[1:].sum())

    @torch.no_grad()
    def for_batch(self, engine: TrainEngine, micro_batches: Sequence[MicroBatch[Compared]]) -> "KtoObjective":
        """See `Objective`. Estimates the divergence over the examples of all ranks."""
        total = torch.zeros(2, dtype=torch.float64, device=engine.device)
        was_training = engine.module.training
        engine.module.eval()
        for batch in micro_batches:
            ratios = self._ratios(engine, batch.items, 1)
            if batch.rows:
                total += torch.stack([ratios.double().sum(), torch.ones_like(ratios).double().sum()])
        engine.module.train(was_training)
        if torch.distributed.get_world_size() > 1:
            torch.distributed.all_reduce(total)
        return replace(self, kl=max(float(total[0] / total[1]), 0.0))

    def loss(self, engine: TrainEngine, items: Sequence[Compared], denominators: Denominators) -> LossShare:
        """See `Objective`. Metrics: `kto/loss`, `kto/kl`, and beta times the mean log-ratio of each kind of answer,
        `kto/desirable_reward` and `kto/undesirable_reward`."""
        ratios = self._ratios(engine, items, 0)
        desirable = torch.tensor([item.example.is_desirable for item in items], device=engine.device)
        kl = torch.tensor(self.kl, device=engine.device)
        weights = {
            "desirable_loss_weight": self.desirable_loss_weight,
            "undesirable_loss_weight": self.undesirable_loss_weight,
        }
        losses = kto_loss(ratios, desirable, kl, beta=self.beta, **weights)
        metrics = mean_metrics("kto", len(items), loss=losses.sum(), kl=kl * len(items))
        for name, mask in (("desirable_reward", desirable), ("undesirable_reward", ~desirable)):
            metrics |= mean_metrics("kto", mask.sum(), **{name: self.beta * ratios[mask].sum()})
        return sequence_mean(losses, denominators), metrics

    def _ratios(self, engine: TrainEngine, items: Sequence[Compared], which: int) -> Tensor:
        sequences = [item.sequences[which] for item in items]
        sums, _ = answer_logprobs(self, engine.forward, sequences, engine.device)
        return sums - reference_logprobs(self, items, (which,), engine.device)


def _mismatched(example: UnpairedExample, other: UnpairedExample, longest: int) -> SftExample:
    """Return the prompt of `example`, with its images, and the answer of `other`, cut to `longest` tokens."""
    prompt, answer = (int(np.argmax(sequence.loss_mask)) for sequence in (example, other))
    tokens = np.concatenate([example.token_ids[:prompt], other.token_ids[answer:]])
    mask = np.concatenate([np.zeros(prompt, np.bool_), other.loss_mask[answer:]])
    return SftExample(example.example_id, tokens[:longest], mask[:longest], images=example.images)
