"""Fused `merge_attention_`: one pass that reads both outputs and writes one."""

import triton
import triton.language as tl
from torch import Tensor

from rlhf_kernels.dispatch import on_device

BLOCK_ELEMENTS = 4096  # of an output per program


# Numbers and addresses that depend on the number of queries: Triton would compile once more for multiples of 16.
@triton.jit(
    do_not_specialize=["num_queries", "lse_ptr", "other_lse_ptr", "mask_ptr", "lse_stride_h", "other_lse_stride_h"]
)
def _merge_kernel(
    output_ptr,
    lse_ptr,
    other_ptr,
    other_lse_ptr,
    mask_ptr,
    num_queries,
    output_stride_n,
    output_stride_h,
    other_stride_n,
    other_stride_h,
    lse_stride_h,
    other_lse_stride_h,
    HAS_MASK: tl.constexpr,  # noqa: N803
    NUM_DIMS: tl.constexpr,  # noqa: N803
    BLOCK_N: tl.constexpr,  # noqa: N803
    BLOCK_D: tl.constexpr,  # noqa: N803
):
    """Merge a block of queries of one head per program."""
    head = tl.program_id(1).to(tl.int64)
    query = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    dim = tl.arange(0, BLOCK_D)
    is_query = query < num_queries
    if HAS_MASK:
        is_query = is_query & (tl.load(mask_ptr + query, mask=is_query, other=0) != 0)
    valid = is_query[:, None] & (dim < NUM_DIMS)[None, :]
    lse = tl.load(lse_ptr + head * lse_stride_h + query, mask=is_query, other=0.0)
    other_lse = tl.load(other_lse_ptr + head * other_lse_stride_h + query, mask=is_query, other=0.0)
    largest = tl.maximum(lse, other_lse)
    weight = tl.exp(lse - largest)
    other_weight = tl.exp(other_lse - largest)
    total = weight + other_weight
    place = output_ptr + head * output_stride_h + query[:, None] * output_stride_n + dim[None, :]
    other_place = other_ptr + head * other_stride_h + query[:, None] * other_stride_n + dim[None, :]
    output = tl.load(place, mask=valid, other=0.0).to(tl.float32)
    other = tl.load(other_place, mask=valid, other=0.0).to(tl.float32)
    merged = (weight / total)[:, None] * output + (other_weight / total)[:, None] * other
    tl.store(place, merged.to(output_ptr.dtype.element_ty), mask=valid)
    tl.store(lse_ptr + head * lse_stride_h + query, largest + tl.log(total), mask=is_query)


def merge_attention_triton_(
    output: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor, mask: Tensor | None = None
) -> None:
    """Merge in place. `merge_attention_` has checked the arguments."""
    num_queries, num_heads, num_dims = output.shape
    block_dims = triton.next_power_of_2(num_dims)
    block_queries = max(BLOCK_ELEMENTS // block_dims, 1)
    with on_device(output):
        _merge_kernel[(triton.cdiv(num_queries, block_queries), num_heads)](
            output,
            lse,
            other,
            other_lse,
            lse if mask is None else mask,
            num_queries,
            *output.stride()[:2],
            *other.stride()[:2],
            lse.stride(0),
            other_lse.stride(0),
            HAS_MASK=mask is not None,
            NUM_DIMS=num_dims,
            BLOCK_N=block_queries,
            BLOCK_D=block_dims,
        )
