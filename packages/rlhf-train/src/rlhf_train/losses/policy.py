"""The policy loss of an update, which online algorithms share: its definition.

    loss = R(w_t l_t) + kl_coef R(k_t) - entropy_coef R(H_t)

    r_t = pi(t) / pi_old(t)                   the ratio of a token
    l_t = -min(r_t A_t, clip(r_t) A_t)        PPO, GRPO, REINFORCE++, RLOO, DAPO; with the ratio of the sequence: GSPO
    l_t = -constant(clip(r_t)) A_t log pi(t)  CISPO
    l_t = -A_t log pi(t)                      REINFORCE
    l_t = -(4 / tau) sigmoid(tau (r_t - 1)) A_t, with tau by the sign of A_t                SAPO
    l_t = -r_t A_t, and 0 where pi(t) has moved from pi_old(t) too far, as A_t favours      DPPO, by TV or KL
    l_t = -clip(r_t) A_t + c (log r_t)^2      Kimi K2.5
    l_t = -s_i A_t                            GMPO, s_i the geometric mean of ratios, each clipped as its A_t favours
    l_t = -constant(w_i) A_t log pi(t)        TOPR: w_i = min(s_i, 1) where A_t < 0, else 1
                                              VESPO: w_i = W_i^c1 exp(c2 (1 - W_i)), W_i the product of the ratios

With `mask_off_policy`, l_t is 0 where A_t < 0 and the mean of -log r_t over the response is above the limit.
`penalties` add p_t |log r_t| to l_t (KL-Cov).
A_t is the advantage, of `algorithms.group` or `algorithms.gae`. w_t corrects for the gap between trainer and engine, of
`algorithms.correction`. k_t estimates the KL to the reference, of `algorithms.kl`. H_t is the entropy, and R sums over
the tokens of the update and divides by one of its counts. `algorithms.table` has a row for each algorithm.

Updates compute this loss with the operators `packed_policy_loss` and `linear_policy_loss` of rlhf-kernels, which take
packed tokens and, on GPUs, fuse it with the LM head. Their tests compare them with this page.
"""

import math

import torch
from torch import Tensor

from rlhf_kernels import PolicyObjective
from rlhf_kernels.objective import Reduction
from rlhf_kernels.ops.packed_policy_loss.terms import MAX_LOG_RATIO, MAX_WEIGHT, MIN_REST, VESPO_EXPONENTS
from rlhf_train.algorithms.kl import kl_estimate
from rlhf_train.batching import Denominators
from rlhf_train.losses.aggregate import sequence_mean, token_mean


def policy_loss(
    logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    objective: PolicyObjective,
    denominators: Denominators,
    *,
    old_logprobs: Tensor,
    ref_logprobs: Tensor | None = None,
    entropy: Tensor | None = None,
    weights: Tensor | None = None,
    penalties: Tensor | None = None,
) -> Tensor:
    """Return this micro-batch's share of the policy loss of an update, a scalar in reward units.

    Args:
        logprobs: [B, T] float, nats, of the current policy; carry the gradient.
        advantages: [B, T] float, in reward units; constants.
        loss_mask: [B, T] bool, True where the token is trained. Other tensors may hold anything where it is False.
        objective: the loss, its clip range and reduction, and the coefficients of the other terms.
        denominators: counts over the whole update.
        old_logprobs: [B, T] float, nats, of the policy before the step's first update; constants.
        ref_logprobs: [B, T] float, nats, of the reference; None for no KL term.
        entropy: [B, T] float, nats, of the current policy; None for no entropy bonus.
        weights: [B, T] float, factors of the policy term; None for 1.
        penalties: [B, T] float, p_t, reward units; None for 0.
    """

    def trained(column: Tensor) -> Tensor:
        # Mask before any arithmetic: a NaN in the forward pass gives a NaN gradient even with weight 0.
        return column.masked_fill(~loss_mask, 0.0)

    logprobs = trained(logprobs)
    old_logprobs = trained(old_logprobs)
    advantages = trained(advantages)
    token_loss = _token_loss(logprobs, old_logprobs, advantages, loss_mask, objective)
    if objective.mask_off_policy is not None:
        moved = _mean((old_logprobs - logprobs).detach(), loss_mask)
        token_loss = torch.where((advantages < 0) & (moved > objective.mask_off_policy), 0.0, token_loss)
    if penalties is not None:
        token_loss = token_loss + trained(penalties) * _clamped(logprobs - old_logprobs).abs()
    if weights is not None:
        token_loss = trained(weights) * token_loss

    loss = reduced(token_loss, loss_mask, objective.reduction, denominators)
    if ref_logprobs is not None:
        kl = kl_estimate(logprobs, trained(ref_logprobs), objective.kl_estimator)
        if objective.kl_unbiased_gradient:
            kl = _with_unbiased_gradient(kl, logprobs, old_logprobs, trained(ref_logprobs))
        loss = loss + objective.kl_coef * reduced(kl, loss_mask, objective.reduction, denominators)
    if entropy is not None:
        loss = loss - objective.entropy_coef * reduced(entropy, loss_mask, objective.reduction, denominators)
    return loss


def reduced(token_loss: Tensor, loss_mask: Tensor, reduction: Reduction, denominators: Denominators) -> Tensor:
    """Return this micro-batch's share of the reduced loss; see `losses.aggregate`.

    Args:
        token_loss: [B, T] float; values where the mask is False are ignored.
        loss_mask: [B, T] bool.
        reduction: "token_mean"; or the mean over sequences of their "seq_mean_token_mean", "seq_mean_token_sum", or
            "seq_mean_token_sum_norm", which is the sum divided by the longest response that is allowed (Dr. GRPO).
        denominators: counts over the whole update.
    """
    if reduction == "token_mean":
        return token_mean(token_loss, loss_mask, denominators)
    sequence_loss = token_loss.masked_fill(~loss_mask, 0.0).sum(dim=1)
    if reduction == "seq_mean_token_mean":
        sequence_loss = sequence_loss / loss_mask.sum(dim=1).clamp(min=1)
    if reduction == "seq_mean_token_sum_norm":
        sequence_loss = sequence_loss / denominators.max_tokens
    return sequence_mean(sequence_loss, denominators)


def _token_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, loss_mask: Tensor, objective: PolicyObjective
) -> Tensor:
    """Return l_t of each token, [B, T], for the policy loss of `objective`; see the table above."""
    log_ratio = logprobs - old_logprobs
    ratio = torch.exp(_clamped(log_ratio))
    sequence_ratio = _ratio_of_sequence(_mean(log_ratio.detach(), loss_mask), logprobs)
    range_of_ratio = 1 - objective.clip_low, 1 + objective.clip_high

    match objective.policy_loss:
        case "ppo":
            return _ppo(ratio, advantages, objective)
        case "gspo":
            return _ppo(sequence_ratio, advantages, objective)
        case "cispo":
            return -ratio.clamp(*range_of_ratio).detach() * advantages * logprobs
        case "reinforce":
            return -advantages * logprobs
        case "sapo":
            tau = _by_sign(advantages, *objective.sapo_tau)
            return -4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantages
        case "dppo_tv" | "dppo_kl":
            limits = _by_sign(advantages, objective.clip_high, objective.clip_low)
            moved = _divergence(logprobs.detach(), old_logprobs, objective.policy_loss) * advantages.sign()
            return -ratio * advantages * (moved <= limits)
        case "kimi":
            return -ratio.clamp(*range_of_ratio) * advantages + objective.log_ratio_coef * _clamped(log_ratio) ** 2
        case "gmpo":
            return _gmpo(logprobs, log_ratio.detach(), advantages, loss_mask, objective)
        case "topr":
            weight = torch.where(advantages < 0, sequence_ratio.clamp(max=1), 1).detach()
            return -weight * advantages * logprobs
        case "vespo":
            total = log_ratio.detach().sum(dim=1, keepdim=True)
            return -_vespo_weight(torch.exp(_clamped(total)), advantages) * advantages * logprobs


def _ppo(ratio: Tensor, advantages: Tensor, objective: PolicyObjective) -> Tensor:
    """Return the clipped loss of PPO, [B, T]; a dual clip bounds it where the advantage is negative."""
    clipped = ratio.clamp(1 - objective.clip_low, 1 + objective.clip_high)
    token_loss = -torch.minimum(ratio * advantages, clipped * advantages)
    if objective.dual_clip is None:
        return token_loss
    at_most = -objective.dual_clip * advantages
    return torch.where(advantages < 0, torch.minimum(token_loss, at_most), token_loss)


def _gmpo(
    logprobs: Tensor, log_ratio: Tensor, advantages: Tensor, loss_mask: Tensor, objective: PolicyObjective
) -> Tensor:
    """Return GMPO's loss, [B, T]. A token whose ratio is clipped has no gradient."""
    highest, lowest = math.log1p(objective.clip_high), math.log1p(-objective.clip_low)
    is_cut = torch.where(advantages > 0, log_ratio > highest, log_ratio < lowest)
    clipped = torch.where(is_cut, _by_sign(advantages, highest, lowest), log_ratio)
    ratio = _ratio_of_sequence(_mean(clipped, loss_mask), logprobs)
    return -torch.where(is_cut, ratio.detach(), ratio) * advantages


def _vespo_weight(ratio: Tensor, advantages: Tensor) -> Tensor:
    """Return VESPO's weight of each token, [B, T], from the product of the ratios of its sequence, [B, 1]."""
    (c1, c2), (c1_other, c2_other) = VESPO_EXPONENTS
    c1, c2 = _by_sign(advantages, c1, c1_other), _by_sign(advantages, c2, c2_other)
    return torch.exp(c1 * ratio.log() + c2 * (1 - ratio))


def _by_sign(advantages: Tensor, positive: float, other: float) -> Tensor:
    return torch.where(advantages > 0, torch.full_like(advantages, positive), torch.full_like(advantages, other))


def _clamped(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _divergence(logprobs: Tensor, old_logprobs: Tensor, policy_loss: str) -> Tensor:
    """Return DPPO's divergence of two policies over a token and all others together, < 0 where the token has lost.

    Source: Qi et al. 2026, arXiv:2602.04879.
    """
    new, old = logprobs.exp(), old_logprobs.exp()
    if policy_loss == "dppo_tv":
        return new - old
    others = [(1 - each).clamp(min=MIN_REST) for each in (old, new)]
    kl = old * (old_logprobs - logprobs) + others[0] * torch.log(others[0] / others[1])
    return kl * torch.sign(new - old)


def _mean(log_ratio: Tensor, loss_mask: Tensor) -> Tensor:
    """Return the mean over each sequence's trained tokens, [B, 1]. `log_ratio` is 0.0 where the mask is False."""
    return log_ratio.sum(dim=1, keepdim=True) / loss_mask.sum(dim=1, keepdim=True).clamp(min=1)


def _ratio_of_sequence(mean: Tensor, logprobs: Tensor) -> Tensor:
    """Return the geometric mean of a sequence's ratios at each token, [B, T], with the gradient of that token alone.

    `mean` [B, 1] is that of the log ratios.

    Source: Zheng et al. 2025 (GSPO), arXiv:2507.18071, eq. 7 and 14.
    """
    return torch.exp(_clamped(mean)) * torch.exp(logprobs - logprobs.detach())


def _with_unbiased_gradient(kl: Tensor, logprobs: Tensor, old_logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return `kl` with the gradient w d grad(logprobs), that of KL(policy || reference), whatever the estimator.

    d = logprobs - ref_logprobs, and w = exp(logprobs - old_logprobs), at most `MAX_WEIGHT`, weighs tokens that the old
    policy sampled.

    Source: Tang and Munos 2025, arXiv:2506.09477.
    """
    weight = torch.exp((logprobs.detach() - old_logprobs).clamp(-MAX_LOG_RATIO, math.log(MAX_WEIGHT)))
    surrogate = weight * kl_estimate(logprobs, ref_logprobs, "k2")  # the gradient of d^2 / 2 is d grad(logprobs)
    return kl.detach() + surrogate - surrogate.detach()
