"""Fused `linear_policy_loss`: chunks of the gradient by the logits, between the two products that read it.

The product with the head writes a row's exponentials, and never logits. The row's gradient is a multiple of these, that
the other products' factors take; or, with an entropy's, made of them in place. float16 is too narrow for them, and not
every GPU has the product: there cuBLAS writes logits, and the kernels of `token_logprobs` make them their gradient.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlhf_kernels.dispatch import on_device
from rlhf_kernels.ops.linear_token_logprobs import product
from rlhf_kernels.ops.packed_policy_loss.triton import launch_policy, scaled_gradients
from rlhf_kernels.ops.token_logprobs.triton import LN_2, NUM_SUMS, add_sums, write_gradient

CHUNK_BYTES = 506 << 20  # of all that is made of a chunk; with the numbers of 65,536 tokens, under 0.5 GiB
ROW_ALIGNMENT = 64  # logits; rows that start at odd addresses slow the products down
BLOCK_SIZE = 1024  # columns of a row at a time, of what the kernels here write


@triton.jit
def _scale_rows_kernel(matrix_ptr, grads_ptr, totals_ptr, width, by, BLOCK: tl.constexpr):  # noqa: N803
    """One block of one row a program, in place; a row without a gradient becomes 0, whatever it holds."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    scale = tl.load(grads_ptr + row) / tl.load(totals_ptr + row) * by
    at = matrix_ptr + row * width + column
    value = tl.load(at, mask=column < width).to(tl.float32)
    tl.store(at, tl.where(scale == 0.0, 0.0, value * scale).to(matrix_ptr.dtype.element_ty), mask=column < width)


@triton.jit
def _gradient_kernel(
    e_ptr, ids_ptr, sums_ptr, grads_ptr, e_stride, sums_stride, grads_stride, vocab_size, inv_temperature,
    BLOCK: tl.constexpr  # noqa: N803
):  # fmt: skip
    """One block of one row a program: the gradient by logits, of log-prob and entropy, over their exponentials."""
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    sums, at = sums_ptr + row, e_ptr + row * e_stride + columns
    reference, s = tl.load(sums), tl.load(sums + sums_stride)
    u, own = tl.load(sums + 2 * sums_stride), tl.load(sums + 3 * sums_stride)
    by_logprob = tl.load(grads_ptr + row) * inv_temperature
    by_entropy = tl.load(grads_ptr + row + grads_stride) * inv_temperature * LN_2
    is_own = columns == tl.load(ids_ptr + row)  # which holds its exponential less the sum
    e = tl.load(at, mask=columns < vocab_size, other=0.0).to(tl.float32)
    c = tl.where(is_own, own - reference, tl.log2(e))
    c = tl.maximum(c, -1e4, propagate_nan=tl.PropagateNan.ALL)  # -inf times 0 would be NaN
    gradient = tl.where(is_own, by_logprob, 0.0) - tl.exp2(c - tl.log2(s)) * (by_logprob + by_entropy * (c - u / s))
    tl.store(at, gradient.to(e_ptr.dtype.element_ty), mask=columns < vocab_size)


@torch.compiler.disable
def linear_policy_loss_triton(hidden: Tensor, weight: Tensor, *terms: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return loss, metrics, log-probs and entropy as `linear_policy_loss` does, which checks the arguments."""
    if not torch.is_grad_enabled():
        hidden, weight = hidden.detach(), weight.detach()
    return _LinearPolicyLoss.apply(hidden, weight, *terms)


class _LinearPolicyLoss(torch.autograd.Function):
    """Gradients are made in the forward pass; the backward pass only scales them."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, *terms: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        token_ids, temperature, stream, objective, weight_grad_dtype = terms
        token_ids = token_ids.contiguous()
        wants_hidden, wants_weight = hidden.requires_grad, weight.requires_grad
        wants_any = wants_hidden or wants_weight
        # Shares of a millionth would vanish in float16: there they are left to the backward pass.
        ctx.factor = 1.0 / stream.denominator(objective) if hidden.dtype == torch.float16 else 1.0
        by_product = hidden.dtype != torch.float16 and product.fits(hidden, weight)
        is_multiple = by_product and not objective.entropy_coef

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=hidden.device)

        # As in `token_logprobs`: sums, log-probs and entropies of rows; and the loss's gradient by these last two.
        sums, grads = empty(NUM_SUMS, len(hidden)), torch.zeros(3, len(hidden), device=hidden.device)
        logprobs, entropy = sums[4:6]
        width = triton.cdiv(len(weight), ROW_ALIGNMENT) * ROW_ALIGNMENT
        # Its logits, a copy of its hidden state, and the parts of three sums.
        row_bytes = (width + hidden.shape[1]) * hidden.itemsize + 12 * triton.cdiv(len(weight), product.TILE_COLUMNS)
        chunk_rows = max(CHUNK_BYTES // (row_bytes * product.TILE_ROWS), 1) * product.TILE_ROWS
        buffer = empty(min(chunk_rows, len(hidden)), width, dtype=hidden.dtype)
        ignored = (token_ids < 0)[:, None]
        marks = product.reference_sums((hidden, weight, None), token_ids, sums, temperature) if by_product else None
        chunks = [slice(start, start + chunk_rows) for start in range(0, max(len(hidden), 1), chunk_rows)]

        def fill_in(chunk: slice, gradient: bool) -> tuple[Tensor, Tensor]:
            """Find a chunk's log-probs and entropies; return its hidden states, and its logits or exponentials."""
            # A gradient of 0 times a hidden state that is not finite would be NaN.
            rows = hidden[chunk].masked_fill(ignored[chunk], 0.0)
            logits = buffer[: len(rows), : len(weight)]
            if by_product:
                beside = token_ids[chunk], marks[chunk.start // product.TILE_ROWS :], sums[:, chunk]
                product.head_sums((rows, weight, None), *beside, temperature, logits if gradient else None)
            else:
                torch.mm(rows, weight.t(), out=logits)
                add_sums(logits, None, token_ids[chunk], sums[:, chunk], temperature)
            return rows, logits

        if objective.policy_loss == "gspo" and wants_any:
            for chunk in chunks:  # its gradients need the log-probs of whole sequences
                fill_in(chunk, gradient=False)
        grad_hidden = empty(*hidden.shape, dtype=hidden.dtype) if wants_hidden else None
        grad_weight = empty(*weight.shape, dtype=weight_grad_dtype or weight.dtype) if wants_weight else None
        for chunk in chunks:
            rows, logits = fill_in(chunk, wants_any)
            # Until the last chunk these are right for the rows so far, and only the rows' gradients are used.
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
                    _scale_rows(rows, *scales)
                _add_product(grad_weight, logits.t(), rows, beta=min(chunk.start, 1))
            del rows  # before there are the next ones
        ctx.save_for_backward(grad_hidden, grad_weight.to(weight.dtype) if wants_weight else None)
        results = logprobs.clone(), entropy.clone()
        ctx.mark_non_differentiable(metrics, *results)
        return loss, metrics, *results

    backward = staticmethod(scaled_gradients)


def _write_gradient(exponentials: Tensor, token_ids: Tensor, sums: Tensor, grads: Tensor, temperature: float) -> None:
    """Write the gradient by logits over their exponentials, from that by the results."""
    num_rows, width = exponentials.shape
    if num_rows:
        strides = exponentials.stride(0), sums.stride(0), grads.stride(0)
        with on_device(exponentials):
            _gradient_kernel[(num_rows, triton.cdiv(width, BLOCK_SIZE))](
                exponentials, token_ids, sums, grads, *strides, width, 1.0 / temperature, BLOCK=BLOCK_SIZE
            )


def _scale_rows(matrix: Tensor, grads: Tensor, totals: Tensor, by: float) -> None:
    """Multiply each row of a dense matrix by its gradient over its total, times `by`."""
    if matrix.numel():
        with on_device(matrix):
            _scale_rows_kernel[(len(matrix), triton.cdiv(matrix.shape[1], BLOCK_SIZE))](
                matrix, grads, totals, matrix.shape[1], by, BLOCK=BLOCK_SIZE
            )


def _add_product(total: Tensor, left: Tensor, right: Tensor, beta: int) -> None:
    """Set total to beta total + left right, summed in its dtype."""
    options = {} if total.dtype == left.dtype else {"out_dtype": total.dtype}
    if options and not total.is_cuda:
        left, right, options = left.to(total.dtype), right.to(total.dtype), {}
    torch.addmm(total, left, right, beta=beta, out=total, **options)
