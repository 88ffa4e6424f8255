"""What the actor's loss is told of an algorithm and a shard, the critic's loss, and the metrics of both."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rlhf_kernels import POLICY_METRICS, PolicyStream
from rlhf_models.batch import to_device
from rlhf_train.algorithms import AlgorithmSpec
from rlhf_train.batching import Denominators
from rlhf_train.corrections import bounded_weights, importance_weights
from rlhf_train.experience import Experience
from rlhf_train.kl import kl_estimate
from rlhf_train.losses.aggregate import token_mean
from rlhf_train.losses.value import clipped_value_loss
from rlhf_train.run.metrics import Max, Mean, Metric, Sum

MISMATCH_BOUNDS = (0.5, 2.0)  # of a token's importance weight, for the metric of a run that does not correct it


def masked_mean(values: Tensor, mask: Tensor) -> Mean:
    """Return the mean of `values` where `mask` holds, of one shape, as a metric that does not wait for the device."""
    return Mean(torch.where(mask, values.detach(), 0).sum(dtype=torch.float64), mask.sum())


def policy_stream(
    experience: Experience,
    rows: Sequence[int],
    spec: AlgorithmSpec,
    denominators: Denominators,
    device: torch.device | str,
) -> PolicyStream:
    """Return the constants of the tokens that the policy loss sees, for `rows` of a shard, one row after the other.

    `denominators` are those of the whole update.
    """
    mask = experience.policy_mask[list(rows)]
    lengths = mask.sum(dim=1)
    names = ["advantages", "old_logprobs", "weights", *(["ref_logprobs"] if spec.use_kl_loss else [])]
    columns = {name: experience.columns[name] for name in names if name in experience.columns}
    return PolicyStream(
        **{name: to_device(column[list(rows)][mask], device) for name, column in columns.items()},
        loss_mask=torch.ones(int(lengths.sum()), dtype=torch.bool, device=device),
        cu_seqlens=to_device(torch.nn.functional.pad(lengths.cumsum(0), (1, 0)), device),
        num_tokens=denominators.num_tokens,
        num_sequences=denominators.num_sequences,
        max_tokens=denominators.max_tokens,
    )


def policy_metrics(sums: Tensor, spec: AlgorithmSpec) -> dict[str, Metric]:
    """Return the metrics of a micro-batch from those of `packed_policy_loss`, [7] float. A loss is the share of it."""
    of = dict(zip(POLICY_METRICS, sums.double().unbind(), strict=True))
    metrics: dict[str, Metric] = {"policy/loss": Sum(of["policy_loss"])}
    if spec.use_kl_loss:
        metrics["kl/loss"] = Sum(of["kl_loss"])
    if spec.objective.entropy_coef:
        metrics["entropy/loss"] = Sum(-of["entropy_bonus"])
    for name, entry in (("ratio", "ratio"), ("kl_to_old", "kl_to_old"), ("clip_fraction", "clipped")):
        if name != "clip_fraction" or spec.loss.uses_ratio:
            metrics[f"policy/{name}"] = Mean(of[entry], of["tokens"])
    return metrics


def critic_loss(
    values: Tensor, mask: Tensor, inputs: Mapping[str, Tensor], spec: AlgorithmSpec, denominators: Denominators
) -> tuple[Tensor, dict[str, Metric]]:
    """Return this micro-batch's share of the value loss, and its metrics: of `values` [B, T] float, which carry the
    gradient, where `mask` [B, T] bool holds. `inputs` are the values before the step and the returns, [B, T] each."""
    token_loss = clipped_value_loss(values, inputs["values"], inputs["returns"], value_clip=spec.value_clip)
    loss = token_mean(token_loss, mask, denominators)
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


def staleness_metrics(experience: Experience, policy_version: int) -> dict[str, Metric]:
    """Return mean and maximum of the updates between the policy that wrote a trained token and `policy_version`."""
    mask = experience.loss_mask
    staleness = policy_version - experience.policy_versions
    return {
        "policy/staleness": masked_mean(staleness, mask),
        "policy/staleness_max": Max(float(staleness[mask].max()) if mask.any() else 0.0),
    }


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
    log-probs, both float of one shape, nats, where `mask` holds."""
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
