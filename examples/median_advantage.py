"""Advantages of your own: the reward minus the median of its group, which a single lucky response does not move.

rlhf check examples/median_advantage.py
rlhf ppo --advantage_path examples/median_advantage.py
"""

import torch


def advantages(rewards, group_ids):
    """Return the advantage of each rollout, [B]."""
    result = torch.zeros_like(rewards)
    for group in group_ids.unique():
        members = group_ids == group
        result[members] = rewards[members] - rewards[members].quantile(0.5)
    return result
