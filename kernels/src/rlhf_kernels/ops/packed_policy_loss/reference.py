"""The plain torch twin of `packed_policy_loss`: what the fused kernel must equal, and the path of CPUs."""

import math

import torch
from torch import Tensor

from rlhf_kernels.ops.packed_policy_loss.terms import MAX_LOG_RATIO, MAX_WEIGHT, PolicyObjective, PolicyStream


def packed_policy_loss_reference(
    logprobs: Tensor, entropy: Tensor | None, stream: PolicyStream, objective: PolicyObjective
) -> tuple[Tensor, Tensor]:
    """Return loss and metrics as `packed_policy_loss` does, in float32 or, for float64, in that."""

    def wide(column: Tensor | None) -> Tensor:
        column = torch.zeros_like(logprobs) if column is None else column
        # Before anything is computed of them: the gradient of a NaN is NaN even where its weight is 0.
        return column.to(torch.promote_types(column.dtype, torch.float32)).masked_fill(~stream.loss_mask, 0.0)

    old = wide(logprobs if stream.old_logprobs is None else stream.old_logprobs).detach()
    rollout = old if stream.rollout_logprobs is None else wide(stream.rollout_logprobs).detach()
    weights, kept, outside = _mismatch_weights(old - rollout, stream, objective)
    if stream.weights is not None:
        weights = wide(stream.weights).detach()
    logprobs, advantages, bonus = wide(logprobs), wide(stream.advantages).detach(), wide(entropy)
    lengths = _totals(kept.to(old), stream).clamp(min=1)

    log_ratio = logprobs - old
    ratio = torch.exp(_clamped(log_ratio))
    if objective.policy_loss == "gspo":
        mean = _totals(log_ratio.detach().masked_fill(~kept, 0.0), stream) / lengths
        ratio = torch.exp(_clamped(mean)) * torch.exp(logprobs - logprobs.detach())
    loss, clipped = _token_loss(logprobs, ratio, advantages, objective)
    kl = torch.zeros_like(logprobs)
    if stream.ref_logprobs is not None:
        kl = _kl_term(logprobs - wide(stream.ref_logprobs).detach(), log_ratio.detach(), objective)

    share = kept / (lengths if objective.reduction == "seq_mean_token_mean" else 1) / stream.denominator(objective)
    policy_loss, kl_loss, entropy_bonus = ((share * term).sum() for term in (weights * loss, kl, bonus))
    total = policy_loss + objective.kl_coef * kl_loss - objective.entropy_coef * entropy_bonus
    sums = [(kept * x).sum() for x in (torch.ones_like(kl), clipped, ratio, _k3(log_ratio), kl, bonus, weights)]
    metrics = [total, policy_loss, kl_loss, entropy_bonus, *sums, stream.loss_mask.sum(), outside.sum()]
    return total, torch.stack([entry.to(total) for entry in metrics]).detach()


def _mismatch_weights(gap: Tensor, stream: PolicyStream, objective: PolicyObjective) -> tuple[Tensor, Tensor, Tensor]:
    """Return mismatch weights, the mask that they leave, and which are out of bounds; `gap` is old less rollout."""
    if objective.weight_level in ("sequence", "geometric"):
        gap = _totals(gap, stream)
        if objective.weight_level == "geometric":
            gap = gap / _totals(stream.loss_mask.to(gap), stream).clamp(min=1)
    weights = torch.exp(_clamped(gap))
    outside = ((weights < objective.weight_low) | (weights > objective.weight_high)) & stream.loss_mask
    if objective.weight_level == "off":
        return torch.ones_like(weights), stream.loss_mask, outside
    if objective.weight_mode == "mask":
        return weights, stream.loss_mask & ~outside, outside
    return weights.clamp(objective.weight_low, objective.weight_high), stream.loss_mask, outside


def _totals(values: Tensor, stream: PolicyStream) -> Tensor:
    """Return, for every token, the sum of `values` [N] over its sequence."""
    lengths = stream.cu_seqlens.diff()
    sequence = torch.repeat_interleave(torch.arange(len(lengths), device=values.device), lengths)
    return values.new_zeros(len(lengths)).index_add(0, sequence, values)[sequence]


def _clamped(log_ratio: Tensor, high: float = MAX_LOG_RATIO) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, high)


def _k3(difference: Tensor) -> Tensor:
    difference = _clamped(difference)
    return torch.expm1(-difference) + difference


def _token_loss(
    logprobs: Tensor, ratio: Tensor, advantages: Tensor, objective: PolicyObjective
) -> tuple[Tensor, Tensor]:
    """Return the policy loss of every token, and whether the clip has cut its gradient (cispo: its weight)."""
    low, high = 1 - objective.clip_low, 1 + objective.clip_high
    clipped = ((ratio > high) & (advantages > 0)) | ((ratio < low) & (advantages < 0))
    if objective.policy_loss == "reinforce":
        return -advantages * logprobs, clipped
    if objective.policy_loss == "cispo":
        return -ratio.detach().clamp(low, high) * advantages * logprobs, (ratio < low) | (ratio > high)
    loss = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    if objective.dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -objective.dual_clip * advantages), loss)
        clipped = clipped | ((advantages < 0) & (ratio > objective.dual_clip))
    return loss, clipped


def _kl_term(difference: Tensor, log_ratio: Tensor, objective: PolicyObjective) -> Tensor:
    """Return the KL estimate of every token, with the gradient that the objective asks for."""
    difference = _clamped(difference)
    squared = difference**2 / 2
    estimate = {"k1": difference, "k2": squared, "k3": _k3(difference)}[objective.kl_estimator]
    if not objective.kl_unbiased_gradient:
        return estimate
    surrogate = torch.exp(_clamped(log_ratio, math.log(MAX_WEIGHT))) * squared
    return estimate.detach() + surrogate - surrogate.detach()
