"""AdamW with moments in bfloat16: 4 bytes per trained weight instead of 8.

DeepSpeed's `bf16_optimizer_states` does not fit: it needs master weights and gradients in bfloat16, too, and rounds to
nearest. Changes of the second moment below half a unit in its last place, 0.2 to 0.4 %, are then lost: it would neither
grow nor shrink to the mean square of the gradients. Stochastic rounding keeps its mean exact.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rlhf_kernels import adamw_bf16_moments_


class Bf16MomentsAdamW(torch.optim.AdamW):
    """AdamW whose moments are in bfloat16, and whose weights are in float32.

    The noise of rounding depends on the number of the update and on positions in a tensor, and on nothing else: a
    resumed run gets that of an uninterrupted one, and ranks that keep the same weights get the same.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update the weights."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    moments = (torch.zeros_like(weight, dtype=torch.bfloat16) for _ in range(2))
                    state |= {"step": torch.zeros(()), **dict(zip(("exp_avg", "exp_avg_sq"), moments, strict=True))}
                state["step"] += 1
                update_(group, int(state["step"]), weight, weight.grad, state["exp_avg"], state["exp_avg_sq"])


def update_(group: Mapping[str, Any], num_updates: int, *tensors: Tensor, start: int = 0) -> None:
    """Make an update with the settings of a parameter group; see `adamw_bf16_moments_`."""
    settings = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
    adamw_bf16_moments_(*tensors, num_updates=num_updates, start=start, **settings)
