"""Fused `linear_policy_loss`: computes the gradient with respect to the logits one chunk of tokens at a time.

Two matrix products read each chunk: one gives the gradient of the hidden states, the other that of the head's weight.

On Hopper GPUs the `product` module multiplies hidden states and head, and stores exponentials of logits in place of
logits. Without an entropy bonus, the gradient of a row is a multiple of its exponentials, so the factor is applied to
the small results of the two products. With an entropy bonus, `_gradient_kernel` turns exponentials into the gradient
in place. float16 is too narrow for the exponentials, and other GPUs lack the instructions: there cuBLAS writes logits
and the kernels of `token_logprobs` overwrite them with their gradient.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlhf_kernels.dispatch import on_device
from rlhf_kernels.ops.linear_token_logprobs import product
from rlhf_kernels.ops.linear_token_logprobs.triton import add_product
from rlhf_kernels.ops.packed_policy_loss.triton import launch_policy, scaled_gradients
from rlhf_kernels.ops.token_logprobs.triton import LN_2, NUM_SUMS, add_sums, write_gradient

# Memory per chunk of tokens. Together with the per-token results of 65,536 tokens it stays under 0.5 GiB.
CHUNK_BYTES = 506 << 20
ROW_ALIGNMENT = 64  # logits per row are padded to a multiple of this: unaligned rows slow the products down
BLOCK_SIZE = 1024  # columns per program of the kernels in this file


@triton.jit(do_not_specialize=["grads_ptr", "totals_ptr"])
def _scale_rows_kernel(matrix_ptr, grads_ptr, totals_ptr, width, by, BLOCK: tl.constexpr):  # noqa: N803
    """Scale one block of one row per program, in place. A row without gradient becomes 0, even if it holds NaN."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    # One float32 factor per row, so that the product is rounded once.
    scale = tl.load(grads_ptr + row) / tl.load(totals_ptr + row) * by
    at = matrix_ptr + row * width + column
    value = tl.load(at, mask=column < width).to(tl.float32)
    tl.store(at, tl.where(scale == 0.0, 0.0, value * scale).to(matrix_ptr.dtype.element_ty), mask=column < width)


@triton.jit(do_not_specialize=["sums_stride", "grads_stride"])
def _gradient_kernel(
    e_ptr, ids_ptr, sums_ptr, grads_ptr, e_stride, sums_stride, grads_stride, vocab_size, inv_temperature,
    BLOCK: tl.constexpr  # noqa: N803
):  # fmt: skip
    """Overwrite one block of one row of exponentials per program with the gradient with respect to the logits.

    With g and h the gradients of log-prob and entropy, T the temperature, i the token, and c the exponent in bits:

        grad z_v = (g [v = i] - p_v (g + h (c_v - u / s))) / T

    The exponent is the logarithm of the stored exponential, because the logits themselves were never stored.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    sums = sums_ptr + row
    at = e_ptr + row * e_stride + columns
    reference = tl.load(sums)
    s = tl.load(sums + sums_stride)
    u = tl.load(sums + 2 * sums_stride)
    own = tl.load(sums + 3 * sums_stride)
    by_logprob = tl.load(grads_ptr + row) * inv_temperature
    by_entropy = tl.load(grads_ptr + row + grads_stride) * inv_temperature * LN_2
    # The element of the row's own token holds its exponential minus the row's sum, so its logit comes from `sums`.
    is_own = columns == tl.load(ids_ptr + row)
    e = tl.load(at, mask=columns < vocab_size, other=0.0).to(tl.float32)
    c = tl.where(is_own, own - reference, tl.log2(e))
    c = tl.maximum(c, -1e4, propagate_nan=tl.PropagateNan.ALL)  # -inf times 0 would be NaN
    gradient = tl.where(is_own, by_logprob, 0.0) - tl.exp2(c - tl.log2(s)) * (by_logprob + by_entropy * (c - u / s))
    tl.store(at, gradient.to(e_ptr.dtype.element_ty), mask=columns < vocab_size)


@torch.compiler.disable
def linear_policy_loss_triton(
    hidden: Tensor, weight: Tensor, *terms: Any, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return loss, metrics, log-probs and entropy. `linear_policy_loss` has checked the arguments."""
    if not torch.is_grad_enabled():
        # autograd.Function sees requires_grad even under no_grad, and would compute gradients that nobody reads.
        hidden, weight = hidden.detach(), weight.detach()
    return _LinearPolicyLoss.apply(hidden, weight, bias, *terms)


class _LinearPolicyLoss(torch.autograd.Function):
    """Computes gradients in the forward pass, while the chunk is in memory. The backward pass only scales them."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, *terms: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        token_ids, temperature, stream, objective, weight_grad_dtype = terms
        bias = None if bias is None else bias.contiguous()
        token_ids = token_ids.contiguous()
        wants_hidden = hidden.requires_grad
        wants_weight = weight.requires_grad
        wants_any = wants_hidden or wants_weight
        # float16 has no room for a token's share of the loss, about 1e-6: the backward pass multiplies by it instead.
        ctx.factor = 1.0 / stream.denominator(objective) if hidden.dtype == torch.float16 else 1.0
        by_product = hidden.dtype != torch.float16 and product.fits(hidden, weight)
        is_multiple = by_product and not objective.entropy_coef

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=hidden.device)

        # `sums` has the layout of `token_logprobs`. `grads` holds the gradient of the loss with respect to log-prob,
        # entropy and log-sum-exp; the last stays 0.
        sums = empty(NUM_SUMS, len(hidden))
        grads = torch.zeros(3, len(hidden), device=hidden.device)
        logprobs, entropy = sums[4:6]
        chunks, buffer = _chunks(hidden, weight)
        ignored = (token_ids < 0)[:, None]
        marks = product.reference_sums((hidden, weight, bias), token_ids, sums, temperature) if by_product else None

        def fill_in(chunk: slice, gradient: bool) -> tuple[Tensor, Tensor]:
            """Compute a chunk's log-probs and entropies. Return its hidden states and its logits or exponentials."""
            # 0 times a hidden state that is not finite would put NaN into the weight's gradient.
            rows = hidden[chunk].masked_fill(ignored[chunk], 0.0)
            logits = buffer[: len(rows), : len(weight)]
            if by_product:
                beside = token_ids[chunk], marks[chunk.start // product.TILE_ROWS :], sums[:, chunk]
                product.head_sums((rows, weight, bias), *beside, temperature, logits if gradient else None)
            else:
                if bias is None:
                    torch.mm(rows, weight.t(), out=logits)
                else:
                    torch.addmm(bias, rows, weight.t(), out=logits)
                add_sums(logits, None, token_ids[chunk], sums[:, chunk], temperature)
            return rows, logits

        if objective.uses_sequence_ratio and wants_any:
            for chunk in chunks:  # the gradient needs the log-probs of whole sequences, which may span chunks
                fill_in(chunk, gradient=False)
        grad_hidden = empty(*hidden.shape, dtype=hidden.dtype) if wants_hidden else None
        grad_weight = empty(*weight.shape, dtype=weight_grad_dtype or weight.dtype) if wants_weight else None
        for chunk in chunks:
            rows, logits = fill_in(chunk, wants_any)
            # Before the last chunk, loss and metrics are partial; only the gradients of this chunk's rows are used.
            by_results = (grads[0], None if is_multiple else grads[1]) if wants_any else ()
            loss, metrics = launch_policy(logprobs, entropy, stream, objective, *by_results)
            beside = token_ids[chunk], sums[:, chunk], grads[:, chunk]
            if wants_any and by_product and not is_multiple:
                _write_gradient(logits, *beside, temperature)
            elif wants_any and not by_product:
                write_gradient(logits, None, *beside[:2], grads[:, chunk] / ctx.factor, logits, temperature)
            scales = grads[0, chunk], sums[1, chunk], -1.0 / temperature
            if wants_hidden:
                torch.mm(logits, weight, out=grad_hidden[chunk])
                if is_multiple:
                    _scale_rows(grad_hidden[chunk], *scales)
            if wants_weight:
                if is_multiple:
                    _scale_rows(rows, *scales)  # `rows` is a copy: the hidden states themselves stay as they are
                add_product(grad_weight, logits.t(), rows, beta=min(chunk.start, 1))
            del rows  # free this chunk's copy before the next one is made
        ctx.save_for_backward(grad_hidden, grad_weight.to(weight.dtype) if wants_weight else None)
        results = logprobs.clone(), entropy.clone()
        ctx.mark_non_differentiable(metrics, *results)
        return loss, metrics, *results

    backward = staticmethod(scaled_gradients)


def _chunks(hidden: Tensor, weight: Tensor) -> tuple[list[slice], Tensor]:
    """Return chunks of tokens, at least one, and memory for the logits of the largest of them."""
    width = triton.cdiv(len(weight), ROW_ALIGNMENT) * ROW_ALIGNMENT
    # A row of a chunk takes its logits, a copy of its hidden state, and the partial sums of three quantities.
    row_bytes = (width + hidden.shape[1]) * hidden.itemsize + 12 * triton.cdiv(len(weight), product.TILE_COLUMNS)
    chunk_rows = max(CHUNK_BYTES // (row_bytes * product.TILE_ROWS), 1) * product.TILE_ROWS
    chunks = [slice(start, start + chunk_rows) for start in range(0, max(len(hidden), 1), chunk_rows)]
    return chunks, hidden.new_empty(min(chunk_rows, len(hidden)), width)


def _write_gradient(exponentials: Tensor, token_ids: Tensor, sums: Tensor, grads: Tensor, temperature: float) -> None:
    """Overwrite exponentials [N, V] with the gradient of the logits, from the gradients `grads` of the results."""
    num_rows, width = exponentials.shape
    if num_rows:
        strides = exponentials.stride(0), sums.stride(0), grads.stride(0)
        with on_device(exponentials):
            _gradient_kernel[(num_rows, triton.cdiv(width, BLOCK_SIZE))](
                exponentials, token_ids, sums, grads, *strides, width, 1.0 / temperature, BLOCK=BLOCK_SIZE
            )


def _scale_rows(matrix: Tensor, grads: Tensor, totals: Tensor, by: float) -> None:
    """Multiply each row n of a dense matrix, in place, by grads[n] / totals[n] * by."""
    if matrix.numel():
        with on_device(matrix):
            _scale_rows_kernel[(len(matrix), triton.cdiv(matrix.shape[1], BLOCK_SIZE))](
                matrix, grads, totals, matrix.shape[1], by, BLOCK=BLOCK_SIZE
            )
