"""Per-token estimates of the KL divergence from the reference, and the rule that adapts its coefficient.

Functions raise ValueError for an unknown estimator, and when shapes differ.
"""

import math

import torch
from torch import Tensor

from rlhf_data.errors import unknown
from rlhf_kernels.ops.packed_policy_loss.terms import MAX_KL, MAX_LOG_RATIO
from rlhf_train.algorithms.table import KL_ESTIMATORS
from rlhf_train.shapes import check_same_shape

# nats per token, by estimator
BOUNDS = {"k1": MAX_LOG_RATIO, "k2": MAX_LOG_RATIO**2 / 2, "k3": MAX_KL}
MAX_KL_ERROR = 0.2  # bound of the relative deviation from the target, as in the paper


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Return the estimate of KL(policy || reference) from each sampled token.

        d = logprobs - ref_logprobs
        k1 = d            unbiased, may be negative
        k2 = d^2 / 2      biased, never negative; on policy, its expected gradient is that of the KL
        k3 = e^-d - 1 + d unbiased up to its bound, never negative

    Args:
        logprobs: [B, T] float, nats; may carry a gradient.
        ref_logprobs: [B, T] float, nats; a constant.
        estimator: "k1", "k2" or "k3".

    Returns:
        [B, T] float, nats; exactly 0 where the two log-probs are equal. d is clamped to +-20, and k3 to at most 10: a
        single token could otherwise reach exp(20). verl has these bounds for k3. At a bound the gradient is 0.

    Source: Schulman 2020, "Approximating KL divergence" (joschu.net/blog/kl-approx.html).
    """
    check_same_shape(logprobs=logprobs, ref_logprobs=ref_logprobs)
    if estimator not in KL_ESTIMATORS:
        raise ValueError(unknown("KL estimator", estimator, KL_ESTIMATORS))
    difference = (logprobs - ref_logprobs.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference**2 / 2
    return (torch.expm1(-difference) + difference).clamp(max=MAX_KL)


def adapted_kl_coef(kl_coef: float, kl: float, *, target: float, horizon: int, num_rollouts: int) -> float:
    """Return the KL coefficient for the next step: larger when the KL was above its target, smaller when below.

        kl_coef exp(clip(kl / target - 1, -0.2, 0.2) num_rollouts / horizon)

    The paper's factor, 1 + clip(...) num_rollouts / horizon, is the first-order expansion of this one. The exponential
    stays above 0 for a batch of any size.

    Args:
        kl_coef: coefficient of the step that measured `kl`.
        kl: mean over the batch, nats per token. The coefficient stays unchanged when `kl` is not finite.
        target: nats per token, > 0.
        horizon: rollouts over which the coefficient changes by at most about a fifth, >= 1.
        num_rollouts: rollouts trained in the step.

    Source: Ziegler et al. 2019, arXiv:1909.08593, sec. 2.2, where the KL is that of a whole response.
    """
    if not math.isfinite(kl):
        return kl_coef
    error = min(max(kl / target - 1, -MAX_KL_ERROR), MAX_KL_ERROR)
    return kl_coef * math.exp(error * num_rollouts / horizon)
