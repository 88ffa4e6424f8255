"""Rewards: functions in worker processes, servers, reward models, and their mix."""

from rlhf_rollout.rewards.function import FunctionReward, RewardCheck, check_reward_function
from rlhf_rollout.rewards.sources import RewardSource
from rlhf_rollout.rewards.user_function import parse_reward

__all__ = ["FunctionReward", "RewardCheck", "RewardSource", "check_reward_function", "parse_reward"]
