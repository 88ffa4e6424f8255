"""The losses of an update as metrics, and the critic's loss with its own."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rlhf_kernels import POLICY_METRICS
from rlhf_train.algorithms.kl import BOUNDS
from rlhf_train.algorithms.table import AlgorithmSpec
from rlhf_train.batching import Denominators
from rlhf_train.engine.protocol import StepStats
from rlhf_train.losses.aggregate import token_mean
from rlhf_train.losses.value import clipped_value_loss
from rlhf_train.run.metrics import METRIC_PREFIXES, Max, Mean, Metric, Sum, merge_metrics


def masked_mean(values: Tensor, mask: Tensor) -> Mean:
    """Return the mean of `values` where `mask` is True, as a metric that stays on the device.

    Reading the number here would wait for the GPU in every micro-batch. Both tensors have the same shape.
    """
    return Mean(torch.where(mask, values.detach(), 0).sum(dtype=torch.float64), mask.sum())


def teacher_metrics(kl: Tensor, mask: Tensor, sources: Sequence[str]) -> dict[str, Metric]:
    """Return the mean divergence from the teacher in nats, of all tokens and of those of each data source.

    Args:
        kl: [N] float, of the tokens where the mask is True, row by row.
        mask: [B, T] bool, in host memory.
        sources: the data source of each row; empty for no metrics by source.
    """
    found = {"kl/teacher": kl}
    rows = kl.split(mask.sum(dim=1).tolist())
    for source in sorted(set(sources)):
        own = [row for row, name in zip(rows, sources, strict=True) if name == source]
        found[f"kl/teacher/{source}"] = torch.cat(own)
    return {name: Mean(values.sum(dtype=torch.float64), len(values)) for name, values in found.items()}


def critic_loss(
    values: Tensor, mask: Tensor, inputs: Mapping[str, Tensor], spec: AlgorithmSpec, denominators: Denominators
) -> tuple[Tensor, dict[str, Metric]]:
    """Return this micro-batch's share of the update's value loss, and metrics.

    Args:
        values: [B, T] float, from the current critic; carry the gradient.
        mask: [B, T] bool.
        inputs: "values" from the critic before the step's first update, and "returns", [B, T] float each.
        spec: has the clip range.
        denominators: of the whole update.
    """
    token_loss = clipped_value_loss(values, inputs["values"], inputs["returns"], value_clip=spec.value_clip)
    loss = token_mean(token_loss, mask, denominators)
    return loss, {"value/loss": Sum(loss.detach()), "value/mean": masked_mean(values, mask)}


def draft_loss(logprobs: Tensor, mask: Tensor, denominators: Denominators) -> tuple[Tensor, dict[str, Metric]]:
    """Return this micro-batch's share of the update's loss of a draft model, and metrics.

    It is the cross-entropy of the policy's samples, mean over tokens. In expectation over samples of the policy p, it
    is KL(p || draft) plus the entropy of p, on which the draft model has no influence: its gradient is that of the
    forward KL (Online Speculative Decoding, arXiv:2310.07177). Where a token was sampled by older weights, p is theirs.

    Args:
        logprobs: [B, T] float, nats, of the rollouts' tokens from the draft model; carry the gradient.
        mask: [B, T] bool, tokens that the policy sampled.
        denominators: of the whole update.
    """
    loss = token_mean(-logprobs, mask, denominators)
    return loss, {"draft/loss": Sum(loss.detach())}


def policy_metrics(sums: Tensor, spec: AlgorithmSpec, own: Mapping[str, Tensor] | None = None) -> dict[str, Metric]:
    """Return the metrics of a micro-batch from the sums of `packed_policy_loss`, [8] float, named by `POLICY_METRICS`.

    The loss metrics are the micro-batch's shares of the update's losses. `own` are those of a user's policy loss, [N]
    float of the trained tokens each, of which the means are logged.
    """
    sums_by_name = dict(zip(POLICY_METRICS, sums.double().unbind(), strict=True))
    metrics: dict[str, Metric] = {"policy/loss": Sum(sums_by_name["policy_loss"])}
    if spec.use_kl_loss:
        metrics["kl/loss"] = Sum(sums_by_name["kl_loss"])
    if spec.objective.entropy_coef or spec.entropy.target is not None:
        metrics["entropy/loss"] = Sum(-sums_by_name["entropy_bonus"])
    if spec.loss.uses_ratio and spec.own_policy_loss is None:
        metrics["policy/clip_fraction"] = Mean(sums_by_name["clipped"], sums_by_name["tokens"])
    for name, entry in (("ratio", "ratio"), ("kl_to_old", "kl_to_old"), ("kl_bounded_fraction", "kl_bounded")):
        metrics[f"policy/{name}"] = Mean(sums_by_name[entry], sums_by_name["tokens"])
    for name, values in (own or {}).items():
        metrics[f"policy/{name}"] = masked_mean(values, torch.ones_like(values, dtype=torch.bool))
    return metrics


def reference_kl_metrics(kl: Tensor, mask: Tensor, estimator: str) -> dict[str, Metric]:
    """Return the mean of KL estimates where `mask`, of the same shape, is True, and the share of those at the bound."""
    return {
        "kl/reference": masked_mean(kl, mask),
        "kl/bounded_fraction": masked_mean((kl.detach().abs() >= BOUNDS[estimator]).float(), mask),
    }


def update_metrics(
    role: str, parts: Sequence[Mapping[str, Metric]], stats: StepStats, *, num_rollouts: int, num_shards: int
) -> dict[str, Metric]:
    """Return the metrics of one update of `role` on one shard.

    An update of the draft model is skipped if its gradient is not finite. It then has neither losses nor a norm.

    Args:
        role: "actor", "critic" or "draft".
        parts: of the shard's micro-batches.
        stats: of the optimizer.
        num_rollouts: of the shard, trained or not.
        num_shards: of the update.
    """
    name = METRIC_PREFIXES[role]
    common = {f"{name}/learning_rate": Max(stats.learning_rate), f"{name}/rollout_passes": Sum(num_rollouts)}
    if role == "draft":
        is_skipped = not math.isfinite(stats.grad_norm)
        common["draft/skipped_updates"] = Sum(is_skipped / num_shards)
        if is_skipped:
            return common
    merged = merge_metrics(parts)
    # Losses are shares: their sum over micro-batches and shards is the loss of this update. With a count of
    # 1 / num_shards per shard, merging the shards divides by the number of updates.
    losses = {key: Mean(part.value, 1 / num_shards) for key, part in merged.items() if isinstance(part, Sum)}
    return {**merged, **losses, f"{name}/grad_norm": Mean(stats.grad_norm, 1), **common}
