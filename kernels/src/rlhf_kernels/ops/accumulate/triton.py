"""Fused `accumulate_`: one pass that reads each element once and writes each sum once."""

import triton
import triton.language as tl
from torch import Tensor

from rlhf_kernels.dispatch import on_device

BLOCK_SIZE = 4096


@triton.jit
def _accumulate_kernel(total_ptr, part_ptr, size, BLOCK_SIZE: tl.constexpr):  # noqa: N803
    """Add one block of elements per program."""
    # 64 bits: the sums of a large model's gradients have more than 2^31 elements.
    index = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    valid = index < size
    total = tl.load(total_ptr + index, mask=valid)
    part = tl.load(part_ptr + index, mask=valid)
    tl.store(total_ptr + index, total + part.to(tl.float32), mask=valid)


def accumulate_triton_(total: Tensor, part: Tensor) -> None:
    """Add `part` to `total` in place. `accumulate_` has checked the arguments."""
    size = total.numel()
    if size:
        with on_device(total):
            _accumulate_kernel[(triton.cdiv(size, BLOCK_SIZE),)](total, part.contiguous(), size, BLOCK_SIZE=BLOCK_SIZE)
