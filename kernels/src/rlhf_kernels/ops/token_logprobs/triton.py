"""Fused `token_logprobs`: one pass over the logits forward and one backward. Only the logits are kept in memory.

The kernels work on a block of columns, and optionally on a reference model's logits beside the policy's, so that
`linear_token_logprobs` and `logprob_kl` can use them too.
"""

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlhf_kernels.dispatch import on_device
from rlhf_kernels.ops.token_logprobs.reference import TokenLogprobs, combine_shards

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Columns per block of a row. With 8 warps a thread holds 16 of them: two 16-byte loads of bfloat16, four of float32.
MAX_BLOCK_SIZE = 4096
NUM_WARPS = 8
NUM_STAGES = 1  # blocks in flight in `_sums_kernel`; more than one goes through shared memory

# Rows of `sums`, the running sums per row of logits. z are the policy's logits, y the reference's, with exponents
# c = (z - m) / temperature and r = (y - n) / temperature.
# 0 to 3: m = max z, s = sum e^c, u = sum c e^c, z of the token             4 to 7: log-prob, entropy, log-sum-exp, KL
# 8 to 11: n = max y, t = sum e^r, w = sum (z - y) e^c, y of the token     12: the reference's log-prob
# Without a reference only rows 0 to 6 exist.
NUM_SUMS, NUM_SUMS_WITH_REFERENCE = 7, 13

LOG2_E = tl.constexpr(1.4426950408889634)  # kernels keep exponents in bits, because the GPU computes 2^x
LN_2 = tl.constexpr(0.6931471805599453)


@torch.compiler.disable  # a kernel may overwrite its input, which a traced graph would not see
def token_logprobs_triton(
    logits: Tensor,
    token_ids: Tensor,
    temperature: float,
    inplace_backward: bool = False,
    group: "ProcessGroup | None" = None,
    vocab_start: int = 0,
) -> TokenLogprobs:
    """Return log-prob, entropy and log-sum-exp. `token_logprobs` has checked the arguments."""
    if logits.stride(-1) != 1 or (inplace_backward and logits.stride(0) < logits.shape[1]):
        logits = logits.contiguous()
    token_ids = token_ids.contiguous()
    return TokenLogprobs(*_TokenLogprobs.apply(logits, token_ids, temperature, inplace_backward, group, vocab_start))


@triton.jit
def bits(z, m, inv_temperature):
    """Return (z - m) / temperature in bits, at least -1e4: 2^-1e4 is 0 as well, but 0 * -inf would be NaN.

    NaN stays NaN, so that a logit that is not a number shows in the result.
    """
    return tl.maximum((z - m) * (inv_temperature * LOG2_E), -1e4, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def add_to_lanes(z, m, s, u, inv_temperature):
    """Merge logits [LANES, PARTS] into each lane's m = max z, s = sum 2^c and u = sum c 2^c.

    c = (z - m) / temperature, in bits. A larger maximum shifts all exponents, hence the rescaling of s and u.
    """
    new_m = tl.maximum(m, tl.max(z, axis=1))
    shift = bits(m, new_m, inv_temperature)
    scale = tl.exp2(shift)
    c = bits(z, new_m[:, None], inv_temperature)
    e = tl.exp2(c)
    return new_m, s * scale + tl.sum(e, axis=1), (u + shift * s) * scale + tl.sum(c * e, axis=1)


@triton.jit
def sum_of_lanes(m, s, u, inv_temperature):
    """Return m, s and u over all lanes."""
    largest = tl.max(m, axis=0)
    shift = bits(m, largest, inv_temperature)
    scale = tl.exp2(shift)
    return largest, tl.sum(s * scale, axis=0), tl.sum((u + shift * s) * scale, axis=0)


@triton.jit
def _scaled(w, m, new_m, inv_temperature):
    """Rescale sums w from maximum m to new_m. Where the scale underflows the result is 0, even for infinite sums."""
    scale = tl.exp2(bits(m, new_m, inv_temperature))
    return tl.where(scale > 0, w * scale, 0.0)


@triton.jit(do_not_specialize=["sums_stride"])
def _sums_kernel(
    z_ptr, y_ptr, ids_ptr, sums_ptr, z_stride, y_stride, sums_stride, vocab_start, width, inv_temperature,
    FIRST: tl.constexpr, HAS_REFERENCE: tl.constexpr, LANES: tl.constexpr,  # noqa: N803
    PARTS: tl.constexpr, IN_A_ROW: tl.constexpr, STAGES: tl.constexpr  # noqa: N803
):  # fmt: skip
    """Merge one block of columns into the running sums of one row per program, and compute the results so far.

    The results are final after the last block of columns; computing them after every block saves a launch. An ignored
    row gets the sums of a distribution that is certain of one token, in both models: all its results are 0.

    The first maximum is finite, because the first rescaling would otherwise compute -inf - -inf, which is NaN. The
    token's logit is NaN until its column is read, so that an id beyond the vocabulary gives NaN and no wrong number.
    Columns beyond the last are -inf: they add 0 to the sums and are never the maximum.

    KL = E[z - y] / temperature - log-sum-exp of the policy + that of the reference. It is arranged so that each bracket
    holds numbers of similar size and equal models give exactly 0. Where p is 0, the term of the KL is 0, whatever z - y
    is.
    """
    row = tl.program_id(0).to(tl.int64)  # offsets into the logits exceed 32 bits
    sums = sums_ptr + row
    token_id = tl.load(ids_ptr + row)
    ignored = token_id < 0
    m = tl.where(ignored, 0.0, -3.0e38)
    s, u = tl.where(ignored, 1.0, 0.0), 0.0
    token_logit = tl.where(ignored, 0.0, float("nan"))
    n, t, w, ref_token_logit = m, s, u, token_logit
    if not ignored:
        if not FIRST:
            m = tl.load(sums)
            s = tl.load(sums + sums_stride)
            u = tl.load(sums + 2 * sums_stride) * LOG2_E  # nats in memory, bits in the kernel
            token_logit = tl.load(sums + 3 * sums_stride)
            if HAS_REFERENCE:
                n = tl.load(sums + 8 * sums_stride)
                t = tl.load(sums + 9 * sums_stride)
                w = tl.load(sums + 10 * sums_stride)
                ref_token_logit = tl.load(sums + 11 * sums_stride)
        # Each lane keeps its own sums until the end of the row, so that lanes need not synchronize at every block.
        # The sums of earlier blocks go into lane 0.
        lane, part = tl.arange(0, LANES), tl.arange(0, PARTS)[None, :]
        offsets = lane[:, None] * PARTS + part if IN_A_ROW else part * LANES + lane[:, None]
        m, n = tl.full([LANES], m, tl.float32), tl.full([LANES], n, tl.float32)
        s, u = tl.where(lane == 0, s, 0.0), tl.where(lane == 0, u, 0.0)
        t, w = tl.where(lane == 0, t, 0.0), tl.where(lane == 0, w, 0.0)
        for start in tl.range(0, width, LANES * PARTS, num_stages=STAGES):
            columns = start + offsets
            z = tl.load(z_ptr + row * z_stride + columns, mask=columns < width, other=float("-inf")).to(tl.float32)
            new_m, new_s, new_u = add_to_lanes(z, m, s, u, inv_temperature)
            if HAS_REFERENCE:
                y = tl.load(y_ptr + row * y_stride + columns, mask=columns < width, other=float("-inf")).to(tl.float32)
                weight = tl.exp2(bits(z, new_m[:, None], inv_temperature))
                # Subtract the logits themselves, not centered ones: equal logits then give exactly 0.
                difference = tl.where(weight > 0, z - y, 0.0)
                w = _scaled(w, m, new_m, inv_temperature) + tl.sum(difference * weight, axis=1)
                n, t, _ = add_to_lanes(y, n, t, t, inv_temperature)
            m, s, u = new_m, new_s, new_u
        w = tl.sum(_scaled(w, m, tl.max(m, axis=0), inv_temperature), axis=0)
        m, s, u = sum_of_lanes(m, s, u, inv_temperature)
        n, t, _ = sum_of_lanes(n, t, t, inv_temperature)
        # The token's logit is one more load per row: comparing every column with the token would cost more.
        here = token_id - vocab_start
        if (here >= 0) & (here < width):
            token_logit = tl.load(z_ptr + row * z_stride + here).to(tl.float32)
            if HAS_REFERENCE:
                ref_token_logit = tl.load(y_ptr + row * y_stride + here).to(tl.float32)

    log_sum, u = tl.log2(s) * LN_2, u * LN_2
    tl.store(sums, m)
    tl.store(sums + sums_stride, s)
    tl.store(sums + 2 * sums_stride, u)
    tl.store(sums + 3 * sums_stride, token_logit)
    # Subtract m before log s: their sum would lose digits where logits are large.
    tl.store(sums + 4 * sums_stride, (token_logit - m) * inv_temperature - log_sum)
    tl.store(sums + 5 * sums_stride, log_sum - u / s)
    tl.store(sums + 6 * sums_stride, m * inv_temperature + log_sum)
    if HAS_REFERENCE:
        ref_log_sum = tl.log2(t) * LN_2
        tl.store(sums + 7 * sums_stride, (w / s - (m - n)) * inv_temperature - (log_sum - ref_log_sum))
        tl.store(sums + 8 * sums_stride, n)
        tl.store(sums + 9 * sums_stride, t)
        tl.store(sums + 10 * sums_stride, w)
        tl.store(sums + 11 * sums_stride, ref_token_logit)
        tl.store(sums + 12 * sums_stride, (ref_token_logit - n) * inv_temperature - ref_log_sum)


@triton.jit(do_not_specialize=["sums_stride", "grads_stride"])
def _gradient_kernel(
    z_ptr, y_ptr, ids_ptr, sums_ptr, grads_ptr, out_ptr, z_stride, y_stride, sums_stride, grads_stride, out_stride,
    vocab_start, width, inv_temperature, HAS_REFERENCE: tl.constexpr, BLOCK_SIZE: tl.constexpr  # noqa: N803
):  # fmt: skip
    """Compute the gradient of one block of one row per program, from p recomputed from the logits.

    With g, h, l and k the gradients of log-prob, entropy, log-sum-exp and KL, T the temperature and i the token:

        grad z_v = (g [v = i] + p_v (l - g - h (c_v - u / s))) / T + k p_v (z_v - y_v - w / s) / T^2

    Storing p in the forward pass would take as much memory as the logits; computing it costs one exponential per
    element. `out_ptr` may equal `z_ptr`: each element is read before it is overwritten.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    valid = columns < width
    out_ptrs = out_ptr + row * out_stride + columns
    token_id = tl.load(ids_ptr + row)
    if token_id < 0:  # return early: logits and gradients of an ignored row may be NaN, and 0 * NaN is NaN
        tl.store(out_ptrs, tl.zeros([BLOCK_SIZE], tl.float32).to(out_ptr.dtype.element_ty), mask=valid)
        return

    m = tl.load(sums_ptr + row)
    s = tl.load(sums_ptr + row + sums_stride)
    u = tl.load(sums_ptr + row + 2 * sums_stride)
    # Divide the row's gradients by the temperature once, in place of every element.
    by_logprob = tl.load(grads_ptr + row) * inv_temperature
    by_entropy = tl.load(grads_ptr + row + grads_stride) * inv_temperature
    by_logsumexp = tl.load(grads_ptr + row + 2 * grads_stride) * inv_temperature

    z = tl.load(z_ptr + row * z_stride + columns, mask=valid, other=float("-inf")).to(tl.float32)
    c = bits(z, m, inv_temperature)
    p = tl.exp2(c - tl.log2(s))
    slope = by_logsumexp - by_logprob - by_entropy * (c * LN_2 - u / s)
    if HAS_REFERENCE:
        w = tl.load(sums_ptr + row + 10 * sums_stride)
        y = tl.load(y_ptr + row * y_stride + columns, mask=valid, other=0.0).to(tl.float32)
        by_kl = tl.load(grads_ptr + row + 3 * grads_stride) * inv_temperature * inv_temperature
        slope += by_kl * (tl.where(p > 0, z - y, 0.0) - w / s)
    grad = p * slope + tl.where(columns == token_id - vocab_start, by_logprob, 0.0)
    tl.store(out_ptrs, grad.to(out_ptr.dtype.element_ty), mask=valid)


def add_sums(
    logits: Tensor,
    ref_logits: Tensor | None,
    token_ids: Tensor,
    sums: Tensor,
    temperature: float,
    vocab_start: int = 0,
    first: bool = True,
) -> None:
    """Merge a block of columns, whose first id is `vocab_start`, into `sums`. With `first` the sums may be unset."""
    y = logits if ref_logits is None else ref_logits
    strides = logits.stride(0), y.stride(0), sums.stride(0)
    num_rows, width = logits.shape
    parts = 16 // logits.itemsize  # elements per 16-byte load, the widest of a thread
    options = {"FIRST": first, "HAS_REFERENCE": ref_logits is not None, "num_warps": NUM_WARPS, "STAGES": NUM_STAGES}
    # Aligned rows let each lane read consecutive columns as one vector. Otherwise neighbouring lanes read neighbouring
    # columns, so that single loads still coalesce.
    in_a_row = logits.stride(0) % 16 == 0 and logits.data_ptr() % 16 == 0
    # One program per row: the sums of a row then need no communication and no atomics, so their order is fixed.
    options |= {"PARTS": parts, "LANES": _block_size(logits) // parts, "IN_A_ROW": in_a_row}
    if num_rows:
        with on_device(logits):
            _sums_kernel[(num_rows,)](
                logits, y, token_ids, sums, *strides, vocab_start, width, 1.0 / temperature, **options
            )


def write_gradient(
    logits: Tensor,
    ref_logits: Tensor | None,
    token_ids: Tensor,
    sums: Tensor,
    grads: Tensor,
    out: Tensor,
    temperature: float,
    vocab_start: int = 0,
) -> None:
    """Write the gradient of the logits to `out`, which may be `logits`, from the gradients `grads` of the results.

    Row i of `grads` belongs to row 4 + i of `sums`: log-prob, entropy, log-sum-exp and, with a reference, KL.
    """
    y = logits if ref_logits is None else ref_logits
    tensors = (logits, y, token_ids, sums, grads, out)
    strides = logits.stride(0), y.stride(0), sums.stride(0), grads.stride(0), out.stride(0)
    options = {"HAS_REFERENCE": ref_logits is not None, "num_warps": NUM_WARPS}
    num_rows, width = logits.shape
    size = _block_size(logits)
    # With the sums known, elements are independent: a program per block of a row keeps the GPU busy with few rows too.
    if num_rows:
        with on_device(logits):
            _gradient_kernel[(num_rows, triton.cdiv(width, size))](
                *tensors, *strides, vocab_start, width, 1.0 / temperature, BLOCK_SIZE=size, **options
            )


class _TokenLogprobs(torch.autograd.Function):
    """Saves the logits and a few numbers per row for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        token_ids: Tensor,
        temperature: float,
        inplace: bool,
        group: "ProcessGroup | None",
        vocab_start: int,
    ) -> tuple[Tensor, ...]:
        sums = torch.empty((NUM_SUMS, len(logits)), dtype=torch.float32, device=logits.device)
        add_sums(logits, None, token_ids, sums, temperature, vocab_start)
        if group is not None:
            sums[4:] = torch.stack(combine_shards(sums[:4], token_ids, temperature, group))
        ctx.save_for_backward(logits, token_ids, sums)
        ctx.temperature = temperature
        ctx.inplace = inplace
        ctx.vocab_start = vocab_start
        return tuple(row.clone() for row in sums[4:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits, token_ids, sums = ctx.saved_tensors
        out = logits if ctx.inplace else torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        write_gradient(logits, None, token_ids, sums, torch.stack(grads), out, ctx.temperature, ctx.vocab_start)
        if ctx.inplace:
            # Autograd then raises in any node that saved the logits, this one in a second pass included.
            torch.autograd.graph.increment_version(logits)
        return out, None, None, None, None, None


def _block_size(logits: Tensor) -> int:
    return min(MAX_BLOCK_SIZE, max(16, triton.next_power_of_2(logits.shape[1])))
