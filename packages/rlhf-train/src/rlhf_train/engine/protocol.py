"""What a loop over data needs of an engine that trains one model."""

import math
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from rlhf_train.specs import OptimizerSpec


class StepStats(NamedTuple):
    """One update: the global L2 norm of the gradient before clipping, and the learning rate."""

    grad_norm: float
    learning_rate: float


class TrainEngine(Protocol):
    """Trains one model over the data-parallel ranks. Losses come in as shares that add up over micro-batches and ranks:
    the engine sums gradients and never averages them."""

    module: torch.nn.Module
    device: torch.device

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Add the gradient of `loss`; `is_last` says that `step` comes next. Collective."""

    def step(self) -> StepStats:
        """Update the weights and clear the gradients. Collective."""


def learning_rate_at(spec: OptimizerSpec, step: int) -> float:
    """Return the learning rate of update number `step`, counted from 0.

    Linear warm-up over `warmup_steps`, then constant, linear to 0, or half a cosine to `min_lr_ratio` of the peak at
    `total_steps`; the end value from there on. Raises ValueError for an unknown scheduler.
    """
    if step < spec.warmup_steps:
        return spec.learning_rate * (step + 1) / (spec.warmup_steps + 1)
    progress = min((step - spec.warmup_steps) / max(spec.total_steps - spec.warmup_steps, 1), 1.0)
    if spec.scheduler == "constant":
        return spec.learning_rate
    if spec.scheduler == "linear":
        return spec.learning_rate * (1 - progress)
    if spec.scheduler == "cosine_with_min_lr":
        cosine = (1 + math.cos(math.pi * progress)) / 2
        return spec.learning_rate * (spec.min_lr_ratio + (1 - spec.min_lr_ratio) * cosine)
    raise ValueError(f"unknown scheduler {spec.scheduler!r}: constant, linear or cosine_with_min_lr")
