"""What a rank computes on its shard between the models and the losses, and the metrics of both."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlhf_kernels import POLICY_METRICS
from rlhf_models.batch import TokenBatch
from rlhf_train.algorithms.correction import bounded_weights, importance_weights
from rlhf_train.algorithms.gae import distilled_advantages, last_trained, placed_rewards, token_rewards
from rlhf_train.algorithms.kl import BOUNDS, kl_estimate
from rlhf_train.algorithms.table import AlgorithmSpec
from rlhf_train.batching import Denominators, MiniBatch
from rlhf_train.engine.protocol import StepStats
from rlhf_train.learning.experience import MODEL_COLUMNS, Experience
from rlhf_train.losses.aggregate import token_mean
from rlhf_train.losses.value import clipped_value_loss
from rlhf_train.run.metrics import METRIC_PREFIXES, Max, Mean, Metric, Sum, merge_metrics
from rlhf_train.specs import ModelSpec

# Bounds of a token's importance weight for the metric mismatch/out_of_bounds, when no correction sets bounds.
MISMATCH_BOUNDS = (0.5, 2.0)
# The input of a rank without rows, which must run a pass because collectives need every rank. It has two tokens,
# because the first token of a sequence has no log-prob.
IDLE_TOKENS = np.zeros(2, np.int32)


def masked_mean(values: Tensor, mask: Tensor) -> Mean:
    """Return the mean of `values` where `mask` is True, as a metric that stays on the device.

    Reading the number here would wait for the GPU in every micro-batch. Both tensors have the same shape.
    """
    return Mean(torch.where(mask, values.detach(), 0).sum(dtype=torch.float64), mask.sum())


def token_batch(
    experience: Experience, rows: Sequence[int], device: torch.device | str, spec: ModelSpec, *, with_routes: bool
) -> TokenBatch:
    """Return rows of a shard as a batch on the device, laid out for a model; `IDLE_TOKENS` if there are no rows.

    `with_routes` adds the experts of the tokens, if the experience has them.
    """
    tokens = [experience.token_ids[row] for row in rows] or [IDLE_TOKENS]
    if spec.packing:
        prompts = [experience.prompt_lengths[row] for row in rows] or [len(IDLE_TOKENS)]
        batch = TokenBatch.packed(tokens, device, prompt_lengths=prompts if spec.share_prompts else None)
    else:
        batch = TokenBatch.padded(tokens, pad_id=0, device=device)
    if not (rows and with_routes) or experience.routes is None:
        return batch
    return batch.routed([experience.routes[row] for row in rows])


def lay_out(mask: Tensor, rows: Sequence[int], batch: TokenBatch) -> Tensor:
    """Return a shard's mask [B, T] bool in the layout of `batch`, which holds `rows`, on the CPU.

    Without rows it is all False.
    """
    parts = [mask[row, :length].numpy() for row, length in zip(rows, batch.lengths, strict=bool(rows))]
    return batch.lay_out(parts or [np.zeros_like(IDLE_TOKENS, bool)], torch.bool, device="cpu")


def recounted(mini_batches: Sequence[MiniBatch], trained_mask: Tensor, device: torch.device | str) -> list[MiniBatch]:
    """Return mini-batches with denominators that leave out what was dropped or masked. Collective.

    Args:
        mini_batches: this rank's parts.
        trained_mask: [B, T] bool, the tokens of the shard that are still trained. False if another rank counts them.
        device: of the collective.
    """
    lengths = trained_mask.sum(dim=1)
    local_counts = []
    for batch in mini_batches:
        rows = list(chain.from_iterable(batch.micro_batches))
        local_counts.append([int(lengths[rows].sum()), int((lengths[rows] > 0).sum())])
    counts = torch.tensor(local_counts, dtype=torch.int64, device=device)
    torch.distributed.all_reduce(counts)
    return [
        replace(batch, denominators=Denominators(tokens, sequences, batch.denominators.max_tokens))
        for batch, (tokens, sequences) in zip(mini_batches, counts.tolist(), strict=True)
    ]


def policy_metrics(sums: Tensor, spec: AlgorithmSpec) -> dict[str, Metric]:
    """Return the metrics of a micro-batch from the sums of `packed_policy_loss`, [8] float, named by `POLICY_METRICS`.

    The loss metrics are the micro-batch's shares of the update's losses.
    """
    sums_by_name = dict(zip(POLICY_METRICS, sums.double().unbind(), strict=True))
    metrics: dict[str, Metric] = {"policy/loss": Sum(sums_by_name["policy_loss"])}
    if spec.use_kl_loss:
        metrics["kl/loss"] = Sum(sums_by_name["kl_loss"])
    if spec.objective.entropy_coef:
        metrics["entropy/loss"] = Sum(-sums_by_name["entropy_bonus"])
    if spec.loss.uses_ratio:
        metrics["policy/clip_fraction"] = Mean(sums_by_name["clipped"], sums_by_name["tokens"])
    for name, entry in (("ratio", "ratio"), ("kl_to_old", "kl_to_old"), ("kl_bounded_fraction", "kl_bounded")):
        metrics[f"policy/{name}"] = Mean(sums_by_name[entry], sums_by_name["tokens"])
    return metrics


def update_metrics(
    role: str, parts: Sequence[Mapping[str, Metric]], stats: StepStats, *, num_rollouts: int, num_shards: int
) -> dict[str, Metric]:
    """Return the metrics of one update of `role` on one shard.

    Args:
        role: "actor" or "critic".
        parts: of the shard's micro-batches.
        stats: of the optimizer.
        num_rollouts: of the shard, trained or not.
        num_shards: of the update.
    """
    merged = merge_metrics(parts)
    # Losses are shares: their sum over micro-batches and shards is the loss of this update. With a count of
    # 1 / num_shards per shard, merging the shards divides by the number of updates.
    losses = {key: Mean(part.value, 1 / num_shards) for key, part in merged.items() if isinstance(part, Sum)}
    name = METRIC_PREFIXES[role]
    return {
        **merged,
        **losses,
        f"{name}/grad_norm": Mean(stats.grad_norm, 1),
        f"{name}/learning_rate": Max(stats.learning_rate),
        f"{name}/rollout_passes": Sum(num_rollouts),
    }


def reference_kl_metrics(kl: Tensor, mask: Tensor, estimator: str) -> dict[str, Metric]:
    """Return the mean of KL estimates where `mask`, of the same shape, is True, and the share of those at the bound."""
    return {
        "kl/reference": masked_mean(kl, mask),
        "kl/bounded_fraction": masked_mean((kl.detach().abs() >= BOUNDS[estimator]).float(), mask),
    }


def charged_rewards(experience: Experience, spec: AlgorithmSpec, *, kl_coef: float) -> tuple[Tensor, dict[str, Metric]]:
    """Return the rewards of tokens, [B, T] float, minus the KL penalty, and the metrics of the KL to the reference.

    There is no penalty without a reference, nor when the KL is a term of the loss instead.
    """
    mask = experience.loss_mask
    columns = experience.columns
    rewards = placed_rewards(experience.rewards, experience.token_rewards, mask)
    if not spec.uses_reference or "old_logprobs" not in columns:
        return rewards, {}
    kl = kl_estimate(columns["old_logprobs"], columns["ref_logprobs"], spec.objective.kl_estimator)
    rewards = token_rewards(rewards, kl, mask, kl_coef=0.0 if spec.use_kl_loss else kl_coef)
    return rewards, reference_kl_metrics(kl, mask, spec.objective.kl_estimator)


def distilled(advantages: Tensor, experience: Experience, spec: AlgorithmSpec) -> tuple[Tensor, dict[str, Metric]]:
    """Return the advantages with the teacher's term, [B, T] float, and the mean reverse KL to the teacher in nats.

    Without a teacher the advantages are unchanged.
    """
    if not spec.uses_teacher:
        return advantages, {}
    columns = experience.columns
    reverse_kl = kl_estimate(columns["old_logprobs"], columns["teacher_logprobs"], "k1")
    advantages = distilled_advantages(advantages, reverse_kl, experience.loss_mask, teacher_coef=spec.teacher_coef)
    return advantages, {"kl/teacher": masked_mean(reverse_kl, experience.loss_mask)}


def values_before(after: Sequence[Tensor], truncated: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Turn values after each token into values before each token, and into `last_values` of truncated rollouts.

    Args:
        after: per rollout, [L_i] float, the value of the state after each token.
        truncated: [B] bool, whether the length limit ended the rollout.
        mask: [B, T] bool, the loss mask.

    Returns:
        "values" and "last_values", [B, T] float each. The latter is 0.0 except at the last trained token of truncated
        rollouts.
    """
    before = pad_sequence([torch.cat([row.new_zeros(1), row[:-1]]) for row in after], batch_first=True)
    last = torch.stack([row[-1] for row in after])
    return {"values": before, "last_values": last_trained(mask) * (last * truncated)[:, None]}


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


def drop_nonfinite(experience: Experience) -> dict[str, Metric]:
    """Exclude tokens with NaN or infinite log-probs or values from training; return their number as a metric.

    For a log-prob of the engine, the token is excluded. For a log-prob of the trainer's model, the reference or the
    teacher, or a value of the critic, the whole rollout is excluded: the gradient through any of its tokens would not
    be finite either, and one value decides the advantages of all tokens before it.
    """
    finite = experience.rollout_logprobs.isfinite()
    for name in (*MODEL_COLUMNS.values(), "last_values"):
        if name in experience.columns:
            finite &= (experience.columns[name].isfinite() | ~experience.loss_mask).all(dim=1, keepdim=True)
    dropped = Sum(float((experience.loss_mask & ~finite).sum()))
    experience.restrict(finite)
    return {"samples/nonfinite_tokens": dropped}


def limit_staleness(
    experience: Experience, step_versions: Sequence[int], mask_stale: int | None = None
) -> dict[str, Metric]:
    """Measure how stale tokens are, and leave those out of the policy mask that are too stale.

    Args:
        experience: the rank's shard.
        step_versions: versions of the weights at the start of the last training steps, ascending, this step's last.
        mask_stale: staleness in training steps beyond which tokens are left out; None for no limit.

    Returns:
        Mean and maximum staleness of trained tokens: in updates (`policy/staleness`), and in training steps
        (`async/staleness_steps`), where a token is as many steps old as `step_versions` has newer versions. The share
        of rollouts with tokens of several versions, and with `mask_stale` the number of tokens that are left out.
    """
    mask = experience.loss_mask
    versions = experience.policy_versions
    starts = torch.tensor(step_versions, dtype=versions.dtype)
    steps = len(starts) - torch.searchsorted(starts, versions, right=True)
    metrics: dict[str, Metric] = {}
    for name, staleness in (("policy/staleness", starts[-1] - versions), ("async/staleness_steps", steps)):
        metrics[name] = masked_mean(staleness, mask)
        metrics[f"{name}_max"] = Max(float(staleness[mask].max()) if mask.any() else 0.0)
    is_older = mask & (versions < versions.amax(dim=1, keepdim=True))
    metrics["async/mixed_version_rollouts"] = masked_mean(is_older.any(dim=1), mask.any(dim=1))
    if mask_stale is not None:
        is_stale = steps > mask_stale
        metrics["samples/stale_tokens"] = Sum(float((mask & is_stale).sum()))
        experience.policy_mask &= ~is_stale
    return metrics


def correct_mismatch(experience: Experience, spec: AlgorithmSpec) -> dict[str, Metric]:
    """Measure the gap between the trainer's and the engine's log-probs, and correct for it as `spec` says.

    A correction sets the column `weights`: importance weights, or ones where the policy ratio weighs already
    (`AlgorithmSpec.weighs`). Mode "mask" sets those out of bounds to 0.0, or with `drops_masked` removes the tokens
    from the policy mask. The column `old_logprobs` has the trainer's. Metrics, over the trained
    tokens: mean and maximum of the absolute gap in nats, the k3 estimate of KL(engine || trainer), and the
    share of importance weights out of bounds (those of the correction; without one, `MISMATCH_BOUNDS` per token).
    """
    mask = experience.loss_mask
    old_logprobs = experience.columns["old_logprobs"]
    metrics = mismatch_metrics(old_logprobs, experience.rollout_logprobs, mask)
    correction = spec.correction
    if correction.level == "off":
        return metrics
    weights = importance_weights(old_logprobs, experience.rollout_logprobs, mask, level=correction.level)
    weights, kept, outside = bounded_weights(
        weights, mask, mode=correction.mode, low=correction.low, high=correction.high
    )
    column = weights if spec.weighs else torch.ones_like(weights)
    if correction.drops_masked:
        experience.policy_mask &= kept
    else:
        column = column.masked_fill(~kept, 0.0)
    if spec.weighs or not correction.drops_masked:
        experience.set_column("weights", column)
    metrics["mismatch/out_of_bounds"] = masked_mean(outside, mask)
    metrics["mismatch/weight"] = masked_mean(weights, kept)
    return metrics


def mismatch_metrics(logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> dict[str, Metric]:
    """Return the metrics of `correct_mismatch` for a run without correction.

    Args:
        logprobs, rollout_logprobs: float, same shape, nats, from the trainer and from the engine.
        mask: bool, same shape, the tokens to measure.
    """
    gap = (logprobs - rollout_logprobs).abs()
    weights = importance_weights(logprobs, rollout_logprobs, mask, level="token")
    low, high = MISMATCH_BOUNDS
    _, _, outside = bounded_weights(weights, mask, mode="truncate", low=low, high=high)
    return {
        "mismatch/logprob_gap_mean": masked_mean(gap, mask),
        # A zero beside them: there may be no tokens. Reading the number here would wait for the device.
        "mismatch/logprob_gap_max": Max(torch.cat([gap.new_zeros(1), gap.masked_fill(~mask, 0.0).flatten()]).max()),
        "mismatch/kl": masked_mean(kl_estimate(rollout_logprobs, logprobs, "k3"), mask),
        "mismatch/out_of_bounds": masked_mean(outside, mask),
    }
