"""Estimates of the KL divergence from the reference, one a token."""

import torch
from torch import Tensor

from rlhf_data.errors import unknown
from rlhf_train.shapes import check_same_shape

KL_ESTIMATORS = ("k1", "k2", "k3")
MAX_LOG_RATIO = 20.0  # nats; keeps k3's exp finite, see losses.policy


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

    Raises:
        ValueError: unknown estimator, or shapes differ.

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
