"""Data for reinforcement learning from feedback: records, prompts, chat templates, masks, packing, order. No torch."""

from rlhf_data.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    EngineError,
    RewardError,
    RlhfError,
    WeightSyncError,
)
from rlhf_data.packing import pack, split_balanced
from rlhf_data.prompts import PromptSet, load_prompts
from rlhf_data.records import FinishReason, Prompt, Rollout, RolloutGroup, Span, SpanSource, Verdict, VerdictKind
from rlhf_data.sampler import EpochSampler
from rlhf_data.sft import SftExample, SftSet, load_sft_examples
from rlhf_data.sources import Row, read_rows

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "EngineError",
    "EpochSampler",
    "FinishReason",
    "Prompt",
    "PromptSet",
    "RewardError",
    "RlhfError",
    "Rollout",
    "RolloutGroup",
    "Row",
    "SftExample",
    "SftSet",
    "Span",
    "SpanSource",
    "Verdict",
    "VerdictKind",
    "WeightSyncError",
    "load_prompts",
    "load_sft_examples",
    "pack",
    "read_rows",
    "split_balanced",
]
