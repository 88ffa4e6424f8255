"""Data for reinforcement learning from feedback: records, prompts, chat templates, masks, packing, order.

Does not need torch.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_exports(package: str, names: Mapping[str, str]) -> tuple[list[str], Callable[[str], Any]]:
    """Return `__all__` and `__getattr__` of a package that imports a module when one of its names is first used.

    A command then imports only what it needs.

    Args:
        package: the package's name.
        names: by module of the package, the names that it exports, separated by spaces.
    """
    home = {name: module for module, listed in names.items() for name in listed.split()}

    def find(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{home[name]}"), name)

    return sorted(home), find


__all__, __getattr__ = lazy_exports(
    __name__,
    {
        "errors": (
            "CheckpointError ConfigError DataError EngineError FeatureError RewardError RlhfError WeightSyncError"
        ),
        "examples.load": "ExampleSet load_examples",
        "examples.preference": (
            "PreferenceEncoder PreferenceExample ProcessEncoder ProcessExample UnpairedEncoder UnpairedExample"
        ),
        "examples.sft": "SftEncoder SftExample",
        "packing": "pack split_balanced",
        "prompts": "PromptSet load_prompts",
        "records": "Episode FinishReason Prompt Rollout RolloutGroup Span SpanSource Verdict VerdictKind",
        "rows.row": "Row",
        "rows.sources": "Rows open_sources",
        "sampler": "EpochSampler",
    },
)
