"""Turns prompts into scored rollouts: engines, rewards, and a generator that accounts for every sample. No torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

_MODULES = ("protocols", "agents", "engines", "generator", "rewards.function", "router", "weights.bucket")


def __getattr__(name: str) -> Any:
    """Import the modules on first use, so that a command imports only what it needs."""
    if name in __all__:
        modules = (import_module(f"rlhf_rollout.{module}") for module in _MODULES)
        return next(getattr(module, name) for module in modules if hasattr(module, name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
