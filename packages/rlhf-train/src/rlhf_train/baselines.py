"""Rewards compared among the samples of one prompt. Torch-free: the controller calls it on plain numbers.

`rewards` are [B] float and `group_ids` B ids, results are [B] float64. ValueError is raised for an unknown baseline,
and unless there are as many ids as rewards.
"""

from collections.abc import Sequence

import numpy as np

from rlhf_data.errors import unknown
from rlhf_train.algorithms import BASELINES


def relative_rewards(
    rewards: np.ndarray, group_ids: Sequence[str], baseline: str, *, divide_by_std: bool = True
) -> np.ndarray:
    """Return the rewards as an algorithm compares them.

    Args:
        baseline: "none" leaves them as they are, "group_mean" and "group_mean_std" are `group_normalized`,
            "leave_one_out" is `leave_one_out`.
        divide_by_std: for "group_mean_std" only.
    """
    if baseline == "none":
        return np.asarray(rewards, np.float64)
    if baseline == "leave_one_out":
        return leave_one_out(rewards, group_ids)
    if baseline in ("group_mean", "group_mean_std"):
        return group_normalized(rewards, group_ids, divide_by_std=divide_by_std and baseline == "group_mean_std")
    raise ValueError(unknown("baseline", baseline, BASELINES))


def leave_one_out(rewards: np.ndarray, group_ids: Sequence[str]) -> np.ndarray:
    """Return each reward less the mean of the others of its group.

        A_i = R_i - sum_{j != i} R_j / (n - 1) = (R_i - mean(R_group)) n / (n - 1)

    A group of equal rewards, or of one, is exactly 0.0. The paper's R holds the KL of the whole response; here the KL
    is charged token by token in the reward to go, so that the baseline is of the scores alone.

    Source: Ahmadian et al. 2024, arXiv:2402.14740, eq. 8; Kool et al. 2019, "Buy 4 REINFORCE samples, get a baseline
    for free!".
    """
    centred = group_normalized(rewards, group_ids, divide_by_std=False)
    _, index, counts = np.unique(np.asarray(group_ids), return_inverse=True, return_counts=True)
    size = counts[index]
    return centred * size / np.maximum(size - 1, 1)


def group_normalized(rewards: np.ndarray, group_ids: Sequence[str], *, divide_by_std: bool = True) -> np.ndarray:
    """Return each reward relative to its group.

        A_i = (R_i - mean(R_group)) / std(R_group)        std without the division when told so

    The deviation is the population's. A group of equal rewards has nothing to say: exactly 0.0. A group is known by its
    id, not by its position, and may have any size; a group of one is all zeros.

    Args:
        divide_by_std: False keeps the units of the reward.

    Source: Shao et al. 2024, arXiv:2402.03300, sec. 4.1.2.
    """
    if len(rewards) != len(group_ids):
        raise ValueError(f"{len(rewards)} rewards, {len(group_ids)} group ids")
    rewards = np.asarray(rewards, np.float64)
    names, index = np.unique(np.asarray(group_ids), return_inverse=True)
    counts = np.bincount(index, minlength=len(names))
    centred = rewards - (np.bincount(index, rewards, len(names)) / np.maximum(counts, 1))[index]
    std = np.sqrt(np.bincount(index, centred**2, len(names)) / np.maximum(counts, 1))[index]
    # Rounding leaves about 1e-17 of deviation in a group of equal rewards; that is no signal.
    is_equal = std <= 1e-12 * np.maximum(np.abs(rewards), 1.0)
    if not divide_by_std:
        return np.where(is_equal, 0.0, centred)
    return np.where(is_equal, 0.0, centred / np.where(is_equal, 1.0, std))
