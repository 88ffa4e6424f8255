"""Batches, epochs, optimizers."""

import math
from collections.abc import Collection

from rlhf_data.checks import without_effect
from rlhf_data.errors import ConfigError
from rlhf_data.options import Section, flag, one_of, with_defaults
from rlhf_train.specs import OptimizerSpec

Scheduler = one_of(("cosine_with_min_lr", "linear", "constant"))


class TrainingSection(Section, title="training"):
    """What all trainers have in common."""

    train_batch_size: int = flag(128, "samples an optimizer step, over all processes", ge=1)
    micro_train_batch_size: int = flag(8, "samples a forward-backward pass, on one training process", ge=1)
    adam_betas: tuple[float, float] = flag((0.9, 0.95), "AdamW's two betas")
    l2: float = flag(0.0, "AdamW's weight decay; norms and biases have none", ge=0)
    max_norm: float = flag(1.0, "gradients are scaled down to this global norm; 0: no limit", ge=0)
    lr_scheduler: Scheduler = flag("cosine_with_min_lr", "the learning rate after warm-up")
    lr_warmup_ratio: float = flag(0.03, "share of the optimizer steps with linear warm-up", ge=0, le=1)
    min_lr_ratio: float = flag(
        0.1, "learning rate at the end of cosine_with_min_lr, as a share of its peak", ge=0, le=1
    )
    zero_stage: int = flag(2, "DeepSpeed ZeRO stage", ge=0, le=3)
    seed: int = flag(42, "of everything that is drawn", ge=0, le=2**31 - 1)

    def check(self, given: Collection[str]) -> list[str]:
        """Return notices about the schedule. Raises ConfigError unless AdamW's betas are in [0, 1)."""
        if not all(0 <= beta < 1 for beta in self.adam_betas):
            raise ConfigError(f"--adam_betas is {self.adam_betas}; both must lie in [0, 1)")
        has_no_end = self.lr_scheduler != "cosine_with_min_lr"
        return without_effect(given, (has_no_end, ["min_lr_ratio"], f"--lr_scheduler is {self.lr_scheduler}"))

    def optimizer(self, learning_rate: float, total_steps: int) -> OptimizerSpec:
        """Return the optimizer of a model that takes `total_steps` steps."""
        return OptimizerSpec(
            learning_rate=learning_rate,
            betas=self.adam_betas,
            weight_decay=self.l2,
            max_norm=self.max_norm,
            scheduler=self.lr_scheduler,
            warmup_steps=math.ceil(self.lr_warmup_ratio * total_steps),
            total_steps=total_steps,
            min_lr_ratio=self.min_lr_ratio,
        )


class PpoTrainingSection(TrainingSection):
    """Rounds of generation and training."""

    max_epochs: int = flag(1, "passes over the samples of a step", ge=1)
    num_episodes: int = flag(1, "passes over the prompts", ge=1)
    train_steps: int | None = flag(
        None, "rounds of generation and training at most; None: as many as --num_episodes needs", ge=1
    )
    freezing_actor_steps: int = flag(-1, "steps at the start in which only the critic learns; -1: none", ge=-1)
    enable_ema: bool = flag(False, "save, too, a running average of the policy's weights")
    ema_beta: float = flag(0.992, "share of the average that stays at a step", ge=0, lt=1)
    actor_learning_rate: float = flag(1e-6, "peak learning rate of the policy", ge=0)
    critic_learning_rate: float = flag(9e-6, "peak learning rate of the critic", ge=0)


class OfflineTrainingSection(TrainingSection):
    """Passes over the examples."""

    max_epochs: int = flag(1, "passes over the examples", ge=1)
    learning_rate: float = flag(5e-6, "peak learning rate", ge=0)
    micro_batch_tokens: int | None = flag(
        None, "tokens a pass at most, in the place of --micro_train_batch_size; with --packing_samples", ge=2
    )


class RewardTrainingSection(with_defaults(OfflineTrainingSection, learning_rate=9e-6)):
    """Defaults for reward models."""


class CautiousTrainingSection(with_defaults(OfflineTrainingSection, learning_rate=1e-6)):
    """Defaults for objectives that need a low learning rate."""


class OfflineEvaluationSection(Section, title="evaluation"):
    """Held-out examples."""

    eval_steps: int = flag(
        -1, "steps between runs over --eval_dataset; -1: only before the first and after the last", ge=-1
    )
    best_metric_key: str | None = flag(
        None, "save, too, the model with the best such number, for example eval/loss; None: the last only"
    )
