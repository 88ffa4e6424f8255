"""The constants of a packed micro-batch that the policy losses take, and the names of their metrics."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_kernels.dispatch import FLOATS
from rlhf_kernels.objective import PolicyObjective

MAX_LOG_RATIO = 20.0  # nats; every log ratio is clamped to +-20, so that exp cannot overflow
MAX_KL = 10.0  # nats; bound on the k3 estimate per token, which could reach exp(20), as in verl and OpenRLHF
MAX_WEIGHT = 10.0  # bound on the importance weight in the unbiased KL gradient, which limits its variance
# VESPO's exponents c1 and c2 for positive and for other advantages.
VESPO_EXPONENTS = ((2.0, 3.0), (3.0, 2.0))
MIN_REST = 1e-8  # smallest probability of all other tokens in DPPO's KL, whose logarithm it keeps finite

# The first three are shares of the reduced loss, without their coefficients. The others are sums over trained tokens,
# which "tokens" counts.
POLICY_METRICS = ("policy_loss", "kl_loss", "entropy_bonus", "tokens", "clipped", "ratio", "kl_to_old", "kl_bounded")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyStream:
    """Constants of a packed micro-batch of N tokens in S sequences. Log-probs are in nats.

    Columns are bfloat16, float16 or float32, except where another dtype is given.

    Attributes:
        advantages: [N], in reward units.
        loss_mask: [N] bool, True where a token is trained. Other columns may hold anything where it is False.
        cu_seqlens: [S + 1] int32 or int64, bounds of the sequences, ascending from 0 to N.
        num_tokens, num_sequences, max_tokens: denominators of the reduction, counted over all micro-batches,
            accumulation steps and ranks of the update.
        old_logprobs: [N], of the policy before the updates of the step. None uses the current ones as constants.
        ref_logprobs: [N], of the reference. Required if kl_coef > 0.
        weights: [N], factors of the policy loss, such as importance weights. None is 1.
        penalties: [N], factors of |log r_t|, which is added to the policy loss, >= 0, in reward units. None is 0.
        own_loss: takes log-probs [N] and returns l_t [N] float32, with their gradient, in place of the formula that the
            objective names. No kernel knows it: plain torch computes all terms.
    """

    advantages: Tensor
    loss_mask: Tensor
    cu_seqlens: Tensor
    num_tokens: int
    num_sequences: int
    max_tokens: int = 1
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    weights: Tensor | None = None
    penalties: Tensor | None = None
    own_loss: Callable[[Tensor], Tensor] | None = None

    def check(self, like: Tensor, objective: PolicyObjective) -> None:
        """Raise ValueError for columns that do not match `like` [N, ...], the objective, or each other."""
        for name in ("advantages", "loss_mask", "old_logprobs", "ref_logprobs", "weights", "penalties"):
            check_column(name, getattr(self, name), like, (torch.bool,) if name == "loss_mask" else FLOATS)
        bounds = self.cu_seqlens
        if bounds.ndim != 1 or bounds.dtype not in (torch.int32, torch.int64) or bounds.device != like.device:
            given = f"{list(bounds.shape)} {bounds.dtype} on {bounds.device}"
            raise ValueError(f"cu_seqlens must be [S + 1] int32 or int64 on {like.device}; got {given}")
        if not bounds.is_cuda and ([*bounds[:1], *bounds[-1:]] != [0, len(like)] or bool((bounds.diff() < 0).any())):
            raise ValueError(f"cu_seqlens must rise from 0 to {len(like)}; got {bounds.tolist()[:8]} ...")
        if objective.kl_coef > 0 and self.ref_logprobs is None:
            raise ValueError(f"kl_coef is {objective.kl_coef:g}; without ref_logprobs it must be 0")

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
