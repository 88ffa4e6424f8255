"""Policy losses: one number a token, neither masked nor reduced.

Shape letters: B rollouts, T token positions. Log-probs are in nats: `logprobs` are the current policy's and carry the
gradient, `old_logprobs` are those of the policy before this step; all but the former is a constant. Losses are [B, T]
float, in reward units, and are to be reduced by `aggregate`. ValueError is raised when tensors differ in shape.
"""

import torch
from torch import Tensor

from rlhf_train.shapes import check_same_shape

MAX_LOG_RATIO = 20.0  # nats; exp(20) is 5e8, far beyond any clip range and far below overflow


def clipped_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Tensor:
    """Return PPO's clipped surrogate loss of every token.

        loss_t = -min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t),   r_t = exp(logprobs_t - old_logprobs_t)

    and with a dual clip c, where A_t < 0, no more than -c A_t.

    The log ratio is clamped to +-MAX_LOG_RATIO so that exp cannot overflow; beyond it the gradient is zero.

    Args:
        logprobs, old_logprobs, advantages: [B, T] float.
        clip_low: largest decrease of the ratio below 1, in [0, 1).
        clip_high: largest increase above 1, >= 0.
        dual_clip: c > 1, or None for no bound.

    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7; unequal bounds: Yu et al. 2025, arXiv:2503.14476, sec. 3.1;
    dual clip: Ye et al. 2020, arXiv:1912.09729, eq. 5.
    """
    check_same_shape(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    ratio = policy_ratio(logprobs, old_logprobs)
    return _clipped_surrogate(ratio, advantages.detach(), clip_low, clip_high, dual_clip)


def gspo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """Return GSPO's loss of every token: PPO's, with the ratio of the whole rollout, a geometric mean, in each place.

        loss_t = -min(s_t A_t, clip(s_t, 1 - clip_low, 1 + clip_high) A_t),   s_t = `sequence_ratio`

    With one advantage a rollout and the reduction seq_mean_token_mean it is GSPO's objective; with advantages that
    differ by token it is the paper's GSPO-token.

    Args:
        logprobs, old_logprobs, advantages: [B, T] float.
        loss_mask: [B, T] bool, True where the token is trained.
        clip_low, clip_high: as in `clipped_policy_loss`; the paper's are 3e-4 and 4e-4.

    Source: Zheng et al. 2025, arXiv:2507.18071, eq. 5 and 7; per token: sec. 4.3.
    """
    check_same_shape(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, loss_mask=loss_mask)
    ratio = sequence_ratio(logprobs, old_logprobs, loss_mask)
    return _clipped_surrogate(ratio, advantages.detach(), clip_low, clip_high, None)


def cispo_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """Return CISPO's loss of every token: REINFORCE under a clipped importance weight, so that no token's gradient is
    ever cut off. Its value means little, its gradient is what counts.

        loss_t = -sg(clip(r_t, 1 - clip_low, 1 + clip_high)) A_t logprobs_t,   sg = a constant to the gradient

    Args:
        logprobs, old_logprobs, advantages: [B, T] float.
        clip_low, clip_high: as in `clipped_policy_loss`.

    Source: MiniMax 2025, arXiv:2506.13585, eq. 4 and 5.
    """
    check_same_shape(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    weight = policy_ratio(logprobs.detach(), old_logprobs).clamp(1 - clip_low, 1 + clip_high)
    return -weight * advantages.detach() * logprobs


def reinforce_loss(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """Return the plain policy gradient's loss of every token: -A_t logprobs_t. As CISPO's, it is for its gradient.

    Args:
        logprobs, advantages: [B, T] float.

    Source: Williams 1992, "Simple statistical gradient-following algorithms for connectionist reinforcement learning",
    Machine Learning 8.
    """
    check_same_shape(logprobs=logprobs, advantages=advantages)
    return -advantages.detach() * logprobs


def policy_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Return exp(logprobs - old_logprobs), [B, T] float as both, the log ratio clamped to +-MAX_LOG_RATIO; exactly 1
    where the two agree."""
    return torch.exp((logprobs - old_logprobs.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def sequence_ratio(logprobs: Tensor, old_logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    """Return, for every token, the geometric mean of the ratios of its rollout, with the gradient of that token alone.

        s_i = exp(mean_t(logprobs_t - old_logprobs_t)),   s_it = sg(s_i) exp(logprobs_t - sg(logprobs_t))

    Args:
        logprobs, old_logprobs: [B, T] float.
        loss_mask: [B, T] bool.

    Returns:
        [B, T] float, equal in all places of a row; exactly 1 where the two policies agree, or nothing is trained.

    Source: Zheng et al. 2025, arXiv:2507.18071, eq. 7 and 14.
    """
    gap = (logprobs.detach() - old_logprobs.detach()).masked_fill(~loss_mask, 0.0)
    mean = gap.sum(dim=1, keepdim=True) / loss_mask.sum(dim=1, keepdim=True).clamp(min=1)
    ratio = torch.exp(mean.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    return ratio * torch.exp(logprobs - logprobs.detach())


def is_clipped(ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float) -> Tensor:
    """Return where, [B, T] bool, the clipped surrogate is flat: `ratio` [B, T] has left its range in the direction that
    `advantages` [B, T] favour. The bounds are as in `clipped_policy_loss`."""
    return ((ratio > 1 + clip_high) & (advantages > 0)) | ((ratio < 1 - clip_low) & (advantages < 0))


def _clipped_surrogate(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> Tensor:
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    if dual_clip is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)
