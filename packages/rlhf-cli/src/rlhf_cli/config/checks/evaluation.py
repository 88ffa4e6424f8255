"""Held-out prompts."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from rlhf_cli.config.checks.messages import missing, without_effect
from rlhf_data.errors import ConfigError, with_hint

if TYPE_CHECKING:
    from rlhf_cli.config.ppo import PpoConfig

_OPTIONS = ("eval_steps", "eval_temperature", "eval_n_samples_per_prompt", "source_key")


def check_evaluation(config: PpoConfig, given: Collection[str]) -> list[str]:
    """Check how held-out prompts are answered and what is made of it; return notices."""
    section = config.evaluation
    if config.data.eval_data is None:
        if section.best_metric_key is not None:
            raise missing("eval_data", f"--best_metric_key {section.best_metric_key} is measured on it", "add it")
        return without_effect(_OPTIONS, given, "there is no --eval_data")
    if section.eval_temperature == 0 and section.eval_n_samples_per_prompt > 1:
        message = f"--eval_n_samples_per_prompt is {section.eval_n_samples_per_prompt} at --eval_temperature 0"
        raise ConfigError(with_hint(f"{message}: greedy responses are all the same", "use 1 sample, or a temperature"))
    if section.best_metric_key is not None and section.eval_steps < 1:
        return ["--best_metric_key has only the first and the last evaluation to choose from: --eval_steps is -1"]
    return []
