"""Data for reinforcement learning from feedback: records, prompts, chat templates, masks, packing, order.

Does not need torch.
"""

import ast
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_data.errors import CheckpointError as CheckpointError
    from rlhf_data.errors import ConfigError as ConfigError
    from rlhf_data.errors import DataError as DataError
    from rlhf_data.errors import EngineError as EngineError
    from rlhf_data.errors import FeatureError as FeatureError
    from rlhf_data.errors import RewardError as RewardError
    from rlhf_data.errors import RlhfError as RlhfError
    from rlhf_data.errors import WeightSyncError as WeightSyncError
    from rlhf_data.examples.load import ExampleSet as ExampleSet
    from rlhf_data.examples.load import load_examples as load_examples
    from rlhf_data.examples.preference import PreferenceEncoder as PreferenceEncoder
    from rlhf_data.examples.preference import PreferenceExample as PreferenceExample
    from rlhf_data.examples.preference import ProcessEncoder as ProcessEncoder
    from rlhf_data.examples.preference import ProcessExample as ProcessExample
    from rlhf_data.examples.preference import UnpairedEncoder as UnpairedEncoder
    from rlhf_data.examples.preference import UnpairedExample as UnpairedExample
    from rlhf_data.examples.sft import SftEncoder as SftEncoder
    from rlhf_data.examples.sft import SftExample as SftExample
    from rlhf_data.packing import pack as pack
    from rlhf_data.packing import split_balanced as split_balanced
    from rlhf_data.prompts import PromptSet as PromptSet
    from rlhf_data.prompts import load_prompts as load_prompts
    from rlhf_data.records import Episode as Episode
    from rlhf_data.records import FinishReason as FinishReason
    from rlhf_data.records import Prompt as Prompt
    from rlhf_data.records import Rollout as Rollout
    from rlhf_data.records import RolloutGroup as RolloutGroup
    from rlhf_data.records import Span as Span
    from rlhf_data.records import SpanSource as SpanSource
    from rlhf_data.records import Verdict as Verdict
    from rlhf_data.records import VerdictKind as VerdictKind
    from rlhf_data.rows.row import Row as Row
    from rlhf_data.rows.sources import Rows as Rows
    from rlhf_data.rows.sources import open_sources as open_sources
    from rlhf_data.sampler import EpochSampler as EpochSampler


def lazy_exports(package: str, file: str) -> tuple[list[str], Callable[[str], Any]]:
    """Return `__all__` and `__getattr__` of a package that imports a module when one of its names is first used.

    A command then imports only what it needs. The names are those that `file`, the package's `__init__.py`, imports
    for type checkers.
    """
    lines = ast.parse(Path(file).read_text(encoding="utf-8")).body
    [exports] = (line.body for line in lines if isinstance(line, ast.If) and ast.unparse(line.test) == "TYPE_CHECKING")
    home = {name.name: line.module for line in exports for name in line.names}

    def find(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(home[name]), name)

    return sorted(home), find


__all__, __getattr__ = lazy_exports(__name__, __file__)
