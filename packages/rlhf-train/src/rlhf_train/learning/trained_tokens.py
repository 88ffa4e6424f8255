"""Which tokens of a shard are trained, and with which weight; and what is recorded about each."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rlhf_kernels import PolicyStream
from rlhf_models.batch import to_device
from rlhf_train.algorithms.correction import bounded_weights, importance_weights, rejection_statistic
from rlhf_train.algorithms.covariance import clipping_keys, token_covariances
from rlhf_train.algorithms.entropy import num_kept
from rlhf_train.algorithms.kl import kl_estimate
from rlhf_train.algorithms.table import AlgorithmSpec
from rlhf_train.algorithms.token_specs import CovarianceSpec
from rlhf_train.learning.experience import MODEL_COLUMNS, Experience
from rlhf_train.learning.loss_metrics import masked_mean, reference_kl_metrics
from rlhf_train.run.metrics import Max, Metric, Sum
from rlhf_train.tracing.token_values import COLUMNS, TokenValues, halves

# Bounds of a token's importance weight for the metric mismatch/out_of_bounds, when no correction sets bounds.
MISMATCH_BOUNDS = (0.5, 2.0)


def drop_nonfinite(experience: Experience) -> dict[str, Metric]:
    """Exclude tokens with NaN or infinite log-probs or values from training; return their number as a metric.

    For a log-prob of the engine, the token is excluded. For a log-prob of the trainer's model, the reference or the
    teacher, or a value of the critic, the whole rollout is excluded: the gradient through any of its tokens would not
    be finite either, and one value decides the advantages of all tokens before it.
    """
    finite = experience.rollout_logprobs.isfinite()
    for name in (*MODEL_COLUMNS.values(), "last_values"):
        if name in experience.columns:
            values = experience.columns[name].isfinite()
            values = values if values.ndim == 2 else values.all(dim=2)
            finite &= (values | ~experience.loss_mask).all(dim=1, keepdim=True)
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


def leave_truncated_out(experience: Experience) -> dict[str, Metric]:
    """Leave rollouts that the length limit ended out of the policy mask; return the number of their tokens.

    Their rewards still count in the baselines of their groups, and the critic learns from them.

    Source: Yu et al. 2025 (overlong filtering), arXiv:2503.14476, sec. 3.4.
    """
    truncated = experience.truncated[:, None]
    left_out = Sum(float((experience.policy_mask & truncated).sum()))
    experience.policy_mask &= ~truncated
    return {"samples/truncated_tokens": left_out}


def choose_tokens(
    experience: Experience, spec: AlgorithmSpec, device: torch.device, *, counts: bool
) -> dict[str, Metric]:
    """Treat tokens by their covariance and by their entropy, compared with those of all ranks; return metrics.

    Args:
        experience: the shard, with its advantages.
        spec: says what is done.
        device: of collectives.
        counts: False if another rank has the same shard.
    """
    metrics: dict[str, Metric] = {}
    if spec.covariance.is_on:
        metrics |= treat_covariance(experience, spec.covariance, device, counts=counts)
    if spec.entropy.top_quantile is not None:
        metrics |= keep_uncertain(experience, spec.entropy.top_quantile, device, counts=counts)
    return metrics


def treat_covariance(
    experience: Experience, spec: CovarianceSpec, device: torch.device, *, counts: bool
) -> dict[str, Metric]:
    """Take tokens of high covariance out of the policy loss, or hold them to the old policy. Collective.

    Clip-Cov sets their column `weights` to 0.0, and KL-Cov the column `penalties` to its coefficient, 0.0 for others.

    Args:
        experience: the shard, with old log-probs and advantages.
        spec: has the shares of the tokens, of which each rank set takes at least one.
        device: of the collective.
        counts: False if another rank has the same shard.

    Returns:
        The number of tokens that are left out, and of those that are held.
    """
    mask = experience.policy_mask
    pair = [experience.columns[name] for name in ("old_logprobs", "advantages")]
    sums = torch.stack([mask.sum().double(), *(column[mask].double().sum() for column in pair)]) * counts
    sums = sums.to(device)
    torch.distributed.all_reduce(sums)
    count, *totals = sums.cpu()
    covariances = token_covariances(*pair, torch.stack(totals) / count.clamp(min=1))
    metrics: dict[str, Metric] = {}
    if spec.clip_cov is not None:
        share, low, high = spec.clip_cov
        keys = clipping_keys(covariances, mask, experience.rollout_ids, low=low, high=high)
        clipped = _smallest(keys, max(int(share * count), 1), counts=counts)
        weights = experience.columns.get("weights", torch.ones(mask.shape))
        experience.set_column("weights", weights.masked_fill(clipped, 0.0))
        metrics["samples/clipped_tokens"] = Sum(float(clipped.sum()))
    if spec.kl_cov is not None:
        share, coef = spec.kl_cov
        held = _smallest((-covariances).masked_fill(~mask, torch.inf), max(int(share * count), 1), counts=counts)
        experience.set_column("penalties", coef * held)
        metrics["samples/held_tokens"] = Sum(float(held.sum()))
    return metrics


def keep_uncertain(experience: Experience, share: float, device: torch.device, *, counts: bool) -> dict[str, Metric]:
    """Take all tokens but those of the highest entropy out of the policy loss. Collective.

    Their column `weights` is set to 0.0, so that they count where losses are divided.

    Args:
        experience: the shard, with the column "entropy".
        share: of the tokens that are kept, see `algorithms.entropy.num_kept`.
        device, counts: see `treat_covariance`.

    Returns:
        The number of tokens that are left out, and the mean entropy of the others.
    """
    mask = experience.policy_mask
    count = (mask.sum() * counts).to(device)
    torch.distributed.all_reduce(count)
    entropy = experience.columns["entropy"]
    kept = _smallest((-entropy).masked_fill(~mask, torch.inf), num_kept(int(count), share), counts=counts)
    weights = experience.columns.get("weights", torch.ones(mask.shape))
    experience.set_column("weights", weights.masked_fill(~kept, 0.0))
    left_out = Sum(float((mask & ~kept).sum()))
    return {"samples/low_entropy_tokens": left_out, "policy/top_entropy": masked_mean(entropy, kept)}


def _smallest(keys: Tensor, number: int, *, counts: bool) -> Tensor:
    """Return where the `number` smallest of all ranks' finite keys are, [B, T] bool; more if the last are equal."""
    own = keys[keys.isfinite()].sort().values[:number].tolist() if counts else []
    parts: list[list[float]] = [[] for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather_object(parts, own)
    chosen = sorted(key for part in parts for key in part)[:number]
    return keys <= (chosen[-1] if chosen else -torch.inf)


def correct_mismatch(experience: Experience, spec: AlgorithmSpec) -> dict[str, Metric]:
    """Measure the gap between the trainer's and the engine's log-probs, and correct for it as `spec` says.

    A correction sets the column `weights`: importance weights, or ones where the policy ratio weighs already
    (`AlgorithmSpec.weighs`) or tokens are filtered or rejected only. These and mode "mask" set some to 0.0, or
    with `drops_masked` remove the tokens from the policy mask. The column `old_logprobs` has the trainer's. Metrics,
    over the trained tokens: mean and maximum of the absolute gap in nats, the k3 estimate of KL(engine || trainer), the
    share of importance weights out of bounds (those of the correction; without one, `MISMATCH_BOUNDS` per token), and
    the share of rejected tokens.
    """
    mask = experience.loss_mask
    old_logprobs = experience.columns["old_logprobs"]
    metrics = mismatch_metrics(old_logprobs, experience.rollout_logprobs, mask)
    correction = spec.correction
    kept = mask
    column = torch.ones_like(old_logprobs)
    weighs = spec.weighs and correction.level != "off" and correction.mode != "filter"
    if correction.level != "off":
        weights = importance_weights(old_logprobs, experience.rollout_logprobs, mask, level=correction.level)
        weights, kept, outside = bounded_weights(
            weights, mask, mode=correction.mode, low=correction.low, high=correction.high
        )
        column = weights if weighs else column
        metrics["mismatch/out_of_bounds"] = masked_mean(outside, mask)
        metrics["mismatch/weight"] = masked_mean(weights, kept)
    if correction.reject != "off":
        distance = rejection_statistic(old_logprobs, experience.rollout_logprobs, mask, by=correction.reject)
        rejected = mask & ((distance < correction.reject_low) | (distance > correction.reject_high))
        kept = kept & ~rejected
        metrics["mismatch/rejected"] = masked_mean(rejected, mask)
    if correction.drops_masked:
        experience.policy_mask &= kept
    else:
        column = column.masked_fill(~kept, 0.0)
    if weighs or (correction.is_on and not correction.drops_masked):
        experience.set_column("weights", column)
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


# A micro-batch that was trained: its rows of the shard, which tokens of its layout [b, t] are trained, and their
# log-probs and entropies in this layout.
Pass = tuple[Sequence[int], Tensor, Tensor, Tensor]


def first_pass_metrics(
    experience: Experience, spec: AlgorithmSpec, trained: Pass, stream: PolicyStream
) -> dict[str, Metric]:
    """Return the entropy, the gap to the engine and the KL to the reference from a pass of the step's first update.

    Where no pass came before the update, it is the first to know them, of the tokens that the stream holds.
    """
    rows, wanted, *values = trained
    mask = stream.loss_mask
    positions = to_device(wanted.flatten().nonzero()[:, 0], mask.device)
    logprobs, entropy = (column.flatten()[positions] for column in values)
    rollout_logprobs = experience.rollout_logprobs[list(rows)][experience.policy_mask[list(rows)]]
    metrics: dict[str, Metric] = {"policy/entropy": masked_mean(entropy, mask)}
    metrics |= mismatch_metrics(logprobs, to_device(rollout_logprobs, mask.device), mask)
    if spec.use_kl_loss:
        estimator = spec.objective.kl_estimator
        metrics |= reference_kl_metrics(kl_estimate(logprobs, stream.ref_logprobs, estimator), mask, estimator)
    return metrics


def token_values(experience: Experience, computed: Tensor | None) -> TokenValues:
    """Return what was computed for the tokens of a shard; see `rlhf_train.tracing.token_values`.

    Args:
        experience: the shard, with its advantages.
        computed: of the last passes over its rows, see `by_rollout`; None if the policy was not updated.
    """
    columns = experience.columns
    logprobs, entropy = torch.full((2, *experience.loss_mask.shape), torch.nan) if computed is None else computed
    trainer = columns.get("trainer_logprobs", logprobs)
    old = columns.get("old_logprobs", logprobs)
    none = torch.full_like(logprobs, torch.nan)
    kl = trainer - columns["ref_logprobs"] if "ref_logprobs" in columns else none
    left_out = ~experience.loss_mask
    by_loss_mask = [
        values.masked_fill(left_out, torch.nan)
        for values in (trainer - experience.rollout_logprobs, columns["advantages"], kl)
    ]
    named = dict(zip(("gap", "advantage", "kl"), by_loss_mask, strict=True))
    named |= {"log_ratio": logprobs - old, "entropy": entropy}
    own = experience.policy_versions >= 0
    return TokenValues(
        rollout_ids=experience.rollout_ids,
        num_tokens=own.sum(dim=1).numpy().astype(np.int32),
        columns={name: halves(named[name][own].numpy()) for name in COLUMNS},
    )


def by_rollout(experience: Experience, passes: Sequence[Pass]) -> Tensor:
    """Return log-probs and entropies of passes as [2, B, T] float32 in host memory, NaN where no pass has them."""
    mask = experience.policy_mask
    values = torch.full((2, *mask.shape), torch.nan)
    # All passes in one copy: the host would wait for the device at each.
    results = torch.stack([torch.cat([part[of].flatten() for part in passes]) for of in (2, 3)])
    wanted = torch.cat([part[1].flatten() for part in passes])
    order = torch.tensor([row for rows, *_ in passes for row in rows], dtype=torch.int64)
    row, token = mask[order].nonzero(as_tuple=True)
    values[:, order[row], token] = results.float().cpu()[:, wanted]
    return values
