"""Rewards compared among the samples of one prompt. Torch-free: the controller calls it on plain numbers."""

from collections.abc import Sequence

import numpy as np


def group_normalized(rewards: np.ndarray, group_ids: Sequence[str], *, divide_by_std: bool = True) -> np.ndarray:
    """Return each reward relative to its group.

        A_i = (R_i - mean(R_group)) / std(R_group)        std without the division when told so

    The deviation is the population's. A group of equal rewards has nothing to say: exactly 0.0. A group is known by its
    id, not by its position, and may have any size; a group of one is all zeros.

    Args:
        rewards: [B] float.
        group_ids: B ids.
        divide_by_std: False keeps the units of the reward.

    Returns:
        [B] float64.

    Raises:
        ValueError: as many ids as rewards are needed.

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
