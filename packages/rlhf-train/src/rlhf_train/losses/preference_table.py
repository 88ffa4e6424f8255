"""The table of losses of pairs, without torch. The functions behind the names are in `preference`."""

from collections.abc import Mapping
from dataclasses import dataclass

from rlhf_data.errors import ConfigError

DISCOPOP_TAU = 0.05  # of the paper

# Settings of `PreferenceObjective` that some losses have, with the names of the functions' arguments.
_ARGUMENTS = {"label_smoothing": "label_smoothing", "simpo_gamma": "gamma", "discopop_tau": "tau"}


@dataclass(frozen=True, slots=True)
class PreferenceLossRow:
    """One loss of pairs.

    Attributes:
        name: the value of ``loss_type``.
        title: its name in papers.
        numbers: settings of `PreferenceObjective` that the loss has, other than those of all losses.
        needs_reference: whether it compares log-ratios to a reference; else log-probs of the policy alone.
        compares_means: whether it compares means over tokens; else sums, or what ``length_average`` says.
        has_likelihood: whether it includes the chosen answer's negative log-likelihood per token, with weight 1.
        needs_smoothing: whether ``label_smoothing`` must be above 0.
    """

    name: str
    title: str
    numbers: tuple[str, ...] = ()
    needs_reference: bool = True
    compares_means: bool = False
    has_likelihood: bool = False
    needs_smoothing: bool = False

    @property
    def arguments(self) -> dict[str, str]:
        """The settings of `numbers`, with the names of the function's arguments."""
        return {name: _ARGUMENTS[name] for name in self.numbers}

    def takes(self, option: str) -> bool:
        """Return whether an option has an effect on this loss."""
        if option == "nll_loss_coef":
            return not self.has_likelihood
        if option in ("length_average", "ref_pretrain", "precompute_reference", "ref_reward_offload"):
            return self.needs_reference
        return option in self.numbers or option not in _ARGUMENTS

    def check_smoothing(self, label_smoothing: float) -> None:
        """Raise ConfigError if the loss needs a probability of swapped labels, and there is none."""
        if self.needs_smoothing and not label_smoothing:
            message = f"``loss_type={self.name}`` needs a probability of swapped labels, and ``label_smoothing`` is 0"
            raise ConfigError(message, hint="use ``label_smoothing=0.001``, or ``loss_type=dpo``")


PREFERENCE_LOSSES: Mapping[str, PreferenceLossRow] = {
    row.name: row
    for row in (
        PreferenceLossRow("dpo", "DPO", ("label_smoothing",)),
        PreferenceLossRow("ipo", "IPO"),
        PreferenceLossRow("simpo", "SimPO", ("simpo_gamma",), needs_reference=False, compares_means=True),
        PreferenceLossRow("orpo", "ORPO", needs_reference=False, compares_means=True, has_likelihood=True),
        PreferenceLossRow("cpo", "CPO", needs_reference=False, has_likelihood=True),
        PreferenceLossRow("hinge", "SLiC, RSO"),
        PreferenceLossRow("robust", "robust DPO", ("label_smoothing",), needs_smoothing=True),
        PreferenceLossRow("exo_pair", "EXO", ("label_smoothing",), needs_smoothing=True),
        PreferenceLossRow("nca_pair", "NCA"),
        PreferenceLossRow("bco_pair", "BCO"),
        PreferenceLossRow("sppo_hard", "SPPO"),
        PreferenceLossRow("apo_zero", "APO-zero"),
        PreferenceLossRow("apo_down", "APO-down"),
        PreferenceLossRow("discopop", "DiscoPOP", ("discopop_tau",)),
    )
}
