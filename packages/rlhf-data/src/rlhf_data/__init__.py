"""Data for reinforcement learning from feedback: records, prompts, chat templates, masks, packing, order.

Does not need torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

_MODULES = (
    "errors",
    "records",
    "rows.row",
    "rows.sources",
    "prompts",
    "examples.load",
    "examples.sft",
    "examples.preference",
    "packing",
    "sampler",
)


def __getattr__(name: str) -> Any:
    """Import the modules on first use, so that a command imports only what it needs."""
    if name in __all__:
        modules = (import_module(f"rlhf_data.{module}") for module in _MODULES)
        return next(getattr(module, name) for module in modules if hasattr(module, name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
