"""Importance weights that correct for the gap between the engine's and the trainer's probabilities.

Engine and trainer compute the same policy with different kernels, and an engine's weights may be a few updates old. The
samples therefore come from a slightly different policy than the one that is trained. A policy gradient from them is
unbiased when each token is weighted by

    w_t = exp(old_logprobs_t - rollout_logprobs_t)

with the trainer's log-probs before the step's first update, and the engine's of the version that drew the token. Two
objectives use the weights, with bounds low and high and r_t the policy ratio (Hilton et al. 2021, arXiv:2110.00641,
calls the first one decoupled PPO; verl calls the modes decoupled and bypass, docs/algo/rollout_corr_math.md):

    old_logprobs = recompute    w_t min(r_t A_t, clip(r_t) A_t),   r_t = current / trainer's old policy
    old_logprobs = rollout      m_t min(r_t A_t, clip(r_t) A_t),   r_t = current / engine's policy

In the second one r_t includes the weight, and m_t = 1 where low <= w_t <= high, else 0. The mask is constant during a
step, as in IcePop (arXiv:2510.18855). A loss without a ratio takes w_t in both. A masked token has the loss 0 and still
counts in the mean: INTELLECT-3 (arXiv:2512.16144, eq. 1) divides by the tokens of all rollouts, and so does TRL.

Shape letters: B rollouts, T token positions. ValueError is raised for an unknown level or mode, and when shapes differ.
"""

import torch
from torch import Tensor

from rlhf_data.errors import unknown
from rlhf_train.algorithms.kl import MAX_LOG_RATIO, kl_estimate
from rlhf_train.algorithms.token_specs import CORRECTION_LEVELS, CORRECTION_MODES, REJECTIONS
from rlhf_train.shapes import check_same_shape


def importance_weights(old_logprobs: Tensor, rollout_logprobs: Tensor, loss_mask: Tensor, *, level: str) -> Tensor:
    """Return the importance weight of every token.

        token      w_t
        sequence   prod_t w_t            the same weight for all tokens of a rollout
        geometric  (prod_t w_t)^(1/n)    likewise; n = trained tokens of the rollout

    Args:
        old_logprobs: [B, T] float, nats, from the trainer before the step's first update.
        rollout_logprobs: [B, T] float, nats, from the engine. Each is of the version that drew its token, so a rollout
            that lived through a weight update mixes versions.
        loss_mask: [B, T] bool.
        level: one of the names above. "sequence" is unbiased, but its variance grows with length; "token" has low
            variance and is biased.

    Returns:
        [B, T] float, 1.0 where the mask is False. Log-weights are clamped to +-20 nats.

    Source: token: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"; sequence:
    Liu et al. 2025, "When speed kills stability"; geometric: Zheng et al. 2025, arXiv:2507.18071, eq. 7.
    """
    check_same_shape(old_logprobs=old_logprobs, rollout_logprobs=rollout_logprobs, loss_mask=loss_mask)
    gap = (old_logprobs - rollout_logprobs).masked_fill(~loss_mask, 0.0)
    if level == "token":
        log_weight = gap
    elif level in ("sequence", "geometric"):
        log_weight = gap.sum(dim=1, keepdim=True)
        if level == "geometric":
            log_weight = log_weight / loss_mask.sum(dim=1, keepdim=True).clamp(min=1)
        log_weight = log_weight.expand_as(gap).masked_fill(~loss_mask, 0.0)
    else:
        raise ValueError(unknown("correction level", level, CORRECTION_LEVELS[1:]))
    return torch.exp(log_weight.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def bounded_weights(
    weights: Tensor, loss_mask: Tensor, *, mode: str, low: float, high: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Bound importance weights, by truncation or by masking.

    Args:
        weights: [B, T] float, from `importance_weights`.
        loss_mask: [B, T] bool.
        mode: "truncate" sets a weight beyond a bound to the bound. "mask" and "filter" mask the token.
        low: smallest weight.
        high: largest weight.

    Returns:
        Weights [B, T] float; the loss mask without the masked tokens, [B, T] bool; and which trained tokens had a
        weight out of bounds, [B, T] bool.

    Source: truncate: Yao et al. 2025 (above), after Ionides 2008, "Truncated importance sampling"; mask: Ling
    Team 2025, arXiv:2510.18855 (IcePop); filter: StepFun 2026 (MIS-PO), arXiv:2602.10604.
    """
    check_same_shape(weights=weights, loss_mask=loss_mask)
    outside = ((weights < low) | (weights > high)) & loss_mask
    if mode == "truncate":
        return weights.clamp(low, high), loss_mask, outside
    if mode in CORRECTION_MODES:
        return weights, loss_mask & ~outside, outside
    raise ValueError(unknown("correction mode", mode, CORRECTION_MODES))


def rejection_statistic(old_logprobs: Tensor, rollout_logprobs: Tensor, loss_mask: Tensor, *, by: str) -> Tensor:
    """Return how far the engine's and the trainer's probabilities are apart, for the rejection of tokens or rollouts.

        token_k2            k2_t = d_t^2 / 2,  with d_t = old_logprobs_t - rollout_logprobs_t
        token_k3            k3_t = e^d_t - 1 - d_t
        mean_k2, mean_k3    their mean over the trained tokens of a rollout: an estimate of KL(engine || trainer)
        max_k2, max_k3      their largest value in a rollout, which a single token without support at the trainer raises
        geometric           e^(mean of d_t), the geometric mean of the weights

    Args:
        old_logprobs, rollout_logprobs, loss_mask: see `importance_weights`.
        by: one of the names above.

    Returns:
        [B, T] float, in nats or a ratio; only "token_k2" and "token_k3" differ within a rollout. Estimates are
        bounded as in `kl`.

    Source: Liu et al. 2025, "When speed kills stability" (geometric); verl, docs/algo/rollout_corr.md (the others, as
    token_k2 to seq_max_k3); OpenRLHF's `seq-mask-tis` has "geometric" beside weights of tokens.
    """
    if by not in REJECTIONS[1:]:
        raise ValueError(unknown("rejection", by, REJECTIONS[1:]))
    if by == "geometric":
        return importance_weights(old_logprobs, rollout_logprobs, loss_mask, level=by)
    over, estimator = by.split("_")
    values = kl_estimate(rollout_logprobs, old_logprobs, estimator).masked_fill(~loss_mask, 0.0)
    if over == "mean":
        values = values.sum(dim=1, keepdim=True) / loss_mask.sum(dim=1, keepdim=True).clamp(min=1)
    elif over == "max":
        values = values.amax(dim=1, keepdim=True)
    return values.expand_as(loss_mask)
