"""What all commands that learn from fixed examples have in common."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from rlhf_cli.config.checks.messages import missing, without_effect
from rlhf_cli.config.checks.training import check_betas, check_schedule
from rlhf_cli.config.data import parse_probs
from rlhf_data.errors import ConfigError, with_hint

if TYPE_CHECKING:
    from rlhf_cli.config.offline import OfflineConfig


def check_offline(config: OfflineConfig, given: Collection[str]) -> list[str]:
    """Check the sections that all such configurations have; return notices. Raises ConfigError."""
    model, data, training, evaluation = config.model, config.data, config.training, config.evaluation
    if model.pretrain is None:
        hint = "--pretrain builtin is the tiny model that ships"
        raise missing("pretrain", "there must be a model to start from", hint)
    if data.dataset is None:
        raise missing("dataset", "there must be examples", "add --dataset FILE.jsonl and the keys of its rows")
    parse_probs("dataset_probs", data.dataset_probs)
    check_betas(training)
    notices = check_schedule(training, given)
    if not model.lora_rank:
        notices += without_effect(["lora_alpha", "lora_dropout", "target_modules"], given, "--lora_rank is 0")
    if training.micro_batch_tokens is not None:
        if not model.packing_samples:
            message = "--micro_batch_tokens limits packed sequences only"
            raise ConfigError(with_hint(message, "add --packing_samples, or use --micro_train_batch_size"))
        notices += without_effect(["micro_train_batch_size"], given, "--micro_batch_tokens takes its place")
    if data.eval_dataset is None:
        if evaluation.best_metric_key is not None:
            raise missing("eval_dataset", f"--best_metric_key {evaluation.best_metric_key} is measured on it", "add it")
        notices += without_effect(["eval_steps", "eval_split"], given, "there is no --eval_dataset")
    elif evaluation.best_metric_key is not None and evaluation.eval_steps < 1:
        notices.append("--best_metric_key has only the first and the last evaluation to choose from: --eval_steps -1")
    return notices
