"""Sums kept in a wider dtype than what is added to them."""

import torch
from torch import Tensor

from rlhf_kernels.dispatch import FLOATS, takes_triton
from rlhf_kernels.ops.accumulate.reference import accumulate_reference_


def accumulate_(total: Tensor, part: Tensor) -> None:
    """Add `part` to `total` in place, as gradients of micro-batches are added up.

        total_n = total_n + part_n

    Args:
        total: float32, of any shape, contiguous.
        part: bfloat16, float16 or float32, as many elements in the same order.

    Raises:
        ValueError: a wrong shape, dtype, device or layout.
    """
    if total.dtype != torch.float32 or part.dtype not in FLOATS:
        message = "accumulate_ adds bfloat16, float16 or float32 to float32"
        raise ValueError(f"{message}; got {part.dtype} and {total.dtype}")
    if total.numel() != part.numel() or total.device != part.device:
        shapes = f"{list(part.shape)} on {part.device} and {list(total.shape)} on {total.device}"
        raise ValueError(f"accumulate_ takes as many elements as there are sums, on one device; got {shapes}")
    if not total.is_contiguous():
        raise ValueError("accumulate_ needs contiguous sums, which it changes in place")
    if takes_triton("accumulate_", total):
        from rlhf_kernels.ops.accumulate.triton import accumulate_triton_

        return accumulate_triton_(total, part)
    return accumulate_reference_(total, part)
