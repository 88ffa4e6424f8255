"""The interface of a training engine, and the learning-rate schedule."""

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
    """Trains one model on all data-parallel ranks.

    Each loss passed to `backward` is a share: the shares of all micro-batches and ranks add up to the loss of the
    update. The engine therefore sums gradients over micro-batches and ranks, and never averages them.
    """

    module: torch.nn.Module
    device: torch.device

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Add the gradient of `loss` to the gradients of this update. Collective.

        `is_last` is True for the last micro-batch of the update, after which `step` is called.
        """

    def step(self) -> StepStats:
        """Update the weights and clear the gradients. Collective.

        If the norm of the gradient is not finite, weights, optimizer states and schedule stay as they are on all ranks.
        """


def learning_rate_at(spec: OptimizerSpec, step: int) -> float:
    """Return the learning rate of update number `step`, counted from 0.

    The rate rises linearly over `warmup_steps` updates. It then stays constant, falls linearly to 0, or falls along
    half a cosine to `min_lr_ratio` times the peak. The fall ends at update `total_steps`; the rate is constant after
    it. Raises ValueError for an unknown scheduler.
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
