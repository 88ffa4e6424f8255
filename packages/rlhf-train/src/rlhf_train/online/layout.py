"""Rollouts of a micro-batch as the model's input, packed or padded, and its output as one row a rollout again."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rlhf_models.batch import TokenBatch


def make_token_batch(tokens: Sequence[np.ndarray], *, packing: bool, device: torch.device) -> TokenBatch:
    """Return the rollouts' tokens as one packed row or as rows padded to the longest."""
    if packing:
        return TokenBatch.packed(list(tokens), device=device)
    return TokenBatch.padded(list(tokens), pad_id=0, device=device)


def to_rows(values: Tensor, lengths: Sequence[int], *, packing: bool, width: int) -> Tensor:
    """Return a model's output as [B, width], one rollout a row, 0.0 beyond its length; differentiable.

    Args:
        values: [1, N] when packed (N may exceed the sum of lengths by padding), else [B, T].
        lengths: tokens of each rollout.
        packing: which of the two layouts `values` has.
        width: columns wanted, at least the longest length.

    Returns:
        [B, width] of the dtype of `values`.
    """
    if not packing:
        return torch.nn.functional.pad(values, (0, width - values.shape[1]))
    rows = values[0, : sum(lengths)].split(list(lengths))
    return torch.stack([torch.nn.functional.pad(row, (0, width - len(row))) for row in rows])
