"""Held-out prompts."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from rlhf_cli.config.checks.messages import missing, without_effect
from rlhf_data.errors import ConfigError, with_hint

if TYPE_CHECKING:
    from rlhf_cli.config.ppo import PpoConfig

_OPTIONS = ("eval_steps", "eval_temperature", "eval_n_samples_per_prompt", "source_key")
_BETTER_WHEN_LOW = ("truncated", "response_tokens", "failed")


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
    notices, best = [], section.best_metric_key
    if best is not None and section.eval_steps < 1:
        notices.append("--best_metric_key has only the first and the last evaluation to choose from: --eval_steps -1")
    if best is not None and best.rpartition("/")[2] in _BETTER_WHEN_LOW:
        notices.append(f"--best_metric_key {best} keeps the highest value, and a lower one is usually better")
    return notices
