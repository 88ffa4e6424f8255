"""Fused `adamw_bf16_moments_`: one pass that reads four tensors and writes three."""

import triton
import triton.language as tl
from torch import Tensor

from rlhf_kernels.dispatch import on_device
from rlhf_kernels.ops.adamw_bf16_moments.reference import Factors

BLOCK_SIZE = 1024


@triton.jit
def _rounded(value, noise):
    """Return bfloat16 numbers, which are the upper 16 bits of float32 ones, whose lower 16 bits carry with noise."""
    bits = (value.to(tl.uint32, bitcast=True) + noise) >> 16
    return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)


# Numbers that change with every launch: Triton would compile once more for multiples of 16.
@triton.jit(do_not_specialize=["seed", "start"])
def _adamw_kernel(
    weight_ptr,
    gradient_ptr,
    average_ptr,
    square_ptr,
    gain1,
    gain2,
    step_size,
    scale,
    eps,
    keep,
    seed,
    start,
    size,
    BLOCK_SIZE: tl.constexpr,  # noqa: N803
):
    """Update one block of elements per program."""
    # 64 bits: the states of a large model have more than 2^31 elements.
    index = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    valid = index < size
    gradient = tl.load(gradient_ptr + index, mask=valid, other=0.0).to(tl.float32)
    average = tl.load(average_ptr + index, mask=valid, other=0.0).to(tl.float32)
    square = tl.load(square_ptr + index, mask=valid, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + index, mask=valid, other=0.0)
    average += gain1 * (gradient - average)
    square += gain2 * (gradient * gradient - square)
    weight = weight * keep - step_size * (average / (tl.sqrt(square) * scale + eps))
    noise = (index + start).to(tl.uint32) ^ seed.to(tl.uint32)
    noise = (noise ^ (noise >> 16)) * 0x7FEB352D
    noise = (noise ^ (noise >> 15)) * 0x846CA68B
    noise = noise ^ (noise >> 16)
    tl.store(weight_ptr + index, weight, mask=valid)
    tl.store(average_ptr + index, _rounded(average, noise & 0xFFFF), mask=valid)
    tl.store(square_ptr + index, _rounded(square, noise >> 16), mask=valid)


def adamw_bf16_moments_triton_(
    weight: Tensor, gradient: Tensor, average: Tensor, square: Tensor, factors: Factors, start: int
) -> None:
    """Update in place. `adamw_bf16_moments_` has checked the arguments."""
    size = weight.numel()
    # Positions count modulo 2^32, and a Python number below 2^31 has another type for Triton than one above.
    *numbers, seed = factors
    seed, start = (number - (number >> 31 << 32) for number in (seed, start & 0xFFFFFFFF))
    if size:
        with on_device(weight):
            _adamw_kernel[(triton.cdiv(size, BLOCK_SIZE),)](
                weight, gradient.contiguous(), average, square, *numbers, seed, start, size, BLOCK_SIZE=BLOCK_SIZE
            )
