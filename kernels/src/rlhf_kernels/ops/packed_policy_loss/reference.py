"""The plain torch twin of `packed_policy_loss`: the definition the fused kernel is tested against, and the CPU path.

It combines losses that return one number per token, neither masked nor reduced. N is the number of tokens. Log-probs
are in nats: `logprobs` belong to the current policy and carry the gradient; `old_logprobs` (the policy before the step)
and `advantages` are constants. Losses are in reward units.
"""

import math

import torch
from torch import Tensor

from rlhf_kernels.objective import PolicyObjective
from rlhf_kernels.ops.packed_policy_loss.terms import (
    MAX_KL,
    MAX_LOG_RATIO,
    MAX_WEIGHT,
    MIN_REST,
    VESPO_EXPONENTS,
    PolicyStream,
)


def packed_policy_loss_reference(
    logprobs: Tensor, entropy: Tensor | None, stream: PolicyStream, objective: PolicyObjective
) -> tuple[Tensor, Tensor]:
    """Return loss and metrics as `packed_policy_loss` does, in float32, or in float64 for float64 input."""

    def wide(column: Tensor | None) -> Tensor:
        column = torch.zeros_like(logprobs) if column is None else column
        # Mask before any arithmetic: a NaN in the forward pass gives a NaN gradient even with weight 0.
        return column.to(torch.promote_types(column.dtype, torch.float32)).masked_fill(~stream.loss_mask, 0.0)

    old = wide(logprobs if stream.old_logprobs is None else stream.old_logprobs).detach()
    weights = torch.ones_like(old) if stream.weights is None else wide(stream.weights).detach()
    trained = stream.loss_mask
    logprobs = wide(logprobs)
    advantages = wide(stream.advantages).detach()
    bonus = wide(entropy)

    if stream.own_loss is None and objective.uses_sequence_ratio:
        forms = {
            "gmpo": {"clipped_by": (advantages, objective.clip_low, objective.clip_high)},
            "vespo": {"is_mean": False},
        }
        ratio = sequence_ratio(logprobs, old, trained, stream.cu_seqlens, **forms.get(objective.policy_loss, {}))
    else:
        ratio = policy_ratio(logprobs, old)
    if stream.own_loss is not None:
        loss, clipped = stream.own_loss(logprobs), torch.zeros_like(trained)
    else:
        loss, clipped = _policy_term(logprobs, old, ratio, advantages, objective)
    if objective.mask_off_policy is not None:
        gap = old - logprobs.detach()  # 0.0 where nothing is trained
        left = leaves_policy(gap, advantages, trained, stream.cu_seqlens, limit=objective.mask_off_policy)
        loss = loss.masked_fill(left, 0.0)
        clipped = clipped | left
    if stream.penalties is not None:
        loss = loss + wide(stream.penalties) * _clamped(logprobs - old).abs()
    kl = torch.zeros_like(logprobs)
    if stream.ref_logprobs is not None:
        reference = wide(stream.ref_logprobs).detach()
        unbiased = objective.kl_unbiased_gradient
        kl = kl_loss(logprobs, old, reference, objective.kl_estimator, unbiased_gradient=unbiased)

    # A token's share of the loss: every reduction is a weighted sum over tokens.
    share = trained.to(old) / stream.denominator(objective)
    if objective.reduction == "seq_mean_token_mean":
        share = share / _totals(trained.to(old), stream.cu_seqlens).clamp(min=1)
    shares = [(share * term).sum() for term in (weights * loss, kl, bonus)]
    total = shares[0] + objective.kl_coef * shares[1] - objective.entropy_coef * shares[2]
    # The old policy wrote the tokens, so this estimates KL(old || current).
    kl_to_old = _k3(_clamped(old - logprobs))
    bounded = (kl_to_old >= MAX_KL) | ((kl >= MAX_KL) & (objective.kl_estimator == "k3"))
    sums = [(trained * x).sum() for x in (torch.ones_like(kl), clipped, ratio, kl_to_old, bounded)]
    return total, torch.stack([entry.to(total) for entry in (*shares, *sums)]).detach()


def policy_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Return exp(logprobs - old_logprobs), [N], exactly 1 where both agree.

    The log ratio is clamped to +-MAX_LOG_RATIO so that exp cannot overflow; beyond it the gradient is zero.
    """
    return torch.exp(_clamped(logprobs - old_logprobs))


def sequence_ratio(
    logprobs: Tensor,
    old_logprobs: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    *,
    clipped_by: tuple[Tensor, float, float] | None = None,
    is_mean: bool = True,
) -> Tensor:
    """Return for every token the geometric mean of the ratios of its sequence, with the gradient of that token alone.

        s_i = exp(mean_t(logprobs_t - old_logprobs_t)),   s_it = sg(s_i) exp(logprobs_t - sg(logprobs_t))

    sg stops the gradient.

    Args:
        logprobs, old_logprobs: [N] float.
        loss_mask: [N] bool, the tokens over which the mean is taken.
        cu_seqlens: [S + 1] integers, bounds of the sequences.
        clipped_by: advantages [N], clip_low and clip_high. Clips the ratio of a token in the direction that its
            advantage favours before the mean is taken (GMPO).
        is_mean: False multiplies the ratios (VESPO).

    Returns:
        [N] float, the same for all tokens of a sequence. Exactly 1 where both policies agree or nothing is trained.

    Source: Zheng et al. 2025, arXiv:2507.18071, eq. 7 and 14; GMPO: Zhao et al. 2025, arXiv:2507.20673.
    """
    gap = (logprobs.detach() - old_logprobs).masked_fill(~loss_mask, 0.0)
    if clipped_by is not None:
        advantages, low, high = clipped_by
        gap = torch.where(advantages > 0, gap.clamp(max=math.log1p(high)), gap.clamp(min=math.log1p(-low)))
    total = _totals(gap, cu_seqlens)
    if is_mean:
        total = total / _totals(loss_mask.to(gap), cu_seqlens).clamp(min=1)
    return torch.exp(_clamped(total)) * torch.exp(logprobs - logprobs.detach())


def clipped_policy_loss(
    ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> Tensor:
    """Return the clipped surrogate loss per token: PPO's with `policy_ratio`, GSPO's with `sequence_ratio`.

        loss_t = -min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t)

    With a dual clip c, the loss is at most -c A_t where A_t < 0. With one advantage per sequence and the reduction
    seq_mean_token_mean this is GSPO's objective; with advantages that differ by token it is GSPO-token.

    Args:
        ratio: [N] float, carries the gradient.
        advantages: [N] float.
        clip_low: largest decrease of the ratio below 1, in [0, 1). The GSPO paper uses 3e-4.
        clip_high: largest increase above 1, >= 0. The GSPO paper uses 4e-4.
        dual_clip: c > 1, or None for no bound.

    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7; unequal bounds: Yu et al. 2025, arXiv:2503.14476, sec. 3.1;
    dual clip: Ye et al. 2020, arXiv:1912.09729, eq. 5; GSPO: Zheng et al. 2025, arXiv:2507.18071, eq. 5 and sec. 4.3.
    """
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    if dual_clip is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)


def cispo_loss(logprobs: Tensor, ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float) -> Tensor:
    """Return CISPO's loss per token: REINFORCE with a clipped importance weight. No token loses its gradient.

        loss_t = -sg(clip(r_t, 1 - clip_low, 1 + clip_high)) A_t logprobs_t,   sg stops the gradient

    Only the gradient is meaningful; the value of the loss measures nothing.

    Args:
        logprobs, ratio, advantages: [N] float, the ratio from `policy_ratio`.
        clip_low, clip_high: as in `clipped_policy_loss`.

    Source: MiniMax 2025, arXiv:2506.13585, eq. 4 and 5.
    """
    return -ratio.detach().clamp(1 - clip_low, 1 + clip_high) * advantages * logprobs


def reinforce_loss(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """Return the plain policy-gradient loss per token, -A_t logprobs_t. Only its gradient is meaningful.

    Args:
        logprobs, advantages: [N] float.

    Source: Williams 1992, "Simple statistical gradient-following algorithms for connectionist reinforcement learning",
    Machine Learning 8.
    """
    return -advantages * logprobs


def sapo_loss(ratio: Tensor, advantages: Tensor, *, tau: tuple[float, float]) -> Tensor:
    """Return SAPO's loss per token: a soft gate in place of the clip.

        loss_t = -A_t (4 / tau) sigmoid(tau (r_t - 1)),   tau = tau[0] if A_t > 0 else tau[1]

    Its slope is that of REINFORCE at a ratio of 1, and falls smoothly as the ratio leaves 1 to either side.

    Args:
        ratio: [N] float, from `policy_ratio`, carries the gradient.
        advantages: [N] float.
        tau: temperatures, > 0; the higher, the sooner the gradient fades.

    Source: Gao et al. 2025, arXiv:2511.20347, eq. 5 and 6.
    """
    temperature = torch.where(advantages > 0, *(advantages.new_tensor(each) for each in tau))
    return -advantages * torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature


def leaves_trust_region(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, by_kl: bool, low: float, high: float
) -> Tensor:
    """Return a mask [N] of the tokens that DPPO leaves out: their probability has moved too far, as A_t favours.

        p_t > q_t and D_t > high where A_t > 0,   p_t < q_t and D_t > low where A_t < 0
        D_t = |p_t - q_t|                                                    TV
            = q_t log(q_t / p_t) + (1 - q_t) log((1 - q_t) / (1 - p_t))      KL

    p and q are the probabilities of the token under the current and the old policy. D is the divergence of the two
    policies when all other tokens count as one, a lower bound of that over the vocabulary.

    Args:
        logprobs, old_logprobs: [N] float, nats.
        advantages: [N] float.
        by_kl: KL in place of TV.
        low, high: largest divergence, >= 0, in probability or nats.

    Source: Qi et al. 2026, arXiv:2602.04879 (the binary approximation).
    """
    probs = logprobs.detach().exp()
    old_probs = old_logprobs.exp()
    divergence = (probs - old_probs).abs()
    if by_kl:
        rest, old_rest = ((1 - each).clamp(min=MIN_REST) for each in (probs, old_probs))
        divergence = old_probs * (old_logprobs - logprobs.detach()) + old_rest * (old_rest / rest).log()
    rises = (advantages > 0) & (probs > old_probs) & (divergence > high)
    return rises | ((advantages < 0) & (probs < old_probs) & (divergence > low))


def leaves_policy(gap: Tensor, advantages: Tensor, loss_mask: Tensor, cu_seqlens: Tensor, *, limit: float) -> Tensor:
    """Return a mask [N] of the tokens that the off-policy sequence mask leaves out: failures of another policy.

        A_t < 0 and mean_t(old_logprobs_t - logprobs_t) > limit, the mean over the trained tokens of the sequence

    Args:
        gap: [N] float, nats, old_logprobs - logprobs, and 0.0 where the mask is False.
        advantages: [N] float.
        loss_mask: [N] bool.
        cu_seqlens: [S + 1] integers, bounds of the sequences.
        limit: delta in the report, nats per token, >= 0.

    Source: DeepSeek-AI 2025 (DeepSeek-V3.2), arXiv:2512.02556.
    """
    means = _totals(gap, cu_seqlens) / _totals(loss_mask.to(gap), cu_seqlens).clamp(min=1)
    return (advantages < 0) & (means > limit)


def kimi_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, coef: float
) -> Tensor:
    """Return the loss of Kimi K2.5 per token: a clip that ignores the sign of A, and a squared log ratio.

        loss_t = -clip(r_t, 1 - clip_low, 1 + clip_high) A_t + coef (log r_t)^2

    Outside of the range the second term alone has a gradient, which brings the token back.

    Args:
        logprobs: [N] float, nats, carries the gradient.
        old_logprobs, advantages: [N] float.
        clip_low, clip_high: as in `clipped_policy_loss`.
        coef: tau in the report, reward units, >= 0.

    Source: Kimi Team 2026, arXiv:2602.02276, eq. 1.
    """
    clipped = policy_ratio(logprobs, old_logprobs).clamp(1 - clip_low, 1 + clip_high)
    return -clipped * advantages + coef * _clamped(logprobs - old_logprobs) ** 2


def topr_loss(logprobs: Tensor, ratio: Tensor, advantages: Tensor) -> Tensor:
    """Return TOPR's loss per token: REINFORCE whose negative part fades as the policy leaves the response.

        loss_t = -sg(w_i) A_t logprobs_t,   w_i = min(s_i, 1) where A_t < 0, else 1

    Only the gradient is meaningful.

    Args:
        logprobs, advantages: [N] float.
        ratio: [N] float, from `sequence_ratio`.

    Source: Le Roux et al. 2025, arXiv:2503.14286; the mean over the response as in verl's `topr`.
    """
    return -torch.where(advantages < 0, ratio.detach().clamp(max=1), 1) * advantages * logprobs


def vespo_loss(logprobs: Tensor, ratio: Tensor, advantages: Tensor) -> Tensor:
    """Return VESPO's loss per token: REINFORCE with a soft weight of the whole response.

        loss_t = -sg(W_i^c1 exp(c2 (1 - W_i))) A_t logprobs_t,   W_i = prod over the response of r_t

    c1 and c2 are `VESPO_EXPONENTS`, by the sign of A_t. Only the gradient is meaningful.

    Args:
        logprobs, advantages: [N] float.
        ratio: [N] float, W, from `sequence_ratio` with `is_mean=False`.

    Source: Shen et al. 2026, arXiv:2602.10693, eq. 20 and sec. 4.1.
    """
    weight = ratio.detach()
    positive, other = (torch.exp(c1 * weight.log() + c2 * (1 - weight)) for c1, c2 in VESPO_EXPONENTS)
    return -torch.where(advantages > 0, positive, other) * advantages * logprobs


def is_clipped(
    ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> Tensor:
    """Return a mask [N] of the tokens whose clipped surrogate is flat, so that their gradient is zero.

    That is where `ratio` [N] has left its range in the direction that `advantages` [N] favour, or where the loss has
    reached the dual clip. The bounds are those of `clipped_policy_loss`.
    """
    flat = ((ratio > 1 + clip_high) & (advantages > 0)) | ((ratio < 1 - clip_low) & (advantages < 0))
    return flat if dual_clip is None else flat | ((ratio > dual_clip) & (advantages < 0))


def kl_loss(
    logprobs: Tensor, old_logprobs: Tensor, ref_logprobs: Tensor, estimator: str, *, unbiased_gradient: bool = False
) -> Tensor:
    """Return an estimate of KL(policy || reference) per token, by default with the gradient of its formula.

        k1 = d,   k2 = d^2 / 2,   k3 = min(e^-d - 1 + d, MAX_KL),   d = logprobs - ref_logprobs

    At its bound k3 has no gradient. Apart from that, in expectation over tokens sampled by the policy itself, the
    gradient of the formula is 0 for k1, that of KL(policy || reference) for k2, and that of KL(reference || policy) for
    k3. The unbiased gradient is that of KL(policy || reference) for all three, for tokens sampled by the old policy:

        grad = w d grad logprobs,   w = exp(logprobs - old_logprobs), at most MAX_WEIGHT

    Args:
        logprobs: [N] float.
        old_logprobs, ref_logprobs: [N] float; constants.
        estimator: k1, k2 or k3.
        unbiased_gradient: use the unbiased gradient. The value stays that of the estimator.

    Returns:
        [N] float, nats, exactly 0 where policy and reference agree.

    Source: Schulman 2020, "Approximating KL divergence" (joschu.net/blog/kl-approx.html); gradients: Tang and Munos
    2025, "On a few pitfalls in KL divergence gradient estimation for RL", arXiv:2506.09477.
    """
    difference = _clamped(logprobs - ref_logprobs)
    squared = difference**2 / 2
    estimate = {"k1": difference, "k2": squared, "k3": _k3(difference)}[estimator]
    if not unbiased_gradient:
        return estimate
    weight = torch.exp((logprobs.detach() - old_logprobs).clamp(-MAX_LOG_RATIO, math.log(MAX_WEIGHT)))
    surrogate = weight * squared  # its gradient is weight * d * grad logprobs
    return estimate.detach() + surrogate - surrogate.detach()


def _policy_term(
    logprobs: Tensor, old: Tensor, ratio: Tensor, advantages: Tensor, objective: PolicyObjective
) -> tuple[Tensor, Tensor]:
    """Return the policy loss per token, and whether the clip has cut its gradient (for cispo: its weight)."""
    name = objective.policy_loss
    bounds = {"clip_low": objective.clip_low, "clip_high": objective.clip_high}
    outside = (ratio < 1 - objective.clip_low) | (ratio > 1 + objective.clip_high)
    if name == "cispo":
        return cispo_loss(logprobs, ratio, advantages, **bounds), outside
    if name == "kimi":
        return kimi_loss(logprobs, old, advantages, **bounds, coef=objective.log_ratio_coef), outside
    if name == "gmpo":
        flat = is_clipped(policy_ratio(logprobs, old).detach(), advantages, **bounds)
        return -torch.where(flat, ratio.detach(), ratio) * advantages, flat
    if name == "topr":
        return topr_loss(logprobs, ratio, advantages), (ratio > 1) & (advantages < 0)
    if name == "vespo":
        return vespo_loss(logprobs, ratio, advantages), torch.zeros_like(outside)
    if name == "sapo":
        return sapo_loss(ratio, advantages, tau=objective.sapo_tau), torch.zeros_like(outside)
    if name.startswith("dppo"):
        region = {"by_kl": name == "dppo_kl", "low": objective.clip_low, "high": objective.clip_high}
        left = leaves_trust_region(logprobs, old, advantages, **region)
        return (-ratio * advantages).masked_fill(left, 0.0), left
    bounds["dual_clip"] = objective.dual_clip
    flat = is_clipped(ratio, advantages, **bounds)
    if name == "reinforce":
        return reinforce_loss(logprobs, advantages), flat
    return clipped_policy_loss(ratio, advantages, **bounds), flat


def _totals(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return for every token the sum of `values` [N] over its sequence."""
    lengths = cu_seqlens.diff()
    sequence = torch.repeat_interleave(torch.arange(len(lengths), device=values.device), lengths)
    return values.new_zeros(len(lengths)).index_add(0, sequence, values)[sequence]


def _clamped(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _k3(difference: Tensor) -> Tensor:
    return (torch.expm1(-difference) + difference).clamp(max=MAX_KL)
