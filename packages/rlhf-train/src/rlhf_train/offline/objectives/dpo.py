"""Preference optimization without a reward model: one objective with the losses DPO, IPO, SimPO and ORPO."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from rlhf_data.errors import ConfigError, unknown
from rlhf_data.examples.preference import PreferenceExample
from rlhf_train.batching import Denominators
from rlhf_train.engine.protocol import TrainEngine
from rlhf_train.losses.aggregate import sequence_mean
from rlhf_train.losses.preference import dpo_loss, ipo_loss, orpo_loss, simpo_loss
from rlhf_train.offline.epochs import LossShare, Objective
from rlhf_train.offline.sequences import Compared, answer_logprobs, mean_metrics, num_ordered, reference_logprobs

LOSSES = ("dpo", "ipo", "simpo", "orpo")


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceObjective(Objective[Compared]):
    """Makes the chosen answer of each pair more likely than the rejected one.

    Attributes:
        loss_type: one of `LOSSES`.
        beta: of the loss; for "orpo" the weight of the odds ratio term.
        label_smoothing: for "dpo", the probability that the labels of a pair are swapped.
        simpo_gamma: for "simpo", the target margin.
        nll_loss_coef: weight of the chosen answer's negative log-likelihood per token, added to the loss. "orpo" always
            adds it with weight 1.
        length_average: make "dpo" and "ipo" compare means over tokens instead of sums. "simpo" and "orpo" always
            compare means.
    """

    lower_is_better: ClassVar[tuple[str, ...]] = ("loss", "nll", "rejected_reward")

    loss_type: str = "dpo"
    beta: float = 0.1
    label_smoothing: float = 0.0
    simpo_gamma: float = 0.0
    nll_loss_coef: float = 0.0
    length_average: bool = False

    def __post_init__(self) -> None:
        if self.loss_type not in LOSSES:
            raise ConfigError(unknown("loss", self.loss_type, LOSSES))
        if self.beta <= 0 or not 0 <= self.label_smoothing < 0.5 or self.simpo_gamma < 0 or self.nll_loss_coef < 0:
            names = ("beta", "label_smoothing", "simpo_gamma", "nll_loss_coef")
            given = ", ".join(f"{name} {getattr(self, name)}" for name in names)
            raise ConfigError(f"{given}: beta must be above 0, label_smoothing in [0, 0.5), the others 0 or more")
        for name, owners in _OWNERS.items():
            if getattr(self, name) and self.loss_type not in owners:
                message = f"{name} has no effect on the loss {self.loss_type}"
                raise ConfigError(message, hint=f"it applies to {' and '.join(owners)}")

    @property
    def needs_reference(self) -> bool:
        return self.loss_type in ("dpo", "ipo")

    def items(self, examples: Sequence[PreferenceExample]) -> Sequence[Compared]:
        return [Compared(example, (example.chosen, example.rejected)) for example in examples]

    def lengths(self, item: Compared) -> Sequence[int]:
        return item.lengths

    def num_trained_tokens(self, item: Compared) -> int:
        return sum(int(sequence.loss_mask[1:].sum()) for sequence in item.sequences)

    def loss(self, engine: TrainEngine, items: Sequence[Compared], denominators: Denominators) -> LossShare:
        """See `Objective`. Metrics under `preference/`: `loss`, `nll` (per token of the chosen answer), `accuracy` (a
        tie counts one half), and the implicit rewards `chosen_reward`, `rejected_reward` and their `margin`, which are
        beta times the quantities that the loss compares."""
        sequences = [item.sequences[index] for index in (0, 1) for item in items]
        sums, counts = answer_logprobs(self, engine.forward, sequences, engine.device)
        means = sums / counts.clamp(min=1)
        compared = means if self.length_average or not self.needs_reference else sums
        if self.needs_reference:
            reference = reference_logprobs(self, items, (0, 1), engine.device)
            compared = compared - (reference / counts.clamp(min=1) if self.length_average else reference)
        chosen, rejected = compared.chunk(2)
        nll = -means.chunk(2)[0]
        losses = self._pair_losses(chosen, rejected)
        weight = 1.0 if self.loss_type == "orpo" else self.nll_loss_coef
        if weight:
            losses = losses + weight * nll
        rewards = {"chosen_reward": chosen, "rejected_reward": rejected, "margin": chosen - rejected}
        sums = {name: self.beta * values.sum() for name, values in rewards.items()}
        sums |= {"loss": losses.sum(), "nll": nll.sum(), "accuracy": num_ordered(chosen, rejected)}
        return sequence_mean(losses, denominators), mean_metrics("preference", len(items), **sums)

    def _pair_losses(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        if self.loss_type == "dpo":
            return dpo_loss(chosen, rejected, beta=self.beta, label_smoothing=self.label_smoothing)
        if self.loss_type == "ipo":
            return ipo_loss(chosen, rejected, beta=self.beta)
        if self.loss_type == "simpo":
            return simpo_loss(chosen, rejected, beta=self.beta, gamma=self.simpo_gamma)
        return self.beta * orpo_loss(chosen, rejected)


_OWNERS = {
    "label_smoothing": ("dpo",),
    "simpo_gamma": ("simpo",),
    "nll_loss_coef": ("dpo", "ipo", "simpo"),
    "length_average": ("dpo", "ipo"),
}
