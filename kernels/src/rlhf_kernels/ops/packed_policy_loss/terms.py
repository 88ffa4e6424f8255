"""Arguments of the policy losses: the objective, and the constants of a packed micro-batch."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_kernels.dispatch import FLOATS

MAX_LOG_RATIO = 20.0  # nats; every log ratio is clamped to +-20
MAX_WEIGHT = 10.0  # bound on the importance weight in the unbiased KL gradient

# The first four are shares of the reduced loss. The others are sums over trained tokens ("tokens" counts them), except
# the last two, which count over the whole loss mask.
POLICY_METRICS = ("loss", "policy_loss", "kl_loss", "entropy_bonus", "tokens", "clipped", "ratio", "kl_to_old")
POLICY_METRICS += ("kl_to_ref", "entropy", "weight", "masked_tokens", "out_of_bounds")

_CHOICES = {
    "policy_loss": ("ppo", "gspo", "cispo", "reinforce"),
    "reduction": ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"),
    "kl_estimator": ("k1", "k2", "k3"),
    "weight_level": ("off", "token", "sequence", "geometric"),
    "weight_mode": ("truncate", "mask"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyObjective:
    """The terms of a policy loss and their coefficients. `packed_policy_loss` gives the formulas.

    Attributes:
        policy_loss: ppo, gspo, cispo or reinforce.
        reduction: token_mean, seq_mean_token_mean, seq_mean_token_sum or seq_mean_token_sum_norm.
        clip_low: largest decrease of the ratio below 1, in [0, 1).
        clip_high: largest increase of the ratio above 1, >= 0.
        dual_clip: with ppo and a negative advantage A, the loss is at most this times |A|. > 1, or None for no bound.
        kl_coef: weight of the KL to the reference, >= 0. With 0 the KL is measured, if a reference is given.
        kl_estimator: k1, k2 or k3.
        kl_unbiased_gradient: give the KL term the gradient of KL(policy || reference), whatever the estimator.
        entropy_coef: weight of the entropy bonus, >= 0.
        weight_level: importance weight between engine and trainer: off, token, sequence (product over the sequence) or
            geometric (geometric mean over the sequence).
        weight_mode: truncate clamps a weight to its bounds; mask leaves tokens with a weight out of bounds out of the
            loss.
        weight_low, weight_high: the bounds, 0 <= low < high. With level off they only affect the metric out_of_bounds.

    Raises:
        ValueError: an attribute out of its range.
    """

    policy_loss: str = "ppo"
    reduction: str = "token_mean"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    kl_unbiased_gradient: bool = False
    entropy_coef: float = 0.0
    weight_level: str = "off"
    weight_mode: str = "truncate"
    weight_low: float = 0.5
    weight_high: float = 2.0

    def __post_init__(self) -> None:
        for name, is_right, allowed in (
            *((name, getattr(self, name) in known, ", ".join(known)) for name, known in _CHOICES.items()),
            ("clip_low", 0 <= self.clip_low < 1, "in [0, 1)"),
            ("clip_high", self.clip_high >= 0, ">= 0"),
            ("dual_clip", self.dual_clip is None or self.dual_clip > 1, "> 1, or None"),
            ("dual_clip", self.dual_clip is None or self.policy_loss == "ppo", "None unless policy_loss is ppo"),
            ("kl_coef", self.kl_coef >= 0, ">= 0"),
            ("entropy_coef", self.entropy_coef >= 0, ">= 0"),
            ("weight_low", 0 <= self.weight_low < self.weight_high, ">= 0 and below weight_high"),
        ):
            if not is_right:
                raise ValueError(f"{name} is {getattr(self, name)!r}; allowed: {allowed}")

    @property
    def needs_sequences(self) -> bool:
        """Whether a token's loss depends on other tokens of its sequence."""
        by_weight = self.weight_level in ("sequence", "geometric")
        return by_weight or self.policy_loss == "gspo" or self.reduction == "seq_mean_token_mean"


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyStream:
    """Constants of a packed micro-batch of N tokens in S sequences. Log-probs are in nats.

    Columns are bfloat16, float16 or float32, except where another dtype is given.

    Attributes:
        advantages: [N], in reward units.
        loss_mask: [N] bool, True where a token is trained. Other columns may hold anything where it is False.
        cu_seqlens: [S + 1] int32 or int64, bounds of the sequences, ascending from 0 to N.
        num_tokens, num_sequences, max_tokens: denominators of the reduction, counted over all micro-batches,
            accumulation steps and ranks of the optimizer update. In mask mode they count the tokens that are left.
        old_logprobs: [N], of the policy before the step. None uses the current ones as constants.
        ref_logprobs: [N], of the reference. Required if kl_coef > 0.
        rollout_logprobs: [N], of the sampling engine. Required with old_logprobs unless weight_level is off.
        weights: [N], factors of the policy loss computed by the caller. Excludes a weight_level.
    """

    advantages: Tensor
    loss_mask: Tensor
    cu_seqlens: Tensor
    num_tokens: int
    num_sequences: int
    max_tokens: int = 1
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    rollout_logprobs: Tensor | None = None
    weights: Tensor | None = None

    def check(self, like: Tensor, objective: PolicyObjective) -> None:
        """Raise ValueError for columns that do not match `like` [N, ...], the objective, or each other."""
        for name in ("advantages", "loss_mask", "old_logprobs", "ref_logprobs", "rollout_logprobs", "weights"):
            check_column(name, getattr(self, name), like, (torch.bool,) if name == "loss_mask" else FLOATS)
        bounds, level = self.cu_seqlens, objective.weight_level
        if bounds.ndim != 1 or bounds.dtype not in (torch.int32, torch.int64) or bounds.device != like.device:
            given = f"{list(bounds.shape)} {bounds.dtype} on {bounds.device}"
            raise ValueError(f"cu_seqlens must be [S + 1] int32 or int64 on {like.device}; got {given}")
        if not bounds.is_cuda and ([*bounds[:1], *bounds[-1:]] != [0, len(like)] or bool((bounds.diff() < 0).any())):
            raise ValueError(f"cu_seqlens must rise from 0 to {len(like)}; got {bounds.tolist()[:8]} ...")
        if objective.kl_coef > 0 and self.ref_logprobs is None:
            raise ValueError(f"kl_coef is {objective.kl_coef:g}; without ref_logprobs it must be 0")
        if level != "off" and (self.rollout_logprobs is None or self.old_logprobs is None or self.weights is not None):
            raise ValueError(f"weight_level is {level}: it needs old_logprobs and rollout_logprobs, and no weights")

    def denominator(self, objective: PolicyObjective) -> int:
        """Return the denominator of the reduction."""
        if objective.reduction == "token_mean":
            return max(self.num_tokens, 1)
        return max(self.num_sequences, 1) * (self.max_tokens if objective.reduction.endswith("_norm") else 1)


def check_column(name: str, column: Tensor | None, like: Tensor, dtypes: tuple[torch.dtype, ...] = FLOATS) -> None:
    """Raise ValueError unless `column` is None, or has one element per row of `like` in one of `dtypes`."""
    if column is None:
        return
    if column.shape != like.shape[:1] or column.dtype not in dtypes or column.device != like.device:
        allowed = f"[{len(like)}] on {like.device} in {', '.join(str(dtype)[6:] for dtype in dtypes)}"
        raise ValueError(f"{name} must be {allowed}; got {list(column.shape)} on {column.device} in {column.dtype}")
