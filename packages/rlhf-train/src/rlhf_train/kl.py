"""Estimates of the KL divergence from the reference, one a token, and the weight that it has.

ValueError is raised for an unknown estimator, and when shapes differ.
"""

import math

import torch
from torch import Tensor

from rlhf_data.errors import unknown
from rlhf_train.algorithms import KL_ESTIMATORS
from rlhf_train.shapes import check_same_shape

MAX_LOG_RATIO = 20.0  # nats; exp(20) is 5e8, far beyond any clip range and far below overflow
MAX_KL_ERROR = 0.2


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Return the estimate of KL(policy || reference) from each sampled token.

        d = logprobs - ref_logprobs
        k1 = d            unbiased, may be negative
        k2 = d^2 / 2      biased, never negative; its gradient is the true one in expectation, on policy
        k3 = e^-d - 1 + d unbiased, never negative

    Args:
        logprobs: [B, T] float, nats; may carry a gradient.
        ref_logprobs: [B, T] float, nats; a constant.
        estimator: k1, k2 or k3.

    Returns:
        [B, T] float, nats; exactly 0 where the two agree.

    Source: Schulman 2020, "Approximating KL divergence" (joschu.net/blog/kl-approx.html).
    """
    check_same_shape(logprobs=logprobs, ref_logprobs=ref_logprobs)
    difference = (logprobs - ref_logprobs.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference**2 / 2
    if estimator == "k3":
        return torch.expm1(-difference) + difference
    raise ValueError(unknown("KL estimator", estimator, KL_ESTIMATORS))


def adapted_kl_coef(kl_coef: float, kl: float, *, target: float, horizon: int, num_rollouts: int) -> float:
    """Return the coefficient for the next batch: larger when the KL was above its target, smaller when below.

        kl_coef exp(clip(kl / target - 1, -0.2, 0.2) num_rollouts / horizon)

    The paper's factor is the first two terms of that exponential, which never reaches 0, however large the batch.

    Args:
        kl_coef: the one that the batch was made with.
        kl: nats a token, mean over the batch; unchanged coefficient when it is not finite.
        target: nats a token, > 0.
        horizon: rollouts, >= 1.
        num_rollouts: trained in the batch.

    Source: Ziegler et al. 2019, arXiv:1909.08593, sec. 2.2, where the KL is that of a whole response.
    """
    if not math.isfinite(kl):
        return kl_coef
    error = min(max(kl / target - 1, -MAX_KL_ERROR), MAX_KL_ERROR)
    return kl_coef * math.exp(error * num_rollouts / horizon)
