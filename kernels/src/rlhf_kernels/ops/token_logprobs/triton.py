"""Fused `token_logprobs`: one pass over the logits forward, one backward, nothing of width V kept but the logits."""

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

MAX_BLOCK_SIZE = 4096


def token_logprobs_triton(logits: Tensor, token_ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return log-probs [N] and entropies [N] as `token_logprobs` does, which checks the arguments."""
    if logits.stride(-1) != 1:
        logits = logits.contiguous()
    return _TokenLogprobs.apply(logits, token_ids.contiguous(), temperature)


@triton.jit
def _forward_kernel(
    logits_ptr,
    token_ids_ptr,
    logprobs_ptr,
    entropy_ptr,
    max_ptr,
    log_sum_ptr,
    row_stride,
    vocab_size,
    inv_temperature,
    BLOCK_SIZE: tl.constexpr,  # noqa: N803
):
    """One row a program: keeps m = max z, s = sum e^c and u = sum c e^c so far, where c = (z - m) / temperature."""
    row = tl.program_id(0).to(tl.int64)
    token_id = tl.load(token_ids_ptr + row)
    if token_id < 0:
        tl.store(logprobs_ptr + row, 0.0)
        tl.store(entropy_ptr + row, 0.0)
        return

    row_ptr = logits_ptr + row * row_stride
    m = -3.0e38
    s = 0.0
    u = 0.0
    for start in range(0, vocab_size, BLOCK_SIZE):
        columns = start + tl.arange(0, BLOCK_SIZE)
        z = tl.load(row_ptr + columns, mask=columns < vocab_size, other=float("-inf")).to(tl.float32)
        new_m = tl.maximum(m, tl.max(z, axis=0))
        shift = (m - new_m) * inv_temperature
        centered = (z - new_m) * inv_temperature
        weight = tl.exp(centered)
        scale = tl.exp(shift)
        # Sums that are still empty are kept out of the products: the first shift may be infinite.
        u = tl.where(s > 0, (u + shift * s) * scale, 0.0) + tl.sum(tl.where(weight > 0, centered * weight, 0.0), axis=0)
        s = tl.where(s > 0, s * scale, 0.0) + tl.sum(weight, axis=0)
        m = new_m

    in_vocabulary = token_id < vocab_size
    token_logit = tl.load(row_ptr + token_id, mask=in_vocabulary, other=float("nan")).to(tl.float32)
    log_sum = tl.log(s)
    # Kept apart, m and log s lose no digits however large the logits are; their sum would.
    tl.store(logprobs_ptr + row, (token_logit - m) * inv_temperature - log_sum)
    tl.store(entropy_ptr + row, log_sum - u / s)
    tl.store(max_ptr + row, m)
    tl.store(log_sum_ptr + row, log_sum)


@triton.jit
def _backward_kernel(
    logits_ptr,
    token_ids_ptr,
    entropy_ptr,
    max_ptr,
    log_sum_ptr,
    grad_logprobs_ptr,
    grad_entropy_ptr,
    grad_logits_ptr,
    row_stride,
    grad_row_stride,
    vocab_size,
    inv_temperature,
    BLOCK_SIZE: tl.constexpr,  # noqa: N803
):
    """One block of one row a program: recomputes log p from the logits and writes the gradient in their dtype."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    valid = columns < vocab_size
    grad_ptrs = grad_logits_ptr + row * grad_row_stride + columns
    token_id = tl.load(token_ids_ptr + row)
    if token_id < 0:
        tl.store(grad_ptrs, tl.zeros([BLOCK_SIZE], tl.float32).to(grad_logits_ptr.dtype.element_ty), mask=valid)
        return

    m = tl.load(max_ptr + row)
    log_sum = tl.load(log_sum_ptr + row)
    entropy = tl.load(entropy_ptr + row)
    grad_logprob = tl.load(grad_logprobs_ptr + row)
    grad_entropy = tl.load(grad_entropy_ptr + row)

    logits = tl.load(logits_ptr + row * row_stride + columns, mask=valid, other=float("-inf"))
    logp = (logits.to(tl.float32) - m) * inv_temperature - log_sum
    p = tl.exp(logp)
    chosen = tl.where(columns == token_id, 1.0, 0.0)
    surprise = tl.where(p > 0, logp + entropy, 0.0)
    grad = (grad_logprob * (chosen - p) - grad_entropy * p * surprise) * inv_temperature
    tl.store(grad_ptrs, grad.to(grad_logits_ptr.dtype.element_ty), mask=valid)


class _TokenLogprobs(torch.autograd.Function):
    """Keeps the logits and four numbers a row for the backward pass."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, token_ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        num_rows, vocab_size = logits.shape
        logprobs, entropy, row_max, log_sum = (
            torch.empty(num_rows, dtype=torch.float32, device=logits.device) for _ in range(4)
        )
        if num_rows:
            with _on_device(logits):
                _forward_kernel[(num_rows,)](
                    logits,
                    token_ids,
                    logprobs,
                    entropy,
                    row_max,
                    log_sum,
                    logits.stride(0),
                    vocab_size,
                    1.0 / temperature,
                    BLOCK_SIZE=_block_size(vocab_size),
                    num_warps=8,
                )
        ctx.save_for_backward(logits, token_ids, entropy, row_max, log_sum)
        ctx.temperature = temperature
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor, None, None]:
        logits, token_ids, entropy, row_max, log_sum = ctx.saved_tensors
        num_rows, vocab_size = logits.shape
        grad_logits = torch.empty((num_rows, vocab_size), dtype=logits.dtype, device=logits.device)
        block_size = _block_size(vocab_size)
        if num_rows:
            with _on_device(logits):
                _backward_kernel[(num_rows, triton.cdiv(vocab_size, block_size))](
                    logits,
                    token_ids,
                    entropy,
                    row_max,
                    log_sum,
                    grad_logprobs.contiguous(),
                    grad_entropy.contiguous(),
                    grad_logits,
                    logits.stride(0),
                    grad_logits.stride(0),
                    vocab_size,
                    1.0 / ctx.temperature,
                    BLOCK_SIZE=block_size,
                    num_warps=8,
                )
        return grad_logits, None, None


def _block_size(vocab_size: int) -> int:
    return min(MAX_BLOCK_SIZE, max(16, triton.next_power_of_2(vocab_size)))


def _on_device(tensor: Tensor) -> contextlib.AbstractContextManager:
    """Triton launches on the current device, which need not be the tensor's."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()
