"""The advantages and returns of a shard: its rewards, the KL penalty, the critic's values and the teacher's term."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlhf_models.batch import to_device
from rlhf_train.algorithms.gae import (
    distilled_advantages,
    generalized_advantages,
    last_trained,
    moments,
    rewards_at_tokens,
    rewards_to_go,
    token_rewards,
    turn_starts,
    whiten,
)
from rlhf_train.algorithms.kl import kl_estimate
from rlhf_train.algorithms.table import AlgorithmSpec
from rlhf_train.learning.experience import Experience
from rlhf_train.learning.loss_metrics import masked_mean, reference_kl_metrics, teacher_metrics
from rlhf_train.learning.trained_tokens import (
    choose_tokens,
    correct_mismatch,
    drop_nonfinite,
    leave_truncated_out,
    limit_staleness,
)
from rlhf_train.losses.own import own_advantages
from rlhf_train.run.metrics import Metric


def assign_advantages(
    experience: Experience,
    spec: AlgorithmSpec,
    *,
    rows: Sequence[int],
    step_versions: Sequence[int],
    kl_coef: float,
    device: torch.device,
    counts: bool,
) -> dict[str, Metric]:
    """Fill in the advantages, returns, masks and weights of a shard, and return metrics of them. Collective.

    Ranks meet because whitening uses the moments of the batch of all ranks.

    Args:
        experience: the shard, with the columns of all models that ran.
        spec: the algorithm.
        rows: of the batch, the shard's rollouts.
        step_versions: see `limit_staleness`.
        kl_coef: weight of the KL in the reward, in reward units per nat.
        device: of the collectives and of the scan over tokens.
        counts: whether this rank adds its part to sums over shards. One rank per shard does.
    """
    columns = experience.columns
    # Read before tokens are dropped, which clears them. Those that are not finite belong to dropped rollouts.
    last_values = columns["last_values"].sum(dim=1).nan_to_num(0.0, 0.0, 0.0) if "last_values" in columns else None
    metrics = drop_nonfinite(experience) | limit_staleness(experience, step_versions, spec.mask_stale)
    if spec.mask_truncated:
        metrics |= leave_truncated_out(experience)
    mask = experience.loss_mask
    experience.set_column("trained", mask.float())
    if spec.runs_actor:
        metrics |= correct_mismatch(experience, spec)
        experience.set_column("trainer_logprobs", columns["old_logprobs"])
    if spec.old_logprobs == "rollout":
        experience.set_column("old_logprobs", experience.rollout_logprobs)
    own = None
    if spec.own_advantages is not None:
        own = own_advantages(spec.own_advantages, rows, experience.own_inputs(), counts=counts)
    if spec.row.prefers:
        own, pair_metrics = preferred_advantages(experience, beta=kl_coef, counts=counts)
        metrics |= pair_metrics
    advantages, returns, kl_metrics = advantages_and_returns(
        experience, spec, last_values, kl_coef=kl_coef, device=device, own=own
    )
    metrics |= kl_metrics
    if spec.row.whiten:
        total = moments(advantages, mask).to(device) * counts
        torch.distributed.all_reduce(total)
        advantages = whiten(advantages, mask, total.cpu(), divide_by_std=spec.whiten_std)
    experience.set_column("advantages", advantages)
    experience.set_column("returns", returns)
    metrics |= choose_tokens(experience, spec, device, counts=counts)
    metrics["policy/advantage_abs"] = masked_mean(columns["advantages"].abs(), mask)
    metrics["value/return"] = masked_mean(columns["returns"], mask)
    return metrics


def advantages_and_returns(
    experience: Experience,
    spec: AlgorithmSpec,
    last_values: Tensor | None,
    *,
    kl_coef: float,
    device: torch.device,
    own: Tensor | None = None,
) -> tuple[Tensor, Tensor, dict[str, Metric]]:
    """Return the advantages of a shard before whitening, its returns, and metrics of the KL.

    Without a critic, the rewards are relative to the baseline of the group already, and advantages are the rewards to
    go. With one, they are generalized advantages.

    Args:
        experience: the shard.
        spec: the algorithm.
        last_values: [B] float, the critic's value after each rollout that the length limit ended; None for 0.
        kl_coef: weight of the KL in the reward, in reward units per nat.
        device: where the scan over tokens runs. Columns are in host memory.
        own: [B, T] float in host memory, advantages of the user or of pairs, which take the place of the rewards; None
            without.

    Returns:
        [B, T] float in host memory, [B, T] float on the device, and metrics.
    """
    rewards, metrics = charged_rewards(experience, spec, kl_coef=kl_coef)
    mask = to_device(experience.loss_mask, device)
    rewards = to_device(rewards, device)
    starts = None
    if spec.turn_gamma is not None:
        starts = to_device(turn_starts(experience.policy_versions, experience.loss_mask), device)
    turn_gamma = spec.turn_gamma or 0.0
    if spec.row.uses_critic:
        advantages, returns = generalized_advantages(
            rewards,
            to_device(experience.columns["values"], device),
            mask,
            gamma=spec.gamma,
            lambd=spec.lambd,
            last_values=None if last_values is None else to_device(last_values, device),
            starts=starts,
            turn_gamma=turn_gamma,
        )
    else:
        returns = rewards_to_go(rewards, mask, gamma=spec.gamma, starts=starts, turn_gamma=turn_gamma)
        returns = returns if own is None else returns + to_device(own, device)
        advantages = returns
    advantages, distillation = distilled(advantages.cpu(), experience, spec)
    return advantages, returns, metrics | distillation


def preferred_advantages(experience: Experience, *, beta: float, counts: bool) -> tuple[Tensor, dict[str, Metric]]:
    """Return the advantages of pairs, [B, T] float in host memory, and metrics of them. Collective.

    The best response b of a group and its worst one w have other signs s, and others have none:

        h_i = sum_t (old_logprob_it - ref_logprob_it)        m = beta (h_b - h_w)        A_it = s_i beta sigmoid(-m)

    With weights that have not moved yet, the gradient of sum_t A_it logprob_it is that of log sigmoid(m), minus DPO's
    loss. `experience.rewards` are s_i times the size of the group (`group.best_and_worst`), and the result is A times
    that size. Where a response of a pair has no trained tokens, it is 0.

    Args:
        experience: the shard, with both log-probs.
        beta: weight of the log-ratios, > 0.
        counts: whether this rank's rollouts belong to the batch; another rank has the same ones if not.

    Source: Guo et al. 2024, arXiv:2402.04792; Rafailov et al. 2023, arXiv:2305.18290.
    """
    mask, sizes = experience.loss_mask, experience.rewards
    log_ratios = (experience.columns["old_logprobs"] - experience.columns["ref_logprobs"]).double().sum(dim=1)
    own = list(zip(experience.group_ids, sizes.sign().tolist(), log_ratios.tolist(), mask.any(1).tolist(), strict=True))
    parts: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(parts, own if counts else [])
    margins: dict[str, float] = {}
    signs: dict[str, set[float]] = {}
    for group, sign, log_ratio, is_trained in (each for part in parts for each in part):
        if sign and is_trained:
            margins[group] = margins.get(group, 0.0) + sign * beta * log_ratio
            signs.setdefault(group, set()).add(sign)
    is_paired = (sizes != 0) & torch.tensor([len(signs.get(group, ())) == 2 for group in experience.group_ids])
    of_rows = torch.tensor([margins.get(group, 0.0) for group in experience.group_ids], dtype=torch.float64)
    weights = (sizes * beta * torch.sigmoid(-of_rows) * is_paired).float()
    metrics = {
        "policy/pair_margin": masked_mean(of_rows, is_paired),
        "policy/pair_accuracy": masked_mean((of_rows > 0).float(), is_paired),
    }
    return weights[:, None] * mask, metrics


def charged_rewards(experience: Experience, spec: AlgorithmSpec, *, kl_coef: float) -> tuple[Tensor, dict[str, Metric]]:
    """Return the rewards of tokens, [B, T] float, minus the KL penalty, and the metrics of the KL to the reference.

    There is no penalty without a reference, nor when the KL is a term of the loss instead, nor for pairs, whose
    advantages have the reference already. With advantages of the user's own, there is nothing but the penalty.
    """
    mask = experience.loss_mask
    columns = experience.columns
    rewards = torch.zeros(mask.shape)
    if spec.own_advantages is None and not spec.row.prefers:
        rewards = rewards_at_tokens(experience.rewards, experience.token_rewards, mask)
    if not spec.uses_reference or "old_logprobs" not in columns:
        return rewards, {}
    kl = kl_estimate(columns["old_logprobs"], columns["ref_logprobs"], spec.objective.kl_estimator)
    rewards = token_rewards(rewards, kl, mask, kl_coef=0.0 if spec.use_kl_loss or spec.row.prefers else kl_coef)
    return rewards, reference_kl_metrics(kl, mask, spec.objective.kl_estimator)


def distilled(advantages: Tensor, experience: Experience, spec: AlgorithmSpec) -> tuple[Tensor, dict[str, Metric]]:
    """Return the advantages with the teacher's term, [B, T] float, and the mean reverse KL to the teacher in nats.

    Without a teacher, or with one whose distributions are a term of the loss, the advantages are unchanged.
    """
    if not spec.teaches_advantages:
        return advantages, {}
    columns = experience.columns
    mask = experience.loss_mask
    reverse_kl = kl_estimate(columns["old_logprobs"], columns["teacher_logprobs"], "k1")
    advantages = distilled_advantages(advantages, reverse_kl, mask, teacher_coef=spec.teacher_coef)
    return advantages, teacher_metrics(reverse_kl[mask], mask, experience.sources)


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
