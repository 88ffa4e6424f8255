"""The terms of the actor's and the critic's loss put together, with the metrics that fall out of them."""

from collections.abc import Mapping

import torch
from torch import Tensor

from rlhf_train.algorithms import AlgorithmSpec
from rlhf_train.batching import Denominators
from rlhf_train.corrections import bounded_weights, importance_weights
from rlhf_train.experience import Experience
from rlhf_train.kl import kl_estimate, kl_loss
from rlhf_train.losses.aggregate import aggregate
from rlhf_train.losses.policy import (
    cispo_loss,
    clipped_policy_loss,
    gspo_loss,
    is_clipped,
    policy_ratio,
    reinforce_loss,
    sequence_ratio,
)
from rlhf_train.losses.value import clipped_value_loss
from rlhf_train.metrics import Max, Mean, Metric, Sum

MISMATCH_BOUNDS = (0.5, 2.0)  # of a token's importance weight, for the metric of a run that does not correct it


def masked_mean(values: Tensor, mask: Tensor) -> Mean:
    """Return the mean of `values` where `mask` holds, both [B, T], as a metric that does not wait for the device."""
    return Mean(torch.where(mask, values.detach(), 0).sum(dtype=torch.float64), mask.sum())


def policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, spec: AlgorithmSpec
) -> Tensor:
    """Return the policy loss of every token, [B, T], of the kind that `spec` names."""
    bounds = {"clip_low": spec.clip_low, "clip_high": spec.clip_high}
    if spec.policy_loss == "gspo":
        return gspo_loss(logprobs, old_logprobs, advantages, mask, **bounds)
    if spec.policy_loss == "cispo":
        return cispo_loss(logprobs, old_logprobs, advantages, **bounds)
    if spec.policy_loss == "reinforce":
        return reinforce_loss(logprobs, advantages)
    return clipped_policy_loss(logprobs, old_logprobs, advantages, **bounds, dual_clip=spec.dual_clip)


def actor_loss(
    outputs: Mapping[str, Tensor],
    mask: Tensor,
    inputs: Mapping[str, Tensor],
    spec: AlgorithmSpec,
    kl_coef: float,
    denominators: Denominators,
) -> tuple[Tensor, dict[str, Metric]]:
    """Return this micro-batch's share of the policy loss, the KL term and the entropy bonus, and its metrics: of a loss
    the share, a `Sum`.

    Args:
        outputs: logprobs and entropy, [B, T] float, nats; carry the gradient.
        mask: [B, T] bool.
        inputs: advantages; old_logprobs unless they are skipped; with use_kl_loss ref_logprobs; with a correction
            weights; [B, T] each.
        spec: the algorithm.
        kl_coef: weight of the KL term.
        denominators: of the optimizer step.
    """
    logprobs, reduction = outputs["logprobs"], spec.loss_reduction
    old_logprobs = inputs.get("old_logprobs", logprobs.detach())
    token_loss = policy_loss(logprobs, old_logprobs, inputs["advantages"], mask, spec)
    if "weights" in inputs:
        token_loss = inputs["weights"] * token_loss
    loss = aggregate(token_loss, mask, reduction, denominators)
    metrics: dict[str, Metric] = {"policy/loss": Sum(loss.detach())}
    if spec.use_kl_loss:
        unbiased = spec.kl_unbiased_gradient
        kl = kl_loss(logprobs, old_logprobs, inputs["ref_logprobs"], spec.kl_estimator, unbiased_gradient=unbiased)
        kl_term = aggregate(kl, mask, reduction, denominators)
        metrics["kl/loss"] = Sum(kl_term.detach())
        loss = loss + kl_coef * kl_term
    if spec.entropy_coef:
        bonus = aggregate(outputs["entropy"], mask, reduction, denominators)
        metrics["entropy/loss"] = Sum(-bonus.detach())
        loss = loss - spec.entropy_coef * bonus
    with torch.no_grad():
        metrics |= _ratio_metrics(logprobs, old_logprobs, inputs["advantages"], mask, spec)
    return loss, metrics


def _ratio_metrics(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, spec: AlgorithmSpec
) -> dict[str, Metric]:
    if spec.policy_loss == "gspo":
        ratio = sequence_ratio(logprobs, old_logprobs, mask)
    else:
        ratio = policy_ratio(logprobs, old_logprobs)
    metrics: dict[str, Metric] = {
        "policy/ratio": masked_mean(ratio, mask),
        "policy/kl_to_old": masked_mean(kl_estimate(logprobs, old_logprobs, "k3"), mask),
    }
    if spec.policy_loss == "cispo":
        clipped = (ratio < 1 - spec.clip_low) | (ratio > 1 + spec.clip_high)
    else:
        clipped = is_clipped(ratio, advantages, clip_low=spec.clip_low, clip_high=spec.clip_high)
        if spec.dual_clip is not None:
            clipped |= (advantages < 0) & (ratio > spec.dual_clip)
    if spec.loss.uses_ratio:
        metrics["policy/clip_fraction"] = masked_mean(clipped, mask)
    return metrics


def critic_loss(
    values: Tensor, mask: Tensor, inputs: Mapping[str, Tensor], spec: AlgorithmSpec, denominators: Denominators
) -> tuple[Tensor, dict[str, Metric]]:
    """Return this micro-batch's share of the value loss, and its metrics: of `values` [B, T] float, which carry the
    gradient, where `mask` [B, T] bool holds. `inputs` are the values before the step and the returns, [B, T] each."""
    token_loss = clipped_value_loss(values, inputs["values"], inputs["returns"], value_clip=spec.value_clip)
    loss = aggregate(token_loss, mask, "token_mean", denominators)
    return loss, {"value/loss": Sum(loss.detach()), "value/mean": masked_mean(values, mask)}


def drop_nonfinite(experience: Experience) -> dict[str, Metric]:
    """Leave what has a log-prob that is not finite out of training; return the number of tokens.

    That is the token itself when the number is the engine's. It is the whole rollout when it is a model's of ours, for
    then a gradient through any of its tokens would not be finite either.
    """
    finite = experience.rollout_logprobs.isfinite()
    for name in ("old_logprobs", "ref_logprobs"):
        if name in experience.columns:
            finite &= (experience.columns[name].isfinite() | ~experience.loss_mask).all(dim=1, keepdim=True)
    dropped = Sum(float((experience.loss_mask & ~finite).sum()))
    experience.restrict(finite)
    return {"samples/nonfinite_tokens": dropped}


def correct_mismatch(experience: Experience, spec: AlgorithmSpec) -> dict[str, Metric]:
    """Measure how far the trainer's log-probs are from the engine's, and correct for it when `spec` says so.

    Fills in the column `weights` and shrinks the policy mask. Metrics, over the tokens that are trained: mean and
    maximum of the absolute gap in nats, the k3 estimate of KL(engine || trainer), and the share of importance weights
    beyond the bounds (of the correction, else `MISMATCH_BOUNDS` a token).
    """
    mask, old_logprobs = experience.loss_mask, experience.columns["old_logprobs"]
    metrics = mismatch_metrics(old_logprobs, experience.rollout_logprobs, mask)
    correction = spec.correction
    if correction.level == "off":
        return metrics
    weights = importance_weights(old_logprobs, experience.rollout_logprobs, mask, level=correction.level)
    weights, kept, outside = bounded_weights(
        weights, mask, mode=correction.mode, low=correction.low, high=correction.high
    )
    experience.policy_mask &= kept
    experience.set_column("weights", weights)
    metrics["mismatch/out_of_bounds"] = masked_mean(outside, mask)
    metrics["mismatch/weight"] = masked_mean(weights, kept)
    return metrics


def mismatch_metrics(logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> dict[str, Metric]:
    """Return the metrics of `correct_mismatch` for a run without correction, from the trainer's and the engine's
    log-probs, both [B, T] float, nats, where `mask` [B, T] bool holds."""
    gap = (logprobs - rollout_logprobs).abs()
    weights = importance_weights(logprobs, rollout_logprobs, mask, level="token")
    low, high = MISMATCH_BOUNDS
    _, _, outside = bounded_weights(weights, mask, mode="truncate", low=low, high=high)
    return {
        "mismatch/logprob_gap_mean": masked_mean(gap, mask),
        "mismatch/logprob_gap_max": Max(float(gap[mask].max()) if mask.any() else 0.0),
        "mismatch/kl": masked_mean(kl_estimate(rollout_logprobs, logprobs, "k3"), mask),
        "mismatch/out_of_bounds": masked_mean(outside, mask),
    }
