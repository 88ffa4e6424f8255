"""Policy losses: one number a token, neither masked nor reduced.

Shape letters: B rollouts, T token positions.
"""

import torch
from torch import Tensor

from rlhf_train.shapes import check_same_shape

MAX_LOG_RATIO = 20.0  # nats; exp(20) is 5e8, far beyond any clip range and far below overflow


def clipped_policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """Return the clipped surrogate loss of every token.

        loss_t = -min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t),   r_t = exp(logprobs_t - old_logprobs_t)

    The log ratio is clamped to +-MAX_LOG_RATIO so that exp cannot overflow; beyond it the gradient is zero.

    Args:
        logprobs: [B, T] float, nats. Current policy; carries the gradient.
        old_logprobs: [B, T] float, nats. Policy before this step; a constant.
        advantages: [B, T] float, in reward units; a constant.
        clip_low: largest decrease of the ratio below 1, in [0, 1).
        clip_high: largest increase above 1, >= 0.

    Returns:
        [B, T] float, in reward units; to be reduced by `aggregate`.

    Raises:
        ValueError: the tensors differ in shape.

    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7; unequal bounds: Yu et al. 2025, arXiv:2503.14476, sec. 3.1.
    """
    check_same_shape(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    ratio = policy_ratio(logprobs, old_logprobs)
    advantages = advantages.detach()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)


def policy_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Return exp(logprobs - old_logprobs) of every token, the log ratio clamped to +-MAX_LOG_RATIO.

    Args:
        logprobs: [B, T] float, nats; carries the gradient.
        old_logprobs: [B, T] float, nats; a constant.

    Returns:
        [B, T] float; exactly 1 where the two agree.
    """
    return torch.exp((logprobs - old_logprobs.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def is_clipped(ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float) -> Tensor:
    """Return where the clipped surrogate is flat: the ratio has left its range in the direction the advantage favours.

    Args:
        ratio: [B, T] float.
        advantages: [B, T] float.
        clip_low: as in `clipped_policy_loss`.
        clip_high: as in `clipped_policy_loss`.

    Returns:
        [B, T] bool.
    """
    return ((ratio > 1 + clip_high) & (advantages > 0)) | ((ratio < 1 - clip_low) & (advantages < 0))
