"""Turns prompts into scored rollouts: engines, rewards, and a generator that accounts for every sample. No torch."""

from rlhf_data import lazy_exports

__all__, __getattr__ = lazy_exports(
    __name__,
    {
        "agents": "SingleTurn Workflow",
        "engines": "ENGINE_KINDS EngineSpec build_engine",
        "generator": "GenerationCounts GroupResult generate_groups",
        "protocols": "Completion EngineHealth RewardFunction RolloutEngine SamplingParams",
        "rewards.function": "FunctionReward check_reward_function",
        "router": "EngineRouter",
        "weights.bucket": "TensorSlot WeightBucket",
    },
)
