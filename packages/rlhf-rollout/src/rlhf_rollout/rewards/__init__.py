"""Rewards: a user's function in worker processes, and the built-in ones for numbers."""

from rlhf_rollout.rewards.function import parse_reward
from rlhf_rollout.rewards.pool import RewardCheck, RewardPool, check_reward_function

__all__ = ["RewardCheck", "RewardPool", "check_reward_function", "parse_reward"]
