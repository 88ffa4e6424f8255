"""Optimizers, schedules, batches and what is saved."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from rlhf_cli.config.checks.messages import without_effect
from rlhf_data.errors import ConfigError, with_hint
from rlhf_train.algorithms import ALGORITHMS

if TYPE_CHECKING:
    from rlhf_cli.config.ppo import PpoConfig
    from rlhf_cli.config.training import TrainingSection


def check_betas(training: TrainingSection) -> None:
    """Raise ConfigError unless AdamW's betas are in [0, 1)."""
    if not all(0 <= beta < 1 for beta in training.adam_betas):
        raise ConfigError(f"--adam_betas is {training.adam_betas}; both must lie in [0, 1)")


def check_schedule(training: TrainingSection, given: Collection[str]) -> list[str]:
    """Return notices about the learning rate's schedule."""
    if training.lr_scheduler == "cosine_with_min_lr":
        return []
    return without_effect(["min_lr_ratio"], given, f"--lr_scheduler is {training.lr_scheduler}")


def check_batches(config: PpoConfig) -> None:
    """Raise ConfigError unless the samples of a step make whole optimizer steps."""
    num_rollouts = config.rollout.rollout_batch_size * config.rollout.n_samples_per_prompt
    size = config.training.train_batch_size
    if num_rollouts % size:
        divisor = max(number for number in range(1, min(size, num_rollouts) + 1) if num_rollouts % number == 0)
        message = (
            f"--train_batch_size is {size}, which does not divide the {num_rollouts} samples of a step"
            f" (--rollout_batch_size {config.rollout.rollout_batch_size} x --n_samples_per_prompt"
            f" {config.rollout.n_samples_per_prompt})"
        )
        raise ConfigError(with_hint(message, f"use --train_batch_size {divisor}"))


def check_training(config: PpoConfig, given: Collection[str]) -> list[str]:
    """Check what only some runs can freeze, average or save; return notices."""
    training, row = config.training, ALGORITHMS[config.algorithm.advantage_estimator]
    if training.freezing_actor_steps > 0 and not row.uses_critic:
        message = f"--freezing_actor_steps {training.freezing_actor_steps} trains the critic only, and {row.title}"
        raise ConfigError(with_hint(f"{message} ({row.name}) has none", "drop it, or use --advantage_estimator gae"))
    if training.enable_ema:
        return []
    return without_effect(["ema_beta"], given, "--enable_ema is off")
