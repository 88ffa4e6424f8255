"""Sums in float32 of tensors in a narrower dtype."""

import torch
from torch import Tensor

from rlhf_kernels.dispatch import FLOATS, takes_triton
from rlhf_kernels.ops.accumulate.reference import accumulate_reference_


def accumulate_(total: Tensor, part: Tensor) -> None:
    """Add `part` to `total` in place. Used to accumulate the gradients of micro-batches.

        total_n = total_n + part_n

    Args:
        total: float32, any shape, contiguous.
        part: bfloat16, float16 or float32, with as many elements as `total`, in the same order.

    Raises:
        ValueError: a wrong shape, dtype, device or layout.
    """
    if total.dtype != torch.float32 or part.dtype not in FLOATS:
        message = "accumulate_ adds bfloat16, float16 or float32 to float32"
        raise ValueError(f"{message}; got {part.dtype} and {total.dtype}")
    if total.numel() != part.numel() or total.device != part.device:
        shapes = f"{list(part.shape)} on {part.device} and {list(total.shape)} on {total.device}"
        raise ValueError(f"accumulate_ takes two tensors of equal size on one device; got {shapes}")
    if not total.is_contiguous():
        raise ValueError("accumulate_ changes `total` in place and needs it contiguous; got a strided view")
    if takes_triton("accumulate_", total):
        from rlhf_kernels.ops.accumulate.triton import accumulate_triton_

        return accumulate_triton_(total, part)
    return accumulate_reference_(total, part)
