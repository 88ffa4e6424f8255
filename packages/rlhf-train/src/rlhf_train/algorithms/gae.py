"""From rewards to advantages: token rewards, generalized advantage estimation, distillation, whitening.

Shape letters: B rollouts, T token positions. All functions skip positions where the loss mask is False (prompt,
environment, padding), as if the policy's tokens followed each other directly. Results are 0.0 at these positions.
Functions raise ValueError when shapes differ.
"""

import torch
from torch import Tensor

from rlhf_kernels import packed_gae
from rlhf_train.shapes import check_same_shape


def rewards_at_tokens(rewards: Tensor, earned: Tensor, loss_mask: Tensor) -> Tensor:
    """Assign each rollout's reward to tokens.

        R_t = e_t + [t is the last trained token] (R - sum_s e_s)

    The reward of a turn or step stays at its last token. The last trained token gets the rest: the whole reward when
    nothing was earned before, the change by shaping and by the group's baseline, and what tokens earned that are not
    trained. Each row sums to R.

    Args:
        rewards: [B] float, R, in reward units.
        earned: [B, T] float, e, the rewards of turns and steps at their last tokens, 0.0 elsewhere.
        loss_mask: [B, T] bool.

    Returns:
        [B, T] float. A row without trained tokens is all zeros.
    """
    check_same_shape(earned=earned, loss_mask=loss_mask)
    placed = earned.masked_fill(~loss_mask, 0.0)
    return placed + last_trained(loss_mask) * (rewards - placed.sum(dim=1))[:, None]


def token_rewards(rewards: Tensor, kl: Tensor, loss_mask: Tensor, *, kl_coef: float) -> Tensor:
    """Subtract the KL penalty from the rewards of tokens.

        r_t = R_t - kl_coef kl_t

    Args:
        rewards: [B, T] float, in reward units, from `rewards_at_tokens`.
        kl: [B, T] float, nats, to the reference; zeros when the reward includes no KL penalty.
        loss_mask: [B, T] bool.
        kl_coef: reward units per nat, >= 0.

    Returns:
        [B, T] float, in reward units, 0.0 where the mask is False.

    Source: Ouyang et al. 2022, arXiv:2203.02155, eq. 2.
    """
    check_same_shape(rewards=rewards, kl=kl, loss_mask=loss_mask)
    return (-kl_coef * kl + rewards).masked_fill(~loss_mask, 0.0)


def last_trained(loss_mask: Tensor) -> Tensor:
    """Return [B, T] bool that marks the last trained token of each row of `loss_mask` [B, T] bool."""
    position = torch.arange(loss_mask.shape[1], device=loss_mask.device)
    return loss_mask & (position == torch.where(loss_mask, position, -1).amax(dim=1, keepdim=True))


def turn_starts(policy_versions: Tensor, loss_mask: Tensor) -> Tensor:
    """Return [B, T] bool that marks the first trained token of each turn.

    A turn is a run of tokens that the policy wrote. Its first tokens may be excluded from training.

    Args:
        policy_versions: [B, T] int, -1 for tokens that the policy did not write.
        loss_mask: [B, T] bool, the trained tokens.
    """
    check_same_shape(policy_versions=policy_versions, loss_mask=loss_mask)
    written = policy_versions >= 0
    before = torch.cat([torch.zeros_like(written[:, :1]), written[:, :-1]], dim=1)
    turn = (written & ~before).cumsum(dim=1)  # number of a token's turn, from 1
    latest = (turn * loss_mask).cummax(dim=1).values  # of the trained tokens so far
    earlier = torch.cat([torch.zeros_like(latest[:, :1]), latest[:, :-1]], dim=1)
    return loss_mask & (turn > earlier)


def generalized_advantages(
    rewards: Tensor,
    values: Tensor,
    loss_mask: Tensor,
    *,
    gamma: float,
    lambd: float,
    last_values: Tensor | None = None,
    starts: Tensor | None = None,
    turn_gamma: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return advantages and returns by generalized advantage estimation.

        delta_t = r_t + gamma V_{t'} - V_t
        A_t     = delta_t + gamma lambd A_{t'}        t' = the next trained token; after the last one V and A are 0
        R_t     = A_t + V_t

    A rollout that the length limit cut off has not ended. For it, V after the last token is the critic's estimate of
    the reward that would have followed (`last_values`).

    Args:
        rewards: [B, T] float, from `token_rewards`.
        values: [B, T] float, in reward units; V_t is the value of the state before token t is written.
        loss_mask: [B, T] bool.
        gamma: discount per token.
        lambd: in [0, 1]; 0 relies on the values alone (more bias), 1 on the rewards alone (more variance).
        last_values: [B] float, the value after the last token of each rollout that was cut off; 0.0 for the others.
            None means 0.0 for all.
        starts: [B, T] bool, from `turn_starts`. None treats a rollout as one turn.
        turn_gamma: takes the place of gamma in the step to a token that starts a turn. Unused without `starts`.

    Returns:
        ([B, T], [B, T]) float32: advantages and returns, 0.0 where the mask is False.

    Source: Schulman et al. 2016, arXiv:1506.02438, eq. 11 and 16; the value after a cut: Pardo et al. 2018,
    arXiv:1712.00378.
    """
    check_same_shape(rewards=rewards, values=values, loss_mask=loss_mask)
    # The kernel takes packed sequences: row b occupies positions bounds[b] to bounds[b + 1] of the flattened tensors.
    bounds = values.shape[1] * torch.arange(len(values) + 1, device=values.device)
    flat = [tensor.flatten() for tensor in (rewards, values, loss_mask)]
    turns = {} if starts is None else {"turn_starts": starts.flatten(), "turn_gamma": turn_gamma}
    results = packed_gae(*flat, bounds, gamma=gamma, lambd=lambd, last_values=last_values, **turns)
    advantages, returns = (result.view(values.shape) for result in results)
    return advantages, returns


def rewards_to_go(
    rewards: Tensor, loss_mask: Tensor, *, gamma: float, starts: Tensor | None = None, turn_gamma: float = 1.0
) -> Tensor:
    """Return the advantages of algorithms without a critic: the discounted sum of rewards from each token on.

        A_t = r_t + gamma A_{t'}        t' = the next trained token; after the last one A is 0

    Group baselines (`group.relative_rewards`) are in the rewards already. With the reward of a whole response alone
    and gamma = 1, every token of a response has its response's reward.

    Args:
        rewards: [B, T] float, from `token_rewards`.
        loss_mask: [B, T] bool.
        gamma: discount per token.
        starts, turn_gamma: as for `generalized_advantages`.

    Returns:
        [B, T] float32, 0.0 where the mask is False.

    Source: Williams 1992, "Simple statistical gradient-following algorithms"; Shao et al. 2024, arXiv:2402.03300.
    """
    values = torch.zeros_like(rewards)
    return generalized_advantages(
        rewards, values, loss_mask, gamma=gamma, lambd=1.0, starts=starts, turn_gamma=turn_gamma
    )[0]


def distilled_advantages(advantages: Tensor, reverse_kl: Tensor, loss_mask: Tensor, *, teacher_coef: float) -> Tensor:
    """Add the signal of on-policy distillation to the advantages of an estimator.

        A_t = A^R_t - c k_t        k_t = log p_old(y_t) - log p_teacher(y_t)

    k_t is the estimate of KL(policy || teacher) from the sampled token. The term is a reward of token t whose discount
    is 0: it counts for this token alone, and neither the tokens before it nor the critic's returns include it. It
    enters after the estimator, so that no baseline of the group shifts it and no deviation of the group divides it.
    Where the estimator whitens, the sum is whitened, which keeps the weight of the teacher relative to the reward.

    Args:
        advantages: [B, T] float, A^R, of the rewards; zeros when the policy learns from the teacher alone.
        reverse_kl: [B, T] float, k, nats, at the policy that wrote the tokens.
        loss_mask: [B, T] bool.
        teacher_coef: c, reward units per nat, >= 0.

    Returns:
        [B, T] float, 0.0 where the mask is False.

    Source: Lu et al. 2025, "On-Policy Distillation" (thinkingmachines.ai/blog/on-policy-distillation); the reverse KL
    on the student's own samples: Agarwal et al. 2024, arXiv:2306.13649; Gu et al. 2024, arXiv:2306.08543.
    """
    check_same_shape(advantages=advantages, reverse_kl=reverse_kl, loss_mask=loss_mask)
    return (advantages - teacher_coef * reverse_kl).masked_fill(~loss_mask, 0.0)


def moments(values: Tensor, loss_mask: Tensor) -> Tensor:
    """Return count, sum and sum of squares of the trained `values`, [3] float64. Ranks add theirs up for `whiten`.

    Args:
        values: [B, T] float.
        loss_mask: [B, T] bool.
    """
    chosen = values[loss_mask].double()
    return torch.stack([chosen.new_tensor(float(chosen.numel())), chosen.sum(), (chosen**2).sum()])


def whiten(values: Tensor, loss_mask: Tensor, global_moments: Tensor, *, divide_by_std: bool = True) -> Tensor:
    """Return values with mean 0 and standard deviation 1 over the trained tokens of the whole rollout batch.

    Args:
        values: [B, T] float.
        loss_mask: [B, T] bool.
        global_moments: [3] float64, `moments` added up over all ranks.
        divide_by_std: False subtracts the mean and does not divide.

    Returns:
        [B, T] float, 0.0 where the mask is False. Equal values become 0.0, because the variance is at least 1e-8.
    """
    count, total, squares = global_moments.to(values.device)
    mean = total / count.clamp(min=1)
    variance = (squares / count.clamp(min=1) - mean**2).clamp(min=1e-8)
    centred = values.double() - mean
    whitened = centred * variance.rsqrt() if divide_by_std else centred
    return whitened.to(values.dtype).masked_fill(~loss_mask, 0.0)
