"""Turns prompts into scored rollouts: engines, rewards, and a generator that accounts for every sample. No torch."""

from rlhf_rollout.agents import SingleTurn, Workflow
from rlhf_rollout.engines import ENGINE_KINDS, EngineSpec, build_engine
from rlhf_rollout.generator import GenerationCounts, GroupResult, generate_groups
from rlhf_rollout.protocols import Completion, EngineHealth, RewardFunction, RolloutEngine, SamplingParams
from rlhf_rollout.rewards.function import FunctionReward, check_reward_function
from rlhf_rollout.router import EngineRouter
from rlhf_rollout.weights.bucket import TensorSlot, WeightBucket

__all__ = [
    "ENGINE_KINDS",
    "Completion",
    "EngineHealth",
    "EngineRouter",
    "EngineSpec",
    "FunctionReward",
    "GenerationCounts",
    "GroupResult",
    "RewardFunction",
    "RolloutEngine",
    "SamplingParams",
    "SingleTurn",
    "TensorSlot",
    "WeightBucket",
    "Workflow",
    "build_engine",
    "check_reward_function",
    "generate_groups",
]
