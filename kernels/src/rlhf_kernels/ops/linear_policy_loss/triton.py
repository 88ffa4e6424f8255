"""Fused `linear_policy_loss`: chunks of logits that become their own gradient in place, between cuBLAS products.

Where each row's gradient is a multiple of its probabilities, a row is read once, and written as exponentials before its
sum is known; the products' other factors take the multiple. An entropy's gradient is none, and float16 is too narrow:
there the kernels of `token_logprobs` read each row twice.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlhf_kernels.dispatch import on_device
from rlhf_kernels.ops.packed_policy_loss.triton import launch_policy, scaled_gradients
from rlhf_kernels.ops.token_logprobs.triton import LN_2, LOG2_E, NUM_SUMS, add_sums, write_gradient

CHUNK_BYTES = 480 << 20  # of logits and of a product of theirs at a time; with what cuBLAS takes, under 0.5 GiB
TILE_ROWS = 128  # of the products: chunks of full tiles
ROW_ALIGNMENT = 64  # logits; rows that start at odd addresses slow the products down
BLOCK_SIZE, NUM_WARPS = 4096, 8  # logits of a row at a time, and warps a row
# In bits: an exponential is at most 2 to this power. The sum of as many as a vocabulary has, times a weight, is finite
# in float32, and its reciprocal times a gradient is no subnormal number.
MAX_EXPONENT = tl.constexpr(60.0)
SCALE_BLOCK_SIZE = 1024  # columns of a matrix whose rows are scaled


@triton.jit
def _exponents(z, scale, top):
    """Return z scale - top, rounded once; a NaN stays one, and -inf, which times 0 would be NaN, becomes -1e4."""
    return tl.maximum(z * scale - top, -1e4, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _exponentials_kernel(
    logits_ptr, token_ids_ptr, totals_ptr, logprobs_ptr, entropy_ptr, row_stride, vocab_size, inv_temperature,
    GRADIENT: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """One row a program: log-prob and entropy; and over the logits, to the row's padded width, what divided by the
    row's total is the gradient of -log-prob."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    dtype: tl.constexpr = logits_ptr.dtype.element_ty
    lanes: tl.constexpr = BLOCK // VECTOR
    columns = tl.arange(0, lanes)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    token_id = tl.load(token_ids_ptr + row)
    if token_id < 0:
        tl.store(totals_ptr + row, 1.0)
        tl.store(logprobs_ptr + row, 0.0)
        tl.store(entropy_ptr + row, 0.0)
        if GRADIENT:
            for start in range(0, row_stride, BLOCK):
                zeros = tl.zeros([lanes, VECTOR], dtype)
                tl.store(row_ptr + start + columns, zeros, mask=start + columns < row_stride)
        return

    token_logit = tl.load(row_ptr + token_id, mask=token_id < vocab_size, other=float("nan")).to(tl.float32)
    scale = inv_temperature * LOG2_E
    top = tl.full((), -3.0e38, tl.float32)
    s, u = tl.zeros([lanes], tl.float32), tl.zeros([lanes], tl.float32)
    for start in range(0, row_stride, BLOCK):
        z = tl.load(row_ptr + start + columns, mask=start + columns < vocab_size, other=float("-inf")).to(tl.float32)
        highest = tl.max(tl.max(z, axis=1), axis=0) * scale
        if highest - top > MAX_EXPONENT:  # as for the first block, and hardly ever again
            shift = top - highest
            factor = tl.exp2(shift)
            if GRADIENT:
                for before in range(0, start, BLOCK):
                    e = tl.load(row_ptr + before + columns).to(tl.float32) * factor
                    tl.store(row_ptr + before + columns, e.to(dtype))
            s, u, top = s * factor, (u + shift * s) * factor, highest
        c = _exponents(z, scale, top)
        e = tl.exp2(c)
        if GRADIENT:
            tl.store(row_ptr + start + columns, e.to(dtype), mask=start + columns < row_stride)
        s, u = s + tl.sum(e, axis=1), u + tl.sum(c * e, axis=1)
    total, weighted = tl.sum(s, axis=0), tl.sum(u, axis=0)
    log_sum = tl.log2(total) * LN_2
    tl.store(totals_ptr + row, total)
    tl.store(logprobs_ptr + row, (token_logit * scale - top) * LN_2 - log_sum)
    tl.store(entropy_ptr + row, log_sum - weighted / total * LN_2)
    if GRADIENT:
        tl.debug_barrier()  # the token's element is written once more, by one thread, after all others
        own = tl.exp2(_exponents(token_logit, scale, top)) - total
        tl.store(row_ptr + token_id, own.to(dtype), mask=token_id < vocab_size)


@triton.jit
def _scale_rows_kernel(
    matrix_ptr, grads_ptr, totals_ptr, out_ptr, stride, column_stride, width, by, BLOCK: tl.constexpr  # noqa: N803
):  # fmt: skip
    """One block of one row a program; a row without a gradient becomes 0, whatever it holds."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    scale = tl.load(grads_ptr + row) / tl.load(totals_ptr + row) * by
    value = tl.load(matrix_ptr + row * stride + column.to(tl.int64) * column_stride, mask=column < width)
    value = tl.where(scale == 0.0, 0.0, value.to(tl.float32) * scale)
    tl.store(out_ptr + row * width + column, value.to(out_ptr.dtype.element_ty), mask=column < width)


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
        once = hidden.dtype != torch.float16 and not objective.entropy_coef

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=hidden.device)

        # As in `token_logprobs`: sums, log-probs and entropies of rows; and the loss's gradient by these last two.
        sums, grads = empty(NUM_SUMS, len(hidden)), torch.zeros(3, len(hidden), device=hidden.device)
        logprobs, entropy = sums[4:6]
        width = triton.cdiv(len(weight), ROW_ALIGNMENT) * ROW_ALIGNMENT
        row_bytes = width * hidden.itemsize + (4 * hidden.shape[1] if once else 0)
        chunk_rows = max(CHUNK_BYTES // (row_bytes * TILE_ROWS), 1) * TILE_ROWS
        buffer = empty(min(chunk_rows, len(hidden)), width, dtype=hidden.dtype)
        chunks = [slice(start, start + chunk_rows) for start in range(0, max(len(hidden), 1), chunk_rows)]

        def logits_of(chunk: slice, gradient: bool) -> Tensor:
            """Return a chunk's logits, or exponentials in their place, having filled in log-probs and entropies."""
            logits = buffer[: len(hidden[chunk]), : len(weight)]
            torch.mm(hidden[chunk], weight.t(), out=logits)
            if once:
                _exponentials(logits, token_ids[chunk], sums[:, chunk], temperature, gradient)
            else:
                add_sums(logits, None, token_ids[chunk], sums[:, chunk], temperature)
            return logits

        if objective.policy_loss == "gspo" and wants_any:
            for chunk in chunks:  # its gradients need the log-probs of whole sequences
                logits_of(chunk, gradient=False)
        grad_hidden = empty(*hidden.shape, dtype=hidden.dtype) if wants_hidden else None
        grad_weight = empty(*weight.shape, dtype=weight_grad_dtype or weight.dtype) if wants_weight else None
        for chunk in chunks:
            logits, rows = logits_of(chunk, wants_any), hidden[chunk]
            if wants_any:  # what else there is of rows without log-probs as yet is not used
                launch_policy(logprobs, entropy, stream, objective, grads[0], grads[1] if not once else None)
            scales = (grads[0, chunk], sums[1, chunk], -1.0 / temperature)
            if wants_any and not once:
                by_row = grads[:, chunk] / ctx.factor
                write_gradient(logits, None, token_ids[chunk], sums[:, chunk], by_row, logits, temperature)
            if wants_hidden and once:
                _scale_rows(_wide_product(logits, weight), *scales, grad_hidden[chunk])
            elif wants_hidden:
                torch.mm(logits, weight, out=grad_hidden[chunk])
            if wants_weight:
                if once:
                    rows = _scale_rows(rows, *scales, empty(*rows.shape, dtype=rows.dtype))
                else:  # a gradient of 0 times a hidden state that is not finite would be NaN
                    rows = rows.masked_fill((token_ids[chunk] < 0)[:, None], 0.0)
                _add_product(grad_weight, logits.t(), rows, beta=min(chunk.start, 1))
        loss, metrics = launch_policy(logprobs, entropy, stream, objective)
        ctx.save_for_backward(grad_hidden, grad_weight.to(weight.dtype) if wants_weight else None)
        results = logprobs.clone(), entropy.clone()
        ctx.mark_non_differentiable(metrics, *results)
        return loss, metrics, *results

    backward = staticmethod(scaled_gradients)


def _exponentials(logits: Tensor, token_ids: Tensor, sums: Tensor, temperature: float, gradient: bool) -> None:
    """Fill in totals, log-probs and entropies of rows of logits, and write exponentials over these for a gradient."""
    if len(logits):
        sizes = (logits.stride(0), logits.shape[1], 1.0 / temperature)
        options = {"BLOCK": BLOCK_SIZE, "VECTOR": 16 // logits.itemsize, "num_warps": NUM_WARPS}
        with on_device(logits):
            _exponentials_kernel[(len(logits),)](
                logits, token_ids, sums[1], sums[4], sums[5], *sizes, GRADIENT=gradient, **options
            )


def _scale_rows(matrix: Tensor, grads: Tensor, totals: Tensor, by: float, out: Tensor) -> Tensor:
    """Return `out`, filled with each row of a matrix times its gradient, over its total, times `by`."""
    if matrix.numel():
        grid = len(matrix), triton.cdiv(matrix.shape[1], SCALE_BLOCK_SIZE)
        with on_device(matrix):
            _scale_rows_kernel[grid](
                matrix, grads, totals, out, *matrix.stride(), matrix.shape[1], by, BLOCK=SCALE_BLOCK_SIZE
            )
    return out


def _wide_product(left: Tensor, right: Tensor) -> Tensor:
    """Return left right in float32, as it was summed."""
    if left.is_cuda and left.dtype != torch.float32:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def _add_product(total: Tensor, left: Tensor, right: Tensor, beta: int) -> None:
    """Set total to beta total + left right, summed in its dtype."""
    options = {} if total.dtype == left.dtype else {"out_dtype": total.dtype}
    if options and not total.is_cuda:
        left, right, options = left.to(total.dtype), right.to(total.dtype), {}
    torch.addmm(total, left, right, beta=beta, out=total, **options)
