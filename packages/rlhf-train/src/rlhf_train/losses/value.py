"""The critic's loss, one number per token, before masking and reduction."""

import torch
from torch import Tensor

from rlhf_train.shapes import check_same_shape


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, value_clip: float | None) -> Tensor:
    """Return half the squared error of every value, or of the clipped value where that error is larger.

        loss_t = 1/2 max((V_t - R_t)^2, (old_t + clip(V_t - old_t, -c, c) - R_t)^2),   c = value_clip

    Args:
        values: [B, T] float, in reward units, from the current critic; carry the gradient.
        old_values: [B, T] float, from the critic before the step's first update; constants.
        returns: [B, T] float, the targets of the values; constants.
        value_clip: c > 0, or None for the plain squared error.

    Returns:
        [B, T] float, in squared reward units, for `token_mean`.

    Raises:
        ValueError: the tensors differ in shape.

    Source: the value clipping of the PPO implementation by Dhariwal et al. 2017 (OpenAI Baselines), as described by
    Engstrom et al. 2020, arXiv:2005.12729, sec. 3.
    """
    check_same_shape(values=values, old_values=old_values, returns=returns)
    old_values, returns = old_values.detach(), returns.detach()
    squared = (values - returns) ** 2
    if value_clip is None:
        return squared / 2
    clipped = old_values + (values - old_values).clamp(-value_clip, value_clip)
    return torch.maximum(squared, (clipped - returns) ** 2) / 2
