"""AdamW in float64 with its schedule, without an optimizer of torch."""

import dataclasses
import math

from torch import Tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adam:
    """AdamW with decay of matrices only, clipping by the global norm, and a schedule."""

    learning_rate: float
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-4
    weight_decay: float = 0.0
    max_norm: float = 0.0
    scheduler: str = "constant"
    warmup_steps: int = 0
    total_steps: int = 1
    min_lr_ratio: float = 0.1

    def step(self, weight: Tensor, gradient: Tensor, moments: list[Tensor], rate: float, count: int) -> None:
        """Change a weight and its moments in place, in its update number `count`, from 1."""
        beta1, beta2 = self.betas
        moments[0] = beta1 * moments[0] + (1 - beta1) * gradient
        moments[1] = beta2 * moments[1] + (1 - beta2) * gradient**2
        mean, square = moments[0] / (1 - beta1**count), moments[1] / (1 - beta2**count)
        decay = self.weight_decay if weight.ndim > 1 else 0.0
        weight -= rate * (decay * weight + mean / (square.sqrt() + self.eps))

    def rate(self, step: int) -> float:
        """Return the learning rate of an update, counted from 0."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / (self.warmup_steps + 1)
        done = min((step - self.warmup_steps) / max(self.total_steps - self.warmup_steps, 1), 1.0)
        floor = self.min_lr_ratio
        share = {
            "constant": 1.0,
            "linear": 1 - done,
            "cosine_with_min_lr": floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done)),
        }[self.scheduler]
        return self.learning_rate * share
