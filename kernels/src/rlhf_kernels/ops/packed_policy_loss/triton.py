"""Fused `packed_policy_loss`: one launch for gradients and partial metrics, a small second one that adds the partials.

Where the loss of a token depends on its sequence (`objective.needs_sequences`), a program handles one sequence and
reads it twice. Otherwise a program handles every `num_programs`-th block of the stream.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlhf_kernels.dispatch import on_device
from rlhf_kernels.objective import PolicyObjective
from rlhf_kernels.ops.packed_policy_loss.terms import (
    MAX_KL,
    MAX_LOG_RATIO,
    MAX_WEIGHT,
    MIN_REST,
    POLICY_METRICS,
    VESPO_EXPONENTS,
    PolicyStream,
)
from rlhf_kernels.ops.token_logprobs.triton import LOG2_E

# Tokens per block, four per thread, and the largest number of programs: four per multiprocessor of an H100 or H200. A
# bounded number of programs leaves few partial sums to add up.
BLOCK_SIZE, PROGRAMS = 1024, 528
SEQUENCE_BLOCK_SIZE = 2048  # tokens per block where a program handles one sequence, two per thread
# Without this bound the compiler uses fewer registers per thread and delays loads, which serializes them.
MAX_REGISTERS = 64
SUMS_BLOCK_SIZE = 1024  # at least PROGRAMS, so that most launches add up their partial sums in one load
SCALE_BLOCK_SIZE, SCALE_PROGRAMS = 8192, 264  # two programs per multiprocessor, each of 16 warps
OVERLAP = True  # programmatic dependent launch: from Hopper on, a kernel starts while the previous one ends

Column = Tensor | None

_MAX_LOG_RATIO = tl.constexpr(MAX_LOG_RATIO)
_MAX_KL = tl.constexpr(MAX_KL)
_MAX_LOG_WEIGHT = tl.constexpr(math.log(MAX_WEIGHT))
_MIN_REST = tl.constexpr(MIN_REST)
_VESPO = tl.constexpr((*VESPO_EXPONENTS[0], *VESPO_EXPONENTS[1]))
_NUM_SUMS = tl.constexpr(len(POLICY_METRICS))
# 2 / n! (-1)^n for n = 10 to 2: the Taylor coefficients of e^-d - 1 + d, divided by d^2 / 2.
_K3_SERIES = tl.constexpr(tuple(2.0 * (-1) ** n / math.factorial(n) for n in range(10, 1, -1)))


@triton.jit
def _clamped(x, low, high):
    """Clamp as torch.clamp does: NaN stays NaN."""
    return tl.clamp(x, low, high, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _k3(log_ratio):
    """Return min(e^-d - 1 + d, 10). Near 0, where that formula cancels, use its Taylor series."""
    d = _clamped(log_ratio, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    series = d * _K3_SERIES[0] + _K3_SERIES[1]
    for i in tl.static_range(2, 9):
        series = series * d + _K3_SERIES[i]
    k3 = tl.where(tl.abs(d) < 1.0, d * d * 0.5 * series, tl.exp2(d * -LOG2_E) - 1.0 + d)
    return tl.minimum(k3, _MAX_KL, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _divergence(logprob, old, by_kl):
    """Return by how much a token's probability rose, and DPPO's divergence of the policies."""
    prob = tl.exp2(logprob * LOG2_E)
    old_prob = tl.exp2(old * LOG2_E)
    rise = prob - old_prob
    if not by_kl:
        return rise, tl.abs(rise)
    rest = tl.maximum(1.0 - prob, _MIN_REST)
    old_rest = tl.maximum(1.0 - old_prob, _MIN_REST)
    return rise, old_prob * (old - logprob) + old_rest * tl.log(old_rest / rest)


@triton.jit
def _policy_terms(logprob, old, ratio, advantage, low, high, extra, kind):
    """Return the policy loss, its derivative with respect to the log-prob, and whether it is clipped.

    `low`, `high` and `extra` are the numbers of the loss, from `_numbers`.
    """
    log_ratio = logprob - old
    if kind == "gmpo":
        # The ratio of the sequence is made of clipped ratios of tokens: a clipped one has no gradient.
        cut = tl.where(advantage > 0, log_ratio > high, (log_ratio < low) & (advantage < 0))
        return ratio * -advantage, tl.where(cut, 0.0, ratio * -advantage), cut
    # The derivative of exp is the ratio, and 0 where the log ratio was clamped. GSPO's ratio is a constant of the
    # sequence times a factor of 1 that carries the gradient, so the clamp does not cut it.
    slope = ratio if kind == "gspo" else tl.where(tl.abs(log_ratio) > _MAX_LOG_RATIO, 0.0, ratio)
    bounded = _clamped(ratio, low, high)
    outside = (ratio < low) | (ratio > high)
    # PPO's loss is flat where the ratio has left its range in the direction that the advantage favours.
    cut = tl.where(advantage > 0, ratio > high, (ratio < low) & (advantage < 0))
    cost = -advantage
    if kind == "reinforce":
        return cost * logprob, cost, cut
    if kind == "cispo":
        return bounded * cost * logprob, bounded * cost, outside
    if kind == "topr":
        cost = cost * tl.where(advantage < 0, tl.minimum(ratio, 1.0), 1.0)
        return cost * logprob, cost, (ratio > 1.0) & (advantage < 0)
    if kind == "vespo":
        c1 = tl.where(advantage > 0, _VESPO[0], _VESPO[2])
        c2 = tl.where(advantage > 0, _VESPO[1], _VESPO[3])
        cost = cost * tl.exp(c1 * tl.log(ratio) + c2 * (1.0 - ratio))
        return cost * logprob, cost, ratio < 0.0  # nothing is cut
    if kind == "sapo":
        tau = tl.where(advantage > 0, high, low)
        gate = tl.sigmoid(tau * (ratio - 1.0))
        # 1 - gate as a sigmoid keeps its digits where the gate is near 1.
        slope = 4.0 * gate * tl.sigmoid(tau * (1.0 - ratio)) * slope
        return cost * gate * 4.0 / tau, cost * slope, ratio < 0.0  # nothing is cut
    if kind == "dppo_tv" or kind == "dppo_kl":
        rise, divergence = _divergence(logprob, old, kind == "dppo_kl")
        fell = (rise < 0.0) & (divergence > low) & (advantage < 0)
        cut = tl.where(advantage > 0, (rise > 0.0) & (divergence > high), fell)
        return tl.where(cut, 0.0, cost * ratio), tl.where(cut, 0.0, cost * slope), cut
    if kind == "kimi":
        d = _clamped(log_ratio, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)
        pull = tl.where(tl.abs(log_ratio) > _MAX_LOG_RATIO, 0.0, 2.0 * extra * d)
        return bounded * cost + extra * d * d, tl.where(outside, 0.0, cost * slope) + pull, outside
    loss = tl.maximum(ratio * cost, bounded * cost)  # -min(r A, clip(r) A)
    if extra is not None:
        loss = tl.where(cost > 0, tl.minimum(loss, extra * cost), loss)
        cut = cut | ((cost > 0) & (ratio > extra))
    return loss, tl.where(cut, 0.0, cost * slope), cut


@triton.jit
def _kl_terms(log_ratio, to_ref, estimator, unbiased):
    """Return the KL estimate and its derivative with respect to the log-prob. `to_ref` is log-prob - reference."""
    d = _clamped(to_ref, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    kl = d
    grad = d * 0.0 + 1.0  # 1, and NaN for a NaN log-prob, which must not pass as a gradient
    if estimator == "k2":
        kl = d * d * 0.5
        grad = d
    if estimator == "k3":
        kl = _k3(d)
        grad = tl.where(kl >= _MAX_KL, 0.0, d - kl)  # 1 - e^-d
    if unbiased:
        grad = tl.exp2(_clamped(log_ratio, -_MAX_LOG_RATIO, _MAX_LOG_WEIGHT) * LOG2_E) * d
    return kl, tl.where(tl.abs(to_ref) > _MAX_LOG_RATIO, 0.0, grad)


@triton.jit
def _without_off_policy(loss, grad, cut, advantage, moved, max_gap):
    """Cut tokens with a negative advantage in sequences whose mean log ratio, `moved`, is below -`max_gap`."""
    left = tl.where(advantage < 0, -moved, -1.0) > max_gap  # which is not negative
    return tl.where(left, 0.0, loss), tl.where(left, 0.0, grad), cut | left


@triton.jit
def _penalty_terms(log_ratio, penalty):
    """Return penalty |log ratio| and its derivative with respect to the log-prob."""
    loss = penalty * tl.abs(_clamped(log_ratio, -_MAX_LOG_RATIO, _MAX_LOG_RATIO))
    sign = tl.where(log_ratio > 0.0, 1.0, tl.where(log_ratio < 0.0, -1.0, 0.0))
    return loss, tl.where(tl.abs(log_ratio) > _MAX_LOG_RATIO, 0.0, penalty * sign)


@triton.jit
def _ratio_of(log_ratio):
    """Return exp of the clamped log ratio."""
    return tl.exp2(_clamped(log_ratio, -_MAX_LOG_RATIO, _MAX_LOG_RATIO) * LOG2_E)


@triton.jit
def _load(ptr, index, valid):
    """Load a column, untrained tokens included: waiting for the loss mask first would double the latency."""
    return tl.load(ptr + index, mask=valid).to(tl.float32)


@triton.jit
def _store(ptr, index, grad, trained, valid):
    """Store a gradient, which is 0 where a token is not trained; `ptr` is None if nobody asks for it."""
    if ptr is not None:
        tl.store(ptr + index, tl.where(trained, grad, 0.0).to(ptr.dtype.element_ty), mask=valid)


@triton.jit
def _by_thread(x, trained, apart):
    """Return the sums of 8 columns [N] over the tokens that a thread holds: [N / 4, 8], or, if apart, [N / 2, 8].

    Reducing all sums as one tensor takes one reduction over threads instead of 8. The reshape must match the layout in
    which threads load tokens, or the sum would move data between threads: four adjacent tokens per thread, or, where
    sequences start at any address and loads are single, two tokens half a block apart.
    """
    # `tl.join` adds a last dimension of 2: joining in bit-reversed order makes columns 0 to 7 come out in order.
    even = tl.join(tl.join(x[0], x[4]), tl.join(x[2], x[6]))
    odd = tl.join(tl.join(x[1], x[5]), tl.join(x[3], x[7]))
    columns = tl.reshape(tl.join(even, odd), [x[0].shape[0], 8])
    shape: tl.constexpr = [2, x[0].shape[0] // 2, 8] if apart else [x[0].shape[0] // 4, 4, 8]
    return tl.sum(tl.reshape(tl.where(trained[:, None], columns, 0.0), shape), axis=0 if apart else 1)


@triton.jit
def _over_sequence(first, last, logprobs_ptr, old_ptr, mask_ptr, advantages_ptr, low, high, kind, gaps, block):
    """Return the number of trained tokens of a sequence (at least 1), and with `gaps` its ratio and mean log ratio.

    The tokens are read here and again for the loss, the second time from the cache unless the sequence is very long.
    """
    count = tl.zeros([block], tl.float32)
    log_ratio = count
    moved = count
    for start in range(first, last, block):
        index = start + tl.arange(0, block)
        valid = index < last
        trained = tl.load(mask_ptr + index, mask=valid, other=0) != 0
        if gaps and old_ptr is not None:
            gap = _load(logprobs_ptr, index, valid) - _load(old_ptr, index, valid)
            moved += tl.where(trained, gap, 0.0)
            if kind == "gmpo":
                rises = _load(advantages_ptr, index, valid) > 0
                gap = tl.where(rises, tl.minimum(gap, high), tl.maximum(gap, low))
            log_ratio += tl.where(trained, gap, 0.0)
        count += tl.where(trained, 1.0, 0.0)
    num_trained = tl.maximum(tl.sum(count, axis=0), 1.0)
    total = tl.sum(log_ratio, axis=0)
    ratio = _ratio_of(total if kind == "vespo" else total / num_trained)
    return num_trained, ratio, tl.sum(moved, axis=0) / num_trained


@triton.jit
def _policy_kernel(
    logprobs_ptr, entropy_ptr, old_ptr, advantages_ptr, mask_ptr, bounds_ptr, ref_ptr, weights_ptr, penalties_ptr,
    grad_logprobs_ptr, grad_entropy_ptr, sums_ptr,
    num_tokens, inv_denominator, kl_coef, entropy_coef, low, high, extra, max_gap,
    LOSS: tl.constexpr, WHOLE: tl.constexpr, GAPS: tl.constexpr, KL: tl.constexpr, UNBIASED: tl.constexpr,  # noqa: N803
    SEQUENCES: tl.constexpr, MEANS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr  # noqa: N803
):  # fmt: skip
    """Compute gradients and partial metrics of one sequence, or of every `num_programs`-th block, per program."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()  # this kernel may start before the previous one has written its results
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0).to(tl.int64)
    num_programs = tl.num_programs(0)
    first = program * BLOCK
    last = num_tokens
    step = num_programs * BLOCK
    share = inv_denominator  # of the loss, per token
    sequence_ratio = 1.0
    moved = 0.0
    if SEQUENCES:
        first = tl.load(bounds_ptr + program).to(tl.int64)
        last = tl.load(bounds_ptr + program + 1).to(tl.int64)
        step = BLOCK
        num_trained, sequence_ratio, moved = _over_sequence(
            first, last, logprobs_ptr, old_ptr, mask_ptr, advantages_ptr, low, high, LOSS, GAPS, BLOCK
        )
        share = inv_denominator / num_trained if MEANS else inv_denominator

    zeros = tl.zeros([BLOCK], tl.float32)
    # Each thread keeps its own sums over all blocks, and threads are reduced once, after the loop.
    sums = tl.zeros([BLOCK // (2 if SEQUENCES else 4), 8], tl.float32)
    for start in range(first, last, step):
        index = start + tl.arange(0, BLOCK)
        valid = index < last
        # Columns may hold anything, NaN included, where a token is not trained: `trained` selects what is summed and
        # stored, and nothing is multiplied by 0.
        trained = tl.load(mask_ptr + index, mask=valid, other=0) != 0
        bonus = zeros if entropy_ptr is None else _load(entropy_ptr, index, valid)
        logprob = _load(logprobs_ptr, index, valid)
        old = logprob if old_ptr is None else _load(old_ptr, index, valid)
        advantage = _load(advantages_ptr, index, valid)
        reference = zeros if ref_ptr is None else _load(ref_ptr, index, valid)
        weight = zeros + 1.0 if weights_ptr is None else _load(weights_ptr, index, valid)

        log_ratio = logprob - old
        ratio = zeros + sequence_ratio if WHOLE else _ratio_of(log_ratio)
        loss, grad, cut = _policy_terms(logprob, old, ratio, advantage, low, high, extra, LOSS)
        if max_gap is not None:
            loss, grad, cut = _without_off_policy(loss, grad, cut, advantage, moved, max_gap)
        if penalties_ptr is not None:
            pull, grad_pull = _penalty_terms(log_ratio, _load(penalties_ptr, index, valid))
            loss += pull
            grad += grad_pull
        loss = loss * weight
        grad = grad * weight
        kl = zeros
        if ref_ptr is not None:
            kl, grad_kl = _kl_terms(log_ratio, logprob - reference, KL, UNBIASED)
            grad += kl_coef * grad_kl
        grad = share * grad
        grad_entropy = zeros - entropy_coef * share
        to_old = _k3(-log_ratio)  # of KL(old || current), because the old policy wrote the tokens
        bounded = to_old >= _MAX_KL
        if KL == "k3":
            bounded = bounded | (kl >= _MAX_KL)
        terms = (loss, kl, bonus, zeros + 1.0, cut.to(tl.float32), ratio, to_old, bounded.to(tl.float32))
        sums += _by_thread(terms, trained, SEQUENCES)
        _store(grad_logprobs_ptr, index, grad, trained, valid)
        _store(grad_entropy_ptr, index, grad_entropy, trained, valid)
    slot = tl.arange(0, 8)
    # The first three sums are shares of the loss, the others plain sums. The share is the same for all tokens of a
    # program, so it is applied to their sum. Partial sums are stored and not added atomically: the order of additions,
    # and with it the last bit, is then the same in every run.
    sums = tl.sum(sums, axis=0) * tl.where(slot < 3, share, 1.0)
    tl.store(sums_ptr + slot * num_programs + program, sums)


@triton.jit
def _total(sums_ptr, num_programs, block):
    """Add up the partial sums of one metric, in a fixed order."""
    sums = tl.zeros([block], tl.float32)
    for start in range(0, num_programs, block):
        index = start + tl.arange(0, block)
        sums += tl.load(sums_ptr + index, mask=index < num_programs, other=0.0)
    return tl.sum(sums, axis=0)


@triton.jit(do_not_specialize=["num_programs"])
def _metrics_kernel(
    sums_ptr, metrics_ptr, loss_ptr, num_programs, kl_coef, entropy_coef, BLOCK: tl.constexpr, OVERLAP: tl.constexpr  # noqa: N803
):  # fmt: skip
    """Compute one metric per program, and in the last program the loss from its three parts."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    number = tl.program_id(0).to(tl.int64)
    if number < _NUM_SUMS:
        tl.store(metrics_ptr + number, _total(sums_ptr + number * num_programs, num_programs, BLOCK))
    else:
        loss = _total(sums_ptr, num_programs, BLOCK)
        loss += kl_coef * _total(sums_ptr + num_programs, num_programs, BLOCK)
        loss -= entropy_coef * _total(sums_ptr + 2 * num_programs, num_programs, BLOCK)
        tl.store(loss_ptr, loss)


def launch_policy(
    logprobs: Tensor, entropy: Column, stream: PolicyStream, objective: PolicyObjective, *grads: Column
) -> tuple[Tensor, Tensor]:
    """Return loss and metrics, and fill up to two tensors with the gradients of log-probs and entropy."""
    size = len(stream.advantages)
    sequences = objective.needs_sequences
    block = SEQUENCE_BLOCK_SIZE if sequences else BLOCK_SIZE
    programs = len(stream.cu_seqlens) - 1 if sequences else min(triton.cdiv(size, block), PROGRAMS)
    shapes = (), (len(POLICY_METRICS),), (_NUM_SUMS.value, programs)
    loss, metrics, sums = (torch.empty(n, dtype=torch.float32, device=stream.advantages.device) for n in shapes)
    columns = [logprobs, entropy, stream.old_logprobs, stream.advantages, stream.loss_mask.view(torch.uint8)]
    columns += [stream.cu_seqlens, stream.ref_logprobs, stream.weights, stream.penalties]
    columns = [None if column is None else column.contiguous() for column in columns] + [*grads, None, None][:2]
    overlap = _overlap(sums)
    options = {"SEQUENCES": sequences, "MEANS": objective.reduction == "seq_mean_token_mean", "BLOCK": block}
    options |= {"num_warps": max(block // (64 if sequences else 128), 1), "maxnreg": MAX_REGISTERS}
    options |= {"OVERLAP": overlap, "launch_pdl": overlap}
    coefs = {"kl_coef": float(objective.kl_coef), "entropy_coef": float(objective.entropy_coef)}
    options |= coefs
    options |= dict(zip(("low", "high", "extra"), _numbers(objective), strict=True))
    options["max_gap"] = None if objective.mask_off_policy is None else float(objective.mask_off_policy)
    options |= {"LOSS": objective.policy_loss, "WHOLE": objective.uses_sequence_ratio}
    options["GAPS"] = objective.uses_sequence_ratio or objective.mask_off_policy is not None
    options |= {"KL": objective.kl_estimator, "UNBIASED": objective.kl_unbiased_gradient}
    with on_device(sums):
        if programs:
            _policy_kernel[(programs,)](*columns, sums, size, 1.0 / stream.denominator(objective), **options)
        options = coefs | {"BLOCK": SUMS_BLOCK_SIZE, "OVERLAP": overlap, "launch_pdl": overlap}
        _metrics_kernel[(_NUM_SUMS.value + 1,)](sums, metrics, loss, programs, **options)
    return loss, metrics


def _numbers(objective: PolicyObjective) -> tuple[float, float, float | None]:
    """Return the numbers of the policy loss for `_policy_terms`: low, high and extra."""
    low, high = float(objective.clip_low), float(objective.clip_high)
    if objective.policy_loss == "sapo":
        high, low = map(float, objective.sapo_tau)
    elif objective.policy_loss == "gmpo":
        low, high = math.log1p(-low), math.log1p(high)
    elif not objective.policy_loss.startswith("dppo"):
        low, high = 1 - low, 1 + high
    extra = objective.log_ratio_coef if objective.policy_loss == "kimi" else objective.dual_clip
    return low, high, None if extra is None else float(extra)


def _overlap(tensor: Tensor) -> bool:
    return OVERLAP and tensor.is_cuda and torch.cuda.get_device_capability(tensor.device) >= (9, 0)


@triton.jit
def _scale_kernel(one_ptr, other_ptr, by_ptr, by, size, other_size, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):  # noqa: N803
    """Multiply two tensors in place by `by` and by a factor on the device. A product of 1 leaves them untouched."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    factor = tl.load(by_ptr) * by
    if factor == 1.0:  # the usual case, `loss.backward()`: nothing is read or written
        return
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for i in tl.static_range(2):
        values_ptr, last = (one_ptr, size) if i == 0 else (other_ptr, other_size)
        if values_ptr is not None:
            for start in range(tl.program_id(0).to(tl.int64) * BLOCK, last, step):
                index = start + tl.arange(0, BLOCK)
                value = tl.load(values_ptr + index, mask=index < last).to(tl.float32) * factor
                tl.store(values_ptr + index, value.to(values_ptr.dtype.element_ty), mask=index < last)


@once_differentiable
def scaled_gradients(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    """Backward pass: scale the saved gradients of the first two inputs by `ctx.factor` and the loss's gradient."""
    if ctx.factor is None:
        raise RuntimeError("a fused policy loss scales its gradients in place: its backward pass runs once")
    grads = ctx.saved_tensors
    factor = ctx.factor
    ctx.factor = None
    sizes = [0 if grad is None else grad.numel() for grad in grads]
    if any(sizes):
        programs = min(SCALE_PROGRAMS, triton.cdiv(max(sizes), SCALE_BLOCK_SIZE))
        overlap = _overlap(grad_loss)
        options = {"BLOCK": SCALE_BLOCK_SIZE, "OVERLAP": overlap, "launch_pdl": overlap, "num_warps": 16}
        with on_device(grad_loss):
            _scale_kernel[(programs,)](*grads, grad_loss, factor, *sizes, **options)
    return (*grads, *(None for _ in ctx.needs_input_grad[2:]))


@torch.compiler.disable
def packed_policy_loss_triton(
    logprobs: Tensor, entropy: Tensor | None, stream: PolicyStream, objective: PolicyObjective
) -> tuple[Tensor, Tensor]:
    """Return loss and metrics. `packed_policy_loss` has checked the arguments."""
    return _PackedPolicyLoss.apply(logprobs, entropy, stream, objective)


class _PackedPolicyLoss(torch.autograd.Function):
    """Computes gradients in the forward pass, with the loss. The backward pass only scales them."""

    @staticmethod
    def forward(ctx: Any, logprobs: Tensor, entropy: Tensor | None, *terms: Any) -> tuple[Tensor, Tensor]:
        grads = [torch.empty_like(x) if x is not None and x.requires_grad else None for x in (logprobs, entropy)]
        loss, metrics = launch_policy(logprobs, entropy, *terms, *grads)
        ctx.save_for_backward(*grads)
        ctx.factor = 1.0
        ctx.mark_non_differentiable(metrics)
        return loss, metrics

    backward = staticmethod(scaled_gradients)
