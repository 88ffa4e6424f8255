"""The plain torch twin of `merge_attention_`."""

import torch
from torch import Tensor


def merge_attention_reference_(
    output: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor, mask: Tensor | None = None
) -> None:
    """Merge the attention over other keys into `output` and `lse`, as `merge_attention_` does."""
    merged = torch.logaddexp(lse, other_lse)
    share = torch.exp(lse - merged).T[..., None]
    other_share = torch.exp(other_lse - merged).T[..., None]
    both = share * output.float() + other_share * other.float()
    if mask is not None:
        both = torch.where(mask[:, None, None] != 0, both, output.float())
        merged = torch.where(mask != 0, merged, lse)
    output.copy_(both)
    lse.copy_(merged)
