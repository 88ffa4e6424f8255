"""Batches, epochs, optimizers."""

import math
from typing import ClassVar

from pydantic import Field

from rlhf_cli.config.base import Section, one_of
from rlhf_train.specs import OptimizerSpec

Scheduler = one_of(("cosine_with_min_lr", "linear", "constant"))


class TrainingSection(Section):
    """What all trainers have in common."""

    TITLE: ClassVar[str] = "training"

    train_batch_size: int = Field(128, ge=1, description="samples an optimizer step, over all processes")
    micro_train_batch_size: int = Field(8, ge=1, description="samples a forward-backward pass, on one training process")
    adam_betas: tuple[float, float] = Field((0.9, 0.95), description="AdamW's two betas")
    l2: float = Field(0.0, ge=0, description="AdamW's weight decay; norms and biases have none")
    max_norm: float = Field(1.0, ge=0, description="gradients are scaled down to this global norm; 0: no limit")
    lr_scheduler: Scheduler = Field("cosine_with_min_lr", description="the learning rate after warm-up")
    lr_warmup_ratio: float = Field(0.03, ge=0, le=1, description="share of the optimizer steps with linear warm-up")
    min_lr_ratio: float = Field(
        0.1, ge=0, le=1, description="learning rate at the end of cosine_with_min_lr, as a share of its peak"
    )
    zero_stage: int = Field(2, ge=0, le=3, description="DeepSpeed ZeRO stage")
    seed: int = Field(42, ge=0, le=2**31 - 1, description="of everything that is drawn")

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

    max_epochs: int = Field(1, ge=1, description="passes over the samples of a step")
    num_episodes: int = Field(1, ge=1, description="passes over the prompts")
    max_steps: int | None = Field(None, ge=1, description="steps at most; None: as --num_episodes says")
    freezing_actor_steps: int = Field(
        -1, ge=-1, description="steps at the start in which only the critic learns; -1: none"
    )
    enable_ema: bool = Field(False, description="save, too, a running average of the policy's weights")
    ema_beta: float = Field(0.992, ge=0, lt=1, description="share of the average that stays at a step")
    actor_learning_rate: float = Field(1e-6, ge=0, description="peak learning rate of the policy")
    critic_learning_rate: float = Field(9e-6, ge=0, description="peak learning rate of the critic")


class OfflineTrainingSection(TrainingSection):
    """Passes over the examples."""

    max_epochs: int = Field(1, ge=1, description="passes over the examples")
    learning_rate: float = Field(5e-6, ge=0, description="peak learning rate")
    micro_batch_tokens: int | None = Field(
        None,
        ge=2,
        description="tokens a pass at most, in the place of --micro_train_batch_size; with --packing_samples",
    )


class RewardTrainingSection(OfflineTrainingSection):
    """Of a reward model."""

    learning_rate: float = Field(9e-6, ge=0, description="peak learning rate")


class CautiousTrainingSection(OfflineTrainingSection):
    """Of what moves far at little."""

    learning_rate: float = Field(1e-6, ge=0, description="peak learning rate")


class OfflineEvaluationSection(Section):
    """Held-out examples."""

    TITLE: ClassVar[str] = "evaluation"

    eval_steps: int = Field(
        -1, ge=-1, description="steps between runs over --eval_dataset; -1: only before the first and after the last"
    )
    best_metric_key: str | None = Field(
        None, description="save, too, the model with the best such number, for example eval/loss; None: the last only"
    )
