"""The terms of the actor's and the critic's loss put together, with the metrics that fall out of them."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rlhf_train.algorithms import AlgorithmSpec
from rlhf_train.batching import Denominators
from rlhf_train.experience import Experience
from rlhf_train.kl import kl_estimate
from rlhf_train.losses.aggregate import aggregate
from rlhf_train.losses.policy import clipped_policy_loss, is_clipped, policy_ratio
from rlhf_train.losses.value import clipped_value_loss
from rlhf_train.metrics import Max, Mean, Metric


def share(loss: Tensor) -> Mean:
    """Return a micro-batch's share of a loss as a metric: shares add up to what `optimizer_steps` counts."""
    return Mean(loss.item(), 0.0)


def optimizer_steps(names: Sequence[str], num_ranks: int) -> dict[str, Metric]:
    """Return one rank's part in counting one optimizer step for the losses `names`."""
    return {name: Mean(0.0, 1.0 / num_ranks) for name in names}


def actor_loss(
    logprobs: Tensor, mask: Tensor, inputs: Mapping[str, Tensor], spec: AlgorithmSpec, denominators: Denominators
) -> tuple[Tensor, dict[str, Metric]]:
    """Return this micro-batch's share of the policy loss plus KL term, and its metrics.

    Args:
        logprobs: [B, T] float, nats; carries the gradient.
        mask: [B, T] bool.
        inputs: old_logprobs, advantages and, with use_kl_loss, ref_logprobs; [B, T] each.
        spec: the algorithm.
        denominators: of the optimizer step.
    """
    old_logprobs, advantages = inputs["old_logprobs"], inputs["advantages"]
    token_loss = clipped_policy_loss(
        logprobs, old_logprobs, advantages, clip_low=spec.clip_low, clip_high=spec.clip_high
    )
    loss = aggregate(token_loss, mask, spec.row.reduction, denominators)
    metrics: dict[str, Metric] = {"policy/loss": share(loss)}
    if spec.use_kl_loss:
        kl = kl_estimate(logprobs, inputs["ref_logprobs"], spec.kl_estimator)
        kl_loss = aggregate(kl, mask, spec.row.reduction, denominators)
        metrics["kl/loss"] = share(kl_loss)
        loss = loss + spec.kl_coef * kl_loss
    with torch.no_grad():
        ratio = policy_ratio(logprobs, old_logprobs)
        clipped = is_clipped(ratio, advantages, clip_low=spec.clip_low, clip_high=spec.clip_high)
        count = float(mask.sum())
        metrics["policy/clip_fraction"] = Mean(float((clipped & mask).sum()), count)
        metrics["policy/ratio"] = Mean(float(ratio[mask].sum()), count)
        metrics["policy/kl_to_old"] = Mean(float(kl_estimate(logprobs, old_logprobs, "k3")[mask].sum()), count)
    return loss, metrics


def critic_loss(
    values: Tensor, mask: Tensor, inputs: Mapping[str, Tensor], spec: AlgorithmSpec, denominators: Denominators
) -> tuple[Tensor, dict[str, Metric]]:
    """Return this micro-batch's share of the value loss, and its metrics.

    Args:
        values: [B, T] float; carries the gradient.
        mask: [B, T] bool.
        inputs: values (before the step) and returns; [B, T] each.
        spec: the algorithm.
        denominators: of the optimizer step.
    """
    token_loss = clipped_value_loss(values, inputs["values"], inputs["returns"], value_clip=spec.value_clip)
    loss = aggregate(token_loss, mask, "token_mean", denominators)
    with torch.no_grad():
        mean = Mean(float(values[mask].sum()), float(mask.sum()))
    return loss, {"value/loss": share(loss), "value/mean": mean}


def mismatch_metrics(experience: Experience) -> dict[str, Metric]:
    """Return how far the trainer's log-probs are from the engine's, on the tokens that are trained: mean and maximum of
    the absolute gap in nats, and the k3 estimate of KL(engine || trainer)."""
    mask = experience.loss_mask
    gap = (experience.columns["old_logprobs"] - experience.rollout_logprobs)[mask]
    count = float(gap.numel())
    kl = kl_estimate(experience.rollout_logprobs, experience.columns["old_logprobs"], "k3")[mask]
    return {
        "mismatch/logprob_gap_mean": Mean(float(gap.abs().sum()), count),
        "mismatch/logprob_gap_max": Max(float(gap.abs().max()) if count else 0.0),
        "mismatch/kl": Mean(float(kl.sum()), count),
    }
