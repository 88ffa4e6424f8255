"""Rewards: a user's function in worker processes, and the built-in one for numbers."""

from rlhf_rollout.rewards.function import FunctionReward, RewardCheck, check_reward_function
from rlhf_rollout.rewards.user_function import parse_reward

__all__ = ["FunctionReward", "RewardCheck", "check_reward_function", "parse_reward"]
