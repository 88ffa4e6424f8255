"""Rewards: functions in worker processes, servers, reward models, and their mix."""

from rlhf_rollout.rewards.function import FunctionReward, check_reward_function
from rlhf_rollout.rewards.mix import MixedReward, build_reward, check_reward
from rlhf_rollout.rewards.model import LocalScorer, ModelReward, Scorer
from rlhf_rollout.rewards.sources import RewardSource, parse_sources
from rlhf_rollout.rewards.user_function import parse_reward

__all__ = [
    "FunctionReward",
    "LocalScorer",
    "MixedReward",
    "ModelReward",
    "RewardSource",
    "Scorer",
    "build_reward",
    "check_reward",
    "check_reward_function",
    "parse_reward",
    "parse_sources",
]
