"""Preference optimization without a reward model: one objective with the losses of a table."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar

from torch import Tensor

from rlhf_data.errors import ConfigError, check_name
from rlhf_data.examples.preference import PreferenceExample
from rlhf_train.batching import Denominators
from rlhf_train.engine.protocol import TrainEngine
from rlhf_train.losses import preference
from rlhf_train.losses.aggregate import sequence_mean
from rlhf_train.losses.preference_table import DISCOPOP_TAU, PREFERENCE_LOSSES, PreferenceLossRow
from rlhf_train.offline.epochs import LossShare, Objective
from rlhf_train.offline.sequences import Compared, answer_logprobs, mean_metrics, num_ordered, reference_logprobs

# By row of `PREFERENCE_LOSSES`. CPO is DPO with a reference to which all answers are equally likely.
_LOSSES: Mapping[str, Callable[..., Tensor]] = {
    "dpo": preference.dpo_loss,
    "ipo": preference.ipo_loss,
    "simpo": preference.simpo_loss,
    "cpo": preference.dpo_loss,
    "hinge": preference.hinge_loss,
    "robust": preference.robust_loss,
    "exo_pair": preference.exo_pair_loss,
    "nca_pair": preference.nca_pair_loss,
    "bco_pair": preference.bco_pair_loss,
    "sppo_hard": preference.sppo_hard_loss,
    "apo_zero": preference.apo_zero_loss,
    "apo_down": preference.apo_down_loss,
    "discopop": preference.discopop_loss,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceObjective(Objective[Compared]):
    """Makes the chosen answer of each pair more likely than the rejected one.

    Attributes:
        loss_type: a row of `PREFERENCE_LOSSES`.
        beta: of the loss; for "orpo" the weight of the odds ratio term.
        label_smoothing: for "dpo", "robust" and "exo_pair", the probability that the labels of a pair are swapped.
        simpo_gamma: for "simpo", the target margin.
        discopop_tau: for "discopop", how soon its two parts change places, in (0, 1).
        nll_loss_coef: weight of the chosen answer's negative log-likelihood per token, added to the loss. "orpo" and
            "cpo" always add it with weight 1.
        length_average: make losses with a reference compare means over tokens instead of sums. "simpo" and "orpo"
            always compare means.
    """

    lower_is_better: ClassVar[tuple[str, ...]] = ("loss", "nll", "rejected_reward")

    loss_type: str = "dpo"
    beta: float = 0.1
    label_smoothing: float = 0.0
    simpo_gamma: float = 0.0
    discopop_tau: float = DISCOPOP_TAU
    nll_loss_coef: float = 0.0
    length_average: bool = False

    def __post_init__(self) -> None:
        check_name("loss", self.loss_type, PREFERENCE_LOSSES)
        if self.beta <= 0 or not 0 <= self.label_smoothing < 0.5 or self.simpo_gamma < 0 or self.nll_loss_coef < 0:
            names = ("beta", "label_smoothing", "simpo_gamma", "nll_loss_coef")
            given = ", ".join(f"{name} {getattr(self, name)}" for name in names)
            raise ConfigError(f"{given}: beta must be above 0, label_smoothing in [0, 0.5), the others 0 or more")
        if not 0 < self.discopop_tau < 1:
            raise ConfigError(f"discopop_tau is {self.discopop_tau}; it must be in (0, 1)")
        for item in fields(self):
            if getattr(self, item.name) != item.default and not self.row.takes(item.name):
                message = f"{item.name} has no effect on the loss {self.loss_type}"
                owners = [row.name for row in PREFERENCE_LOSSES.values() if row.takes(item.name)]
                raise ConfigError(message, hint=f"it applies to {', '.join(owners)}")
        self.row.check_smoothing(self.label_smoothing)

    @property
    def row(self) -> PreferenceLossRow:
        """The row of the loss."""
        return PREFERENCE_LOSSES[self.loss_type]

    @property
    def needs_reference(self) -> bool:
        return self.row.needs_reference

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
        compared = means if self.length_average or self.row.compares_means else sums
        if self.needs_reference:
            reference = reference_logprobs(self, items, (0, 1), engine.device)
            compared = compared - (reference / counts.clamp(min=1) if self.length_average else reference)
        chosen, rejected = compared.chunk(2)
        nll = -means.chunk(2)[0]
        losses = self._pair_losses(chosen, rejected)
        weight = 1.0 if self.row.has_likelihood else self.nll_loss_coef
        if weight:
            losses = losses + weight * nll
        rewards = {"chosen_reward": chosen, "rejected_reward": rejected, "margin": chosen - rejected}
        sums = {name: self.beta * values.sum() for name, values in rewards.items()}
        sums |= {"loss": losses.sum(), "nll": nll.sum(), "accuracy": num_ordered(chosen, rejected)}
        return sequence_mean(losses, denominators), mean_metrics("preference", len(items), **sums)

    def _pair_losses(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        if self.loss_type == "orpo":
            return self.beta * preference.orpo_loss(chosen, rejected)
        numbers = {argument: getattr(self, name) for name, argument in self.row.arguments.items()}
        return _LOSSES[self.loss_type](chosen, rejected, beta=self.beta, **numbers)
