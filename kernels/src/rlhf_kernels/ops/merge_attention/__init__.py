"""The attention over two sets of keys, from the attention over each of them."""

import torch
from torch import Tensor

from rlhf_kernels.dispatch import FLOATS, takes_triton
from rlhf_kernels.ops.merge_attention.reference import merge_attention_reference_


def merge_attention_(
    output: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor, *, mask: Tensor | None = None
) -> None:
    """Change `output` and `lse` in place to those of attention over the keys of both.

        merged_lse = log(exp(lse) + exp(other_lse))
        output     = exp(lse - merged_lse) * output + exp(other_lse - merged_lse) * other
        lse        = merged_lse

    Args:
        output: [N, H, D] float, softmax-weighted values of N queries in H heads over the first keys; D contiguous.
        lse: [H, N] float32, natural logarithm of the sum of the exponentiated scores; N contiguous.
        other, other_lse: the same over the other keys.
        mask: [N] int32, contiguous: queries with 0 keep their output and sum, whatever the others are; None merges all.

    Raises:
        ValueError: a wrong shape, dtype, device or layout.
    """
    num_queries, num_heads, _ = _checked(output, other)
    for name, sums in (("lse", lse), ("other_lse", other_lse)):
        if sums.shape != (num_heads, num_queries) or sums.dtype != torch.float32 or sums.device != output.device:
            message = f"{name} must be [{num_heads}, {num_queries}] float32 on {output.device}"
            raise ValueError(f"{message}; got {list(sums.shape)} {sums.dtype} on {sums.device}")
    if output.stride(2) != 1 or other.stride(2) != 1 or lse.stride(1) != 1 or other_lse.stride(1) != 1:
        raise ValueError("merge_attention_ needs outputs contiguous in D, and sums contiguous in N")
    if mask is not None:
        is_wrong = mask.shape != (num_queries,) or mask.dtype != torch.int32 or mask.device != output.device
        if is_wrong or not mask.is_contiguous():
            message = f"mask must be [{num_queries}] int32 on {output.device}, contiguous"
            raise ValueError(f"{message}; got {list(mask.shape)} {mask.dtype} on {mask.device}")
    if takes_triton("merge_attention_", output):
        from rlhf_kernels.ops.merge_attention.triton import merge_attention_triton_

        return merge_attention_triton_(output, lse, other, other_lse, mask)
    return merge_attention_reference_(output, lse, other, other_lse, mask)


def _checked(output: Tensor, other: Tensor) -> tuple[int, int, int]:
    """Return N, H and D of two outputs. Raises ValueError unless they are alike."""
    if output.ndim != 3 or output.shape != other.shape or not output.numel():
        raise ValueError(f"merge_attention_ takes two outputs [N, H, D]; got {list(output.shape)}, {list(other.shape)}")
    if output.dtype not in FLOATS or output.dtype != other.dtype or output.device != other.device:
        got = f"{output.dtype} on {output.device} and {other.dtype} on {other.device}"
        raise ValueError(f"merge_attention_ takes outputs of one float dtype on one device; got {got}")
    return tuple(output.shape)
