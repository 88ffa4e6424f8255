"""Fused `linear_policy_loss`: chunks of logits that become their own gradient in place, between cuBLAS products.

Where each row's gradient is a multiple of its probabilities, a row is read once, and written as exponentials before its
sum is known; the products' other factors take the multiple. An entropy's gradient is none, and float16 is too narrow:
there a row is read twice.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlhf_kernels.ops.packed_policy_loss.triton import (
    kl_terms,
    launch_policy,
    loss_options,
    policy_terms,
    ratio_of,
    scaled_gradients,
)
from rlhf_kernels.ops.token_logprobs.triton import LN_2, LOG2_E, _on_device

CHUNK_BYTES = 480 << 20  # of logits at a time; with what cuBLAS takes it stays under 0.5 GiB
TILE_ROWS = 128  # of the products: chunks of full tiles
ROW_ALIGNMENT = 64  # logits; rows that start at odd addresses slow the products down
# Logits of a block, bytes of it that a lane has, and warps a row. A row that is read twice has a multiprocessor for
# itself, so that the second reading finds it in the L2 cache.
READ_ONCE, READ_TWICE = (4096, 16, 8), (16_384, 32, 32)
# In bits: an exponential is at most 2 to this power. The sum of as many as a vocabulary has, times a weight, is finite
# in float32, and its reciprocal times a gradient is no subnormal number.
MAX_EXPONENT = tl.constexpr(60.0)
SCALE_BLOCK_SIZE = 1024  # columns of a matrix whose rows are scaled


@triton.jit
def _load(row_ptr, columns, vocab_size, MASKED: tl.constexpr):  # noqa: N803
    """Return logits as float32, -inf past the vocabulary, which only a row's last block reaches."""
    if MASKED:
        return tl.load(row_ptr + columns, mask=columns < vocab_size, other=float("-inf")).to(tl.float32)
    return tl.load(row_ptr + columns).to(tl.float32)


@triton.jit
def _exponents(z, scale, top, CLAMPED: tl.constexpr):  # noqa: N803
    """Return c = z scale - top, rounded once. A NaN stays one; CLAMPED, -inf, which times 0 would be NaN, is -1e4."""
    c = z * scale - top
    return tl.maximum(c, -1e4, propagate_nan=tl.PropagateNan.ALL) if CLAMPED else c


@triton.jit
def _add_to_lanes(z, top, s, u, scale, CLAMPED: tl.constexpr):  # noqa: N803
    """Take logits [lanes, VECTOR] into each lane's top = max z scale, s = sum 2^c and u = sum c 2^c, c in bits."""
    new_top = tl.maximum(top, tl.max(z, axis=1) * scale)
    c = _exponents(z, scale, new_top[:, None], CLAMPED)
    e = tl.exp2(c)
    shift = top - new_top
    kept = tl.exp2(shift)
    return new_top, s * kept + tl.sum(e, axis=1), (u + shift * s) * kept + tl.sum(c * e, axis=1)


@triton.jit
def _sum_of_lanes(top, s, u):
    """Return the top, s and u of all lanes together."""
    highest = tl.max(top, axis=0)
    shift = top - highest
    kept = tl.exp2(shift)
    return highest, tl.sum(s * kept, axis=0), tl.sum((u + shift * s) * kept, axis=0)


@triton.jit
def _gradient(z, top, log_total, constant, slope, scale, ENTROPY: tl.constexpr, CLAMPED: tl.constexpr):  # noqa: N803
    """Return p (constant + slope c), c = z scale - top in bits and p = 2^(c - log_total)."""
    c = _exponents(z, scale, top, CLAMPED)
    return tl.exp2(c - log_total) * (constant + slope * c if ENTROPY else constant)


@triton.jit
def _by_logprob(
    logprob, row, share, old_ptr, advantages_ptr, ref_ptr, factors_ptr, kl_coef, ratio_low, ratio_high, dual_clip,
    LOSS: tl.constexpr, KL: tl.constexpr, UNBIASED: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Return the loss's derivative by a token's log-prob."""
    grad = tl.load(factors_ptr + row)
    if LOSS != "gspo":  # whose whole derivative is known here, from a first pass over all tokens
        log_ratio = 0.0 * logprob if old_ptr is None else logprob - tl.load(old_ptr + row).to(tl.float32)
        advantage = tl.load(advantages_ptr + row).to(tl.float32)
        ratio = ratio_of(log_ratio)
        _, slope, _ = policy_terms(logprob, log_ratio, ratio, advantage, ratio_low, ratio_high, dual_clip, LOSS)
        grad = grad * slope
        if ref_ptr is not None:
            _, slope = kl_terms(log_ratio, logprob - tl.load(ref_ptr + row).to(tl.float32), KL, UNBIASED)
            grad += share * kl_coef * slope
    return grad


@triton.jit
def _zero(row_ptr, columns, row_stride, BLOCK: tl.constexpr):  # noqa: N803
    for start in range(0, row_stride, BLOCK):
        zeros = tl.zeros(columns.shape, row_ptr.dtype.element_ty)
        tl.store(row_ptr + start + columns, zeros, mask=start + columns < row_stride)


@triton.jit
def _exponentials_kernel(
    logits_ptr, token_ids_ptr, old_ptr, advantages_ptr, ref_ptr, factors_ptr, shares_ptr, logprobs_ptr, entropy_ptr,
    scales_ptr, first_row, row_stride, vocab_size, inv_temperature, gradient_scale, kl_coef,
    ratio_low, ratio_high, dual_clip,
    LOSS: tl.constexpr, KL: tl.constexpr, UNBIASED: tl.constexpr,  # noqa: N803
    GRADIENT: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """One row a program: log-prob and entropy, and over the logits what, times the row's scale, is the gradient."""
    row_ptr = logits_ptr + tl.program_id(0).to(tl.int64) * row_stride
    row = first_row + tl.program_id(0)
    lanes: tl.constexpr = BLOCK // VECTOR
    columns = tl.arange(0, lanes)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    token_id = tl.load(token_ids_ptr + row)
    if token_id < 0:
        tl.store(logprobs_ptr + row, 0.0)
        tl.store(entropy_ptr + row, 0.0)
        if GRADIENT:
            tl.store(scales_ptr + row, 0.0)
            _zero(row_ptr, columns, row_stride, BLOCK)
        return

    token_logit = tl.load(row_ptr + token_id, mask=token_id < vocab_size, other=float("nan")).to(tl.float32)
    scale = inv_temperature * LOG2_E
    top = tl.full((), -3.0e38, tl.float32)
    s, u = tl.zeros([lanes], tl.float32), tl.zeros([lanes], tl.float32)
    for start in range(0, row_stride, BLOCK):
        z = _load(row_ptr, start + columns, vocab_size, True)
        highest = tl.max(tl.max(z, axis=1), axis=0) * scale
        if highest - top > MAX_EXPONENT:  # as for the first block, and hardly ever again
            shift = top - highest
            factor = tl.exp2(shift)
            if GRADIENT:
                for before in range(0, start, BLOCK):
                    e = tl.load(row_ptr + before + columns).to(tl.float32) * factor
                    tl.store(row_ptr + before + columns, e.to(logits_ptr.dtype.element_ty))
            s, u, top = s * factor, (u + shift * s) * factor, highest
        c = _exponents(z, scale, top, True)
        e = tl.exp2(c)
        if GRADIENT:
            tl.store(row_ptr + start + columns, e.to(logits_ptr.dtype.element_ty), mask=start + columns < row_stride)
        s, u = s + tl.sum(e, axis=1), u + tl.sum(c * e, axis=1)
    total, weighted = tl.sum(s, axis=0), tl.sum(u, axis=0)
    log_sum = tl.log2(total) * LN_2
    logprob = (token_logit * scale - top) * LN_2 - log_sum
    tl.store(logprobs_ptr + row, logprob)
    tl.store(entropy_ptr + row, log_sum - weighted / total * LN_2)
    if GRADIENT:
        grad = _by_logprob(
            logprob, row, tl.load(shares_ptr + row), old_ptr, advantages_ptr, ref_ptr, factors_ptr, kl_coef,
            ratio_low, ratio_high, dual_clip, LOSS, KL, UNBIASED
        )  # fmt: skip
        tl.store(scales_ptr + row, -grad * gradient_scale * inv_temperature / total)
        tl.debug_barrier()  # the token's element is written once more, by one thread, after all others
        own = tl.exp2(_exponents(token_logit, scale, top, True)) - total
        tl.store(row_ptr + token_id, own.to(logits_ptr.dtype.element_ty), mask=token_id < vocab_size)


@triton.jit
def _rows_kernel(
    logits_ptr, token_ids_ptr, old_ptr, advantages_ptr, ref_ptr, factors_ptr, shares_ptr, logprobs_ptr, entropy_ptr,
    first_row, row_stride, vocab_size, inv_temperature, gradient_scale, kl_coef, entropy_coef,
    ratio_low, ratio_high, dual_clip,
    LOSS: tl.constexpr, KL: tl.constexpr, UNBIASED: tl.constexpr,  # noqa: N803
    GRADIENT: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """One row a program: log-prob and entropy, then the loss's gradient over the logits. A lane has VECTOR neighbouring
    columns of each block and sums of its own until the row is through. Rows are written to their padded width."""
    row_ptr = logits_ptr + tl.program_id(0).to(tl.int64) * row_stride
    row = first_row + tl.program_id(0)
    lanes: tl.constexpr = BLOCK // VECTOR
    columns = tl.arange(0, lanes)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    token_id = tl.load(token_ids_ptr + row)
    if token_id < 0:
        tl.store(logprobs_ptr + row, 0.0)
        tl.store(entropy_ptr + row, 0.0)
        if GRADIENT:
            _zero(row_ptr, columns, row_stride, BLOCK)
        return

    token_logit = tl.load(row_ptr + token_id, mask=token_id < vocab_size, other=float("nan")).to(tl.float32)
    whole = vocab_size // BLOCK * BLOCK
    scale = inv_temperature * LOG2_E
    # Only float16 is so narrow that sound logits can become -inf.
    clamped: tl.constexpr = logits_ptr.dtype.element_ty == tl.float16
    top = tl.full([lanes], -3.0e38, tl.float32)
    s = tl.zeros([lanes], tl.float32)
    u = tl.zeros([lanes], tl.float32)
    for start in range(0, whole, BLOCK):
        z = _load(row_ptr, start + columns, vocab_size, False)
        top, s, u = _add_to_lanes(z, top, s, u, scale, clamped)
    top, s, u = _add_to_lanes(_load(row_ptr, whole + columns, vocab_size, True), top, s, u, scale, True)
    top, total, weighted = _sum_of_lanes(top, s, u)
    log_total = tl.log2(total)
    log_sum = log_total * LN_2
    logprob = (token_logit * scale - top) * LN_2 - log_sum
    entropy = log_sum - weighted / total * LN_2
    tl.store(logprobs_ptr + row, logprob)
    tl.store(entropy_ptr + row, entropy)

    if GRADIENT:
        share = tl.load(shares_ptr + row)
        grad = _by_logprob(
            logprob, row, share, old_ptr, advantages_ptr, ref_ptr, factors_ptr, kl_coef,
            ratio_low, ratio_high, dual_clip, LOSS, KL, UNBIASED
        )  # fmt: skip
        grad = grad * gradient_scale * inv_temperature
        by_entropy = -entropy_coef * share * gradient_scale * inv_temperature
        # The token's own grad apart, grad (0 - p) - by_entropy p (log p + entropy).
        terms = (top, log_total, -grad - by_entropy * (entropy - log_sum), -by_entropy * LN_2, scale)
        for start in range(0, whole, BLOCK):
            value = _gradient(_load(row_ptr, start + columns, vocab_size, False), *terms, ENTROPY, clamped)
            # Not to be read before the kernel ends: other rows may have its place in the cache.
            tl.store(row_ptr + start + columns, value.to(logits_ptr.dtype.element_ty), cache_modifier=".cs")
        value = _gradient(_load(row_ptr, whole + columns, vocab_size, True), *terms, ENTROPY, True)
        value = value.to(logits_ptr.dtype.element_ty)
        tl.store(row_ptr + whole + columns, value, mask=whole + columns < row_stride)
        tl.debug_barrier()  # the token's element is written once more, by one thread, after all others
        own = (_gradient(token_logit, *terms, ENTROPY, clamped) + grad).to(logits_ptr.dtype.element_ty)
        tl.store(row_ptr + token_id, own, mask=token_id < vocab_size)


@triton.jit
def _scale_rows_kernel(matrix_ptr, scales_ptr, out_ptr, stride, column_stride, width, BLOCK: tl.constexpr):  # noqa: N803
    """One block of one row a program."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    scale = tl.load(scales_ptr + row)
    value = tl.load(matrix_ptr + row * stride + column.to(tl.int64) * column_stride, mask=column < width)
    value = value.to(tl.float32) * scale
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

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=hidden.device)

        # Shares of a millionth would vanish in float16: there they are left to the backward pass.
        ctx.factor = 1.0 / stream.denominator(objective) if hidden.dtype == torch.float16 else 1.0
        logprobs, entropy, factors, shares = (empty(len(hidden)) for _ in range(4))
        launch_policy(None, None, stream, objective, factors, shares)
        width = triton.cdiv(len(weight), ROW_ALIGNMENT) * ROW_ALIGNMENT
        chunk_rows = max(CHUNK_BYTES // (width * hidden.itemsize * TILE_ROWS), 1) * TILE_ROWS
        buffer = empty(min(chunk_rows, len(hidden)), width, dtype=hidden.dtype)
        starts = range(0, max(len(hidden), 1), chunk_rows)
        columns = [token_ids, stream.old_logprobs, stream.advantages, stream.ref_logprobs]
        columns = [None if column is None else column.contiguous() for column in columns]

        wants_hidden, wants_weight = hidden.requires_grad, weight.requires_grad
        # Exponentials and their sum are too far apart for float16, and an entropy's gradient is no multiple of them.
        once = hidden.dtype != torch.float16 and not objective.entropy_coef
        scales = empty(len(hidden)) if once else None
        options = {"inv_temperature": 1.0 / temperature, "gradient_scale": 1.0 / ctx.factor, **loss_options(objective)}
        entropy_coef = options.pop("entropy_coef")

        def logits_of(start: int, gradient: bool) -> Tensor:
            """Return a chunk's logits, or their gradient, perhaps yet to be scaled by row, having filled in its
            log-probs and entropies."""
            rows = hidden[start : start + chunk_rows]
            logits = buffer[: len(rows), : len(weight)]
            torch.mm(rows, weight.t(), out=logits)
            per_row = (logits, *columns, factors, shares, logprobs, entropy)
            sizes = (start, width, len(weight))
            block_size, lane_bytes, num_warps = READ_ONCE if once else READ_TWICE
            blocks = {"BLOCK": block_size, "VECTOR": lane_bytes // hidden.itemsize, "num_warps": num_warps}
            with _on_device(hidden):
                if len(rows) and once:
                    _exponentials_kernel[(len(rows),)](*per_row, scales, *sizes, GRADIENT=gradient, **options, **blocks)
                elif len(rows):
                    blocks |= {"GRADIENT": gradient, "ENTROPY": entropy_coef > 0, "entropy_coef": entropy_coef}
                    _rows_kernel[(len(rows),)](*per_row, *sizes, **options, **blocks)
            return logits

        if objective.policy_loss == "gspo" and (wants_hidden or wants_weight):
            for start in starts:  # its gradients need the log-probs of whole sequences
                logits_of(start, gradient=False)
            launch_policy(logprobs, entropy, stream, objective, factors)
        grad_hidden = empty(*hidden.shape, dtype=hidden.dtype) if wants_hidden else None
        grad_weight = empty(*weight.shape, dtype=weight_grad_dtype or weight.dtype) if wants_weight else None
        for start in starts:
            logits = logits_of(start, gradient=wants_hidden or wants_weight)
            chunk = slice(start, start + chunk_rows)
            rows = hidden[chunk]
            if wants_hidden and once:
                _scale_rows(_wide_product(logits, weight), scales[chunk], grad_hidden[chunk])
            elif wants_hidden:
                torch.mm(logits, weight, out=grad_hidden[chunk])
            if wants_weight:
                rows = _scale_rows(rows, scales[chunk], empty(*rows.shape, dtype=rows.dtype)) if once else rows
                _add_product(grad_weight, logits.t(), rows, beta=min(start, 1))
        loss, metrics = launch_policy(logprobs, entropy, stream, objective)
        ctx.save_for_backward(grad_hidden, grad_weight.to(weight.dtype) if wants_weight else None)
        ctx.mark_non_differentiable(metrics, logprobs, entropy)
        return loss, metrics, logprobs, entropy

    backward = staticmethod(scaled_gradients)


def _scale_rows(matrix: Tensor, scales: Tensor, out: Tensor) -> Tensor:
    """Return `out`, filled with each row of a matrix times its scale."""
    if matrix.numel():
        with _on_device(matrix):
            _scale_rows_kernel[(len(matrix), triton.cdiv(matrix.shape[1], SCALE_BLOCK_SIZE))](
                matrix, scales, out, *matrix.stride(), matrix.shape[1], BLOCK=SCALE_BLOCK_SIZE
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
