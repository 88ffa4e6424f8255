"""Turns prompts into scored rollouts: engines, rewards, and a generator that accounts for every sample. No torch."""

from typing import TYPE_CHECKING

from rlhf_data import lazy_exports

if TYPE_CHECKING:
    from rlhf_rollout.agents import SingleTurn as SingleTurn
    from rlhf_rollout.agents import Workflow as Workflow
    from rlhf_rollout.engines import ENGINE_KINDS as ENGINE_KINDS
    from rlhf_rollout.engines import EngineSpec as EngineSpec
    from rlhf_rollout.engines import build_engine as build_engine
    from rlhf_rollout.generator import GenerationCounts as GenerationCounts
    from rlhf_rollout.generator import GroupResult as GroupResult
    from rlhf_rollout.generator import generate_groups as generate_groups
    from rlhf_rollout.protocols import Completion as Completion
    from rlhf_rollout.protocols import EngineHealth as EngineHealth
    from rlhf_rollout.protocols import RewardFunction as RewardFunction
    from rlhf_rollout.protocols import RolloutEngine as RolloutEngine
    from rlhf_rollout.protocols import SamplingParams as SamplingParams
    from rlhf_rollout.rewards.function import FunctionReward as FunctionReward
    from rlhf_rollout.rewards.function import check_reward_function as check_reward_function
    from rlhf_rollout.router import EngineRouter as EngineRouter
    from rlhf_rollout.weights.bucket import TensorSlot as TensorSlot
    from rlhf_rollout.weights.bucket import WeightBucket as WeightBucket

__all__, __getattr__ = lazy_exports(__name__, __file__)
