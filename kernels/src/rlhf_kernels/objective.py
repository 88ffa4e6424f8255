"""The terms of a policy loss as plain data, from the command line to the kernel. Torch-free."""

from dataclasses import dataclass
from typing import Literal, get_args

PolicyLossName = Literal[
    "ppo", "gspo", "cispo", "reinforce", "sapo", "dppo_tv", "dppo_kl", "kimi", "gmpo", "topr", "vespo"
]
Reduction = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]
KlEstimator = Literal["k1", "k2", "k3"]

_CHOICES = {
    "policy_loss": get_args(PolicyLossName),
    "reduction": get_args(Reduction),
    "kl_estimator": get_args(KlEstimator),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyObjective:
    """The terms of a policy loss and their coefficients. `packed_policy_loss` gives the formulas.

    Attributes:
        policy_loss: ppo, gspo, cispo, reinforce, sapo, dppo_tv, dppo_kl, kimi, gmpo, topr or vespo.
        reduction: token_mean, seq_mean_token_mean, seq_mean_token_sum or seq_mean_token_sum_norm. The KL and entropy
            terms are reduced in the same way.
        clip_low: largest decrease of the ratio below 1, in [0, 1). With dppo_tv and dppo_kl the largest divergence of a
            token with a negative advantage.
        clip_high: largest increase of the ratio above 1, >= 0. With dppo_tv and dppo_kl the largest divergence of a
            token with a positive advantage.
        dual_clip: with ppo and a negative advantage A, the loss is at most this times |A|. > 1, or None for no bound.
        sapo_tau: temperatures of sapo for positive and for other advantages, > 0.
        log_ratio_coef: weight of the squared log ratio in kimi, in reward units, >= 0.
        mask_off_policy: tokens with a negative advantage have no policy loss in sequences whose mean of -log ratio is
            above this, >= 0, nats per token; None for all tokens.
        kl_coef: weight of the KL to the reference as a term of the loss, >= 0.
        kl_estimator: k1, k2 or k3.
        kl_unbiased_gradient: give the KL term the gradient of KL(policy || reference), whatever the estimator.
        entropy_coef: weight of the entropy bonus, >= 0.

    Raises:
        ValueError: an attribute out of its range.
    """

    policy_loss: PolicyLossName = "ppo"
    reduction: Reduction = "token_mean"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    sapo_tau: tuple[float, float] = (1.0, 1.05)
    log_ratio_coef: float = 1e-3
    mask_off_policy: float | None = None
    kl_coef: float = 0.0
    kl_estimator: KlEstimator = "k1"
    kl_unbiased_gradient: bool = False
    entropy_coef: float = 0.0

    def __post_init__(self) -> None:
        for name, is_right, allowed in (
            *((name, getattr(self, name) in known, ", ".join(known)) for name, known in _CHOICES.items()),
            ("clip_low", 0 <= self.clip_low < 1, "in [0, 1)"),
            ("clip_high", self.clip_high >= 0, ">= 0"),
            ("dual_clip", self.dual_clip is None or self.dual_clip > 1, "> 1, or None"),
            ("dual_clip", self.dual_clip is None or self.policy_loss == "ppo", "None unless policy_loss is ppo"),
            ("sapo_tau", min(self.sapo_tau) > 0, "two numbers > 0"),
            ("log_ratio_coef", self.log_ratio_coef >= 0, ">= 0"),
            ("mask_off_policy", self.mask_off_policy is None or self.mask_off_policy >= 0, ">= 0, or None"),
            ("kl_coef", self.kl_coef >= 0, ">= 0"),
            ("entropy_coef", self.entropy_coef >= 0, ">= 0"),
        ):
            if not is_right:
                raise ValueError(f"{name} is {getattr(self, name)!r}; allowed: {allowed}")

    @property
    def needs_sequences(self) -> bool:
        """Whether a token's loss depends on other tokens of its sequence."""
        means = self.reduction == "seq_mean_token_mean"
        return self.uses_sequence_ratio or means or self.mask_off_policy is not None

    @property
    def uses_sequence_ratio(self) -> bool:
        """Whether all tokens of a sequence share a ratio."""
        return self.policy_loss in ("gspo", "gmpo", "topr", "vespo")
