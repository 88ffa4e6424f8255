"""Data for reinforcement learning from feedback: records, prompts, chat templates, masks, packing, order.

Does not need torch.
"""

from rlhf_data.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    EngineError,
    FeatureError,
    RewardError,
    RlhfError,
    WeightSyncError,
)
from rlhf_data.examples.load import ExampleSet, load_examples
from rlhf_data.examples.preference import (
    PreferenceEncoder,
    PreferenceExample,
    ProcessEncoder,
    ProcessExample,
    UnpairedEncoder,
    UnpairedExample,
)
from rlhf_data.examples.sft import SftEncoder, SftExample
from rlhf_data.packing import pack, split_balanced
from rlhf_data.prompts import PromptSet, load_prompts
from rlhf_data.records import (
    Episode,
    FinishReason,
    Prompt,
    Rollout,
    RolloutGroup,
    Span,
    SpanSource,
    Verdict,
    VerdictKind,
)
from rlhf_data.rows.row import Row
from rlhf_data.rows.sources import Rows, open_sources
from rlhf_data.sampler import EpochSampler

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "EngineError",
    "Episode",
    "EpochSampler",
    "ExampleSet",
    "FeatureError",
    "FinishReason",
    "PreferenceEncoder",
    "PreferenceExample",
    "ProcessEncoder",
    "ProcessExample",
    "Prompt",
    "PromptSet",
    "RewardError",
    "RlhfError",
    "Rollout",
    "RolloutGroup",
    "Row",
    "Rows",
    "SftEncoder",
    "SftExample",
    "Span",
    "SpanSource",
    "UnpairedEncoder",
    "UnpairedExample",
    "Verdict",
    "VerdictKind",
    "WeightSyncError",
    "load_examples",
    "load_prompts",
    "open_sources",
    "pack",
    "split_balanced",
]
