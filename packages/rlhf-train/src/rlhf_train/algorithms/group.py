"""Baselines: each rollout's reward is compared with the rewards of its group. Torch-free, for the controller.

In every function `rewards` is [B] float, `group_ids` holds B ids, and the result is [B] float64. `episode_ids` holds B
ids: each of the n rollouts of an episode counts 1 / n in its group. None makes each rollout an episode of its own. The
functions raise ValueError when the numbers of rewards and ids differ, and for an unknown baseline.
"""

from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np

from rlhf_data.errors import DataError, unknown
from rlhf_train.algorithms.table import BASELINES

MIN_STD = 1e-6  # reward units; added to a group's deviation, so that rewards that differ by noise get advantages near 0


def relative_rewards(
    rewards: np.ndarray,
    group_ids: Sequence[str],
    baseline: str,
    *,
    divide_by_std: bool = True,
    episode_ids: Sequence[str] | None = None,
    weights: np.ndarray | None = None,
    greedy: np.ndarray | None = None,
) -> np.ndarray:
    """Return the rewards relative to a baseline.

    Args:
        baseline: "none" returns the rewards unchanged, "group_mean", "group_mean_std" and "group_mean_by_length" call
            `group_normalized`, and the others `batch_normalized`, `mean_ratio`, `leave_one_out`, `best_gain` and
            `best_and_worst`.
        divide_by_std: whether "group_mean_std" and "group_mean_batch_std" divide by the deviation; the other baselines
            never do.
        weights: [B] float, how much each reward counts; None for 1 / n. The numbers of tokens for
            "group_mean_by_length" (Hao et al. 2025, arXiv:2505.23585: the variance of a response's gradient grows with
            its length, and the mean weighted by it is the baseline of least variance).
        greedy: [B] float, for "greedy" the reward of the greedy response to the same prompt, which is subtracted (Li et
            al. 2023, arXiv:2310.10505: it depends on no sample, so that the gradient keeps its mean).
    """
    if baseline == "none":
        return np.asarray(rewards, np.float64)
    if baseline == "greedy":
        return np.asarray(rewards, np.float64) - greedy
    if baseline == "leave_one_out":
        return leave_one_out(rewards, group_ids, episode_ids, weights)
    if baseline == "group_max":
        return best_gain(rewards, group_ids, episode_ids)
    if baseline == "best_and_worst":
        return best_and_worst(rewards, group_ids, episode_ids)
    weights = _shares(rewards, episode_ids)[1] if weights is None else weights
    if baseline in ("group_mean", "group_mean_std", "group_mean_by_length"):
        divides = divide_by_std and baseline == "group_mean_std"
        return group_normalized(rewards, group_ids, divide_by_std=divides, weights=weights)
    if baseline == "group_mean_batch_std":
        return batch_normalized(rewards, group_ids, weights, divide_by_std=divide_by_std)
    if baseline == "group_mean_ratio":
        return mean_ratio(rewards, group_ids, weights)
    raise ValueError(unknown("baseline", baseline, BASELINES))


def relative_token_rewards(
    rewards: Sequence[np.ndarray],
    group_ids: Sequence[str],
    baseline: str,
    *,
    divide_by_std: bool = True,
    episode_ids: Sequence[str] | None = None,
) -> list[np.ndarray]:
    """Return the rewards of tokens, such as those of reasoning steps, relative to all such rewards of their group.

        r~_ij = (r_ij - mean(r_group)) / (std(r_group) + 1e-6)        j counts the rewarded tokens of rollout i

    "group_mean" does not divide. "leave_one_out" subtracts the mean over the rewarded tokens of the other episodes, and
    gives 0.0 when these have none. "none" changes nothing. The advantage of a token is then the sum of r~ from it on,
    so that the number of steps alone earns nothing.

    Args:
        rewards: per rollout, [K_i] float, in order; K_i may be 0.

    Returns:
        Per rollout, [K_i] float64.

    Source: Shao et al. 2024, arXiv:2402.03300, sec. 4.1.3 (GRPO with process supervision).
    """
    counts = np.array([len(own) for own in rewards])
    flat = np.concatenate([np.zeros(0), *rewards])
    if not len(flat):
        return [flat for _ in rewards]
    episode, shares = _shares(rewards, episode_ids)
    relative = relative_rewards(
        flat,
        np.repeat(group_ids, counts),
        baseline,
        divide_by_std=divide_by_std,
        episode_ids=np.repeat(episode, counts),
        weights=np.repeat(shares, counts),
    )
    return np.split(relative, np.cumsum(counts)[:-1])


def relative_turn_rewards(
    rewards: Sequence[np.ndarray],
    group_ids: Sequence[str],
    baseline: str,
    *,
    turn_gamma: float,
    divide_by_std: bool = True,
    episode_ids: Sequence[str] | None = None,
    states: Sequence[Sequence[Hashable]] | None = None,
    of_episodes: np.ndarray | None = None,
    state_coef: float = 1.0,
) -> list[np.ndarray]:
    """Return the rewards of turns such that what follows from a turn on is relative to the same turn of the group.

        G_ik  = sum_{j >= k} turn_gamma^(j - k) r_ij                   reward to go of turn k of rollout i
        A_ik  = (G_ik - mean(G_k of the group)) / (std(G_k of the group) + 1e-6)
        r~_ik = A_ik - turn_gamma A_i,k+1

    The baseline of turn k is that of `relative_rewards` over the group's episodes that have a turn k, and 0.0 is left
    when there is only one. The discounted sum of r~ from a turn on is its advantage A. A turn is so not charged for
    what the group earned in earlier turns. With one turn per episode r~ is the result of `relative_rewards`.

    The turns of an episode are numbered through its rollouts, in the order of `rewards`.

    With `states`, G_ik is compared with that of all turns of the group in the same state, whichever their numbers, and
    the advantage of the episode is added:

        A_ik = A_i + state_coef (G_ik - mean(G of the state)) / (std(G of the state) + 1e-6)

    so that a turn in a state that the group met once has the advantage of its episode.

    Args:
        rewards: per rollout, [K_i] float, its turns in order; K_i may be 0.
        turn_gamma: discount from one turn to the next.
        states: per rollout, K_i states.
        of_episodes: with `states`, [B] float, the advantage A_i of each rollout's episode.
        state_coef: with `states`, the weight of the turns' own advantages.

    Returns:
        Per rollout, [K_i] float64.

    Source: Ding et al. 2025 (GTPO), arXiv:2511.14846: returns of turns, normalised. Feng et al. 2025 (GiGPO),
    arXiv:2505.10978: with states.
    """
    to_go = [np.array(own, np.float64) for own in rewards]
    keys: list[str] = []
    # Numbers in place of states, which may be as long as prompts: an array of strings pads all to the longest.
    key_numbers: dict[Hashable, int] = {}
    num_turns: Counter[Hashable] = Counter()
    for row, (own, group, episode) in enumerate(zip(to_go, group_ids, episode_ids or range(len(to_go)), strict=True)):
        for turn in range(len(own) - 2, -1, -1):
            own[turn] += turn_gamma * own[turn + 1]
        numbers = range(num_turns[episode], num_turns[episode] + len(own))
        compared = [(group, key) for key in (numbers if states is None else states[row])]
        keys += [str(key_numbers.setdefault(key, len(key_numbers))) for key in compared]
        num_turns[episode] += len(own)
    # All turns weigh the same: an episode has each number once, and GiGPO counts each turn in a state.
    relative = relative_rewards(np.concatenate([np.zeros(0), *to_go]), keys, baseline, divide_by_std=divide_by_std)
    parts = np.split(relative, np.cumsum([len(own) for own in to_go]))[:-1]
    if states is not None:
        parts = [whole + state_coef * own for whole, own in zip(of_episodes, parts, strict=True)]
    for own in parts:
        own[:-1] -= turn_gamma * own[1:]
    return parts


def decoupled_rewards(
    source_rewards: np.ndarray,
    weights: Sequence[float],
    group_ids: Sequence[str],
    *,
    over_batch: bool = True,
    episode_ids: Sequence[str] | None = None,
) -> np.ndarray:
    """Return the weighted sum of several rewards, each of which is compared within its group before (GDPO).

        z_ik = (r_ik - mean(r_k of the group)) / (std(r_k of the group) + 1e-6)     as in `group_normalized`
        S_i  = sum_k w_k z_ik
        A_i  = (S_i - mean(S)) / (std(S) + 1e-6)                                    over all rollouts of the batch

    A sum that is normalised as a whole gives rollouts whose rewards differ the same advantage when their sums lie alike
    in their groups, and a reward of a larger scale hides the others.

    Args:
        source_rewards: [B, K] float, the K rewards of each rollout; NaN for one of which its source abstained, which is
            left out of its group, with z = 0.
        weights: K numbers w.
        over_batch: False returns S, for estimators that whiten advantages over the batch anyway.

    Source: Liu et al. 2026 (GDPO), arXiv:2601.05242, eq. 4 to 6.
    """
    _, shares = _shares(group_ids, episode_ids)
    columns = np.zeros_like(source_rewards, dtype=np.float64).T
    for column, rewards in zip(columns, np.asarray(source_rewards, np.float64).T, strict=True):
        has = ~np.isnan(rewards)
        column[has] = group_normalized(rewards[has], np.asarray(group_ids)[has], weights=shares[has])
    total = sum(weight * column for weight, column in zip(weights, columns, strict=True))
    return group_normalized(total, [""] * len(group_ids), weights=shares) if over_batch else total


def leave_one_out(
    rewards: np.ndarray,
    group_ids: Sequence[str],
    episode_ids: Sequence[str] | None = None,
    weights: np.ndarray | None = None,
) -> np.ndarray:
    """Return each reward minus the mean of the rewards of the other episodes in its group.

        A_i = R_i - sum_{j != i} R_j / (n - 1) = (R_i - mean(R_group)) n / (n - 1)

    The reward R_j of an episode of several rollouts is the mean of theirs. The result is exactly 0.0 for groups of
    equal rewards and for groups of one episode. The paper's R includes the KL penalty of the whole response. Here R is
    the reward without the KL, which `token_rewards` charges token by token.

    Source: Ahmadian et al. 2024, arXiv:2402.14740, eq. 8; Kool et al. 2019, "Buy 4 REINFORCE samples, get a baseline
    for free!".

    Args:
        weights: [B] float, how much each reward counts in the mean; None for 1 / n.
    """
    episode, shares = _shares(rewards, episode_ids)
    weights = shares if weights is None else weights
    centred = group_normalized(rewards, group_ids, divide_by_std=False, weights=weights)
    _, group = np.unique(np.asarray(group_ids), return_inverse=True)
    has_others = np.bincount(group)[group] > np.bincount(episode)[episode]
    others = np.bincount(group, weights)[group] - np.bincount(episode, weights)[episode]
    own = np.bincount(episode, weights * centred)[episode]
    return np.where(has_others, centred + own / np.where(has_others, others, 1.0), 0.0)


def batch_normalized(
    rewards: np.ndarray, group_ids: Sequence[str], weights: np.ndarray, *, divide_by_std: bool = True
) -> np.ndarray:
    """Return each reward minus the mean of its group, divided by the deviation of all rewards of the batch.

        A_i = (R_i - mean(R_group)) / (std(R) + 1e-6)        std over the batch, of the population

    Args:
        weights: [B] float, how much each reward counts in mean and deviation.
        divide_by_std: False leaves the division out.

    Source: Liu et al. 2025 (Lite PPO), arXiv:2508.08221.
    """
    centred = group_normalized(rewards, group_ids, divide_by_std=False, weights=weights)
    if not divide_by_std or not len(centred):
        return centred
    deviation = np.average((rewards - np.average(rewards, weights=weights)) ** 2, weights=weights) ** 0.5
    return centred / (deviation + MIN_STD)


def mean_ratio(rewards: np.ndarray, group_ids: Sequence[str], weights: np.ndarray) -> np.ndarray:
    """Return each reward minus the mean of its group, divided by that mean.

        A_i = (R_i - mean(R_group)) / (mean(R_group) + 1e-6),   0.0 where all are 0

    With rewards of 1 and 0 the mean is the share of successes, and the gradient is that of the likelihood of a success,
    up to an order that grows with the size of the group.

    Args:
        weights: [B] float, how much each reward counts in the mean.

    Raises:
        DataError: a reward is below 0. The mean is then no scale: it may be 0 or negative where rewards differ.

    Source: Tajwar et al. 2026 (MaxRL), arXiv:2602.02710.
    """
    lowest = min(rewards, default=0.0)
    if lowest < -MIN_STD:
        message = f"MaxRL divides rewards by the mean of their group, and a reward is {lowest:g}, which is below 0"
        hint = "use rewards >= 0, without penalties of length and normalization, or ``estimator=dr_grpo``"
        raise DataError(message, hint=hint)
    centred = group_normalized(rewards, group_ids, divide_by_std=False, weights=weights)
    return centred / (np.maximum(rewards - centred, 0.0) + MIN_STD)


def best_gain(rewards: np.ndarray, group_ids: Sequence[str], episode_ids: Sequence[str] | None = None) -> np.ndarray:
    """Return by how much each reward raises the best of its group: the leave-one-out advantages of max@k.

        A_i = max_j R_j - max_{j != i} R_j        that is R_best - R_second for the best one, and 0.0 for the others

    k is the size of the group; with rewards of 1 and 0 this is pass@k. The reward R_j of an episode of several rollouts
    is the mean of theirs. The result is 0.0 for groups of one episode, and where two are the best.

    Source: Tang et al. 2025, arXiv:2503.19595.
    """
    episode, shares = _shares(rewards, episode_ids)
    of_episode = np.bincount(episode, shares * rewards)
    gains = np.zeros_like(of_episode)
    groups = np.asarray(group_ids)
    for group in np.unique(groups):
        members = np.unique(episode[groups == group])
        *_, second, best = [None, *members[np.argsort(of_episode[members])]]
        if second is not None:
            gains[best] = of_episode[best] - of_episode[second]
    return gains[episode]


def best_and_worst(
    rewards: np.ndarray, group_ids: Sequence[str], episode_ids: Sequence[str] | None = None
) -> np.ndarray:
    """Return n for the best episode of each group, -n for the worst, and 0.0 for the others.

    n counts the rollouts of the group, so that a mean over rollouts becomes one over groups. The reward of an episode
    of several rollouts is the mean of theirs. Of equal episodes the first is taken. Groups of equal rewards have 0.0.
    """
    episode, shares = _shares(rewards, episode_ids)
    of_episode = np.bincount(episode, shares * rewards)
    found = np.zeros_like(of_episode)
    groups = np.asarray(group_ids)
    for group in np.unique(groups):
        in_group = groups == group
        members = episode[in_group]
        best, worst = members[of_episode[members].argmax()], members[of_episode[members].argmin()]
        if of_episode[best] > of_episode[worst]:
            found[best], found[worst] = in_group.sum(), -in_group.sum()
    return found[episode]


def _shares(rewards: Sequence[object], episode_ids: Sequence[str] | None) -> tuple[np.ndarray, np.ndarray]:
    """Return for each rollout the number of its episode and 1 / n, where n counts the episode's rollouts."""
    names = np.arange(len(rewards)) if episode_ids is None else np.asarray(episode_ids)
    _, index, counts = np.unique(names, return_inverse=True, return_counts=True)
    return index, 1 / counts[index]


def group_normalized(
    rewards: np.ndarray,
    group_ids: Sequence[str],
    *,
    divide_by_std: bool = True,
    weights: np.ndarray | None = None,
) -> np.ndarray:
    """Return each reward minus the mean of its group, divided by the group's standard deviation.

        A_i = (R_i - mean(R_group)) / (std(R_group) + 1e-6)

    The deviation is that of the population (divisor n). The constant keeps rewards that differ by far less than 1e-6,
    such as rounding noise, from becoming advantages of +-1. Groups may have any size and order, because ids tell them
    apart. The result is exactly 0.0 for groups of equal rewards and for groups of one rollout.

    Args:
        divide_by_std: False leaves the division out, and the result in reward units.
        weights: [B] float, how much each reward counts in the mean and the deviation; None for 1 each.

    Source: Shao et al. 2024, arXiv:2402.03300, sec. 4.1.2; the constant: verl, `compute_grpo_outcome_advantage`
    (OpenRLHF adds 1e-9).
    """
    if len(rewards) != len(group_ids):
        raise ValueError(f"{len(rewards)} rewards, {len(group_ids)} group ids")
    rewards = np.asarray(rewards, np.float64)
    weights = np.ones(len(rewards)) if weights is None else weights
    names, index = np.unique(np.asarray(group_ids), return_inverse=True)
    counts = np.bincount(index, weights, len(names))
    centred = rewards - (np.bincount(index, weights * rewards, len(names)) / counts)[index]
    std = np.sqrt(np.bincount(index, weights * centred**2, len(names)) / counts)[index]
    # The mean of equal rewards is rounded, which leaves a relative deviation of about 1e-17: set it to exactly 0.
    is_equal = std <= 1e-12 * np.maximum(np.abs(rewards), 1.0)
    if not divide_by_std:
        return np.where(is_equal, 0.0, centred)
    return np.where(is_equal, 0.0, centred / (std + MIN_STD))
