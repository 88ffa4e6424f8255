"""Fused `packed_policy_loss`: loss, gradients and metrics of the stream in one launch, then a sum over its programs."""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlhf_kernels.ops.packed_policy_loss.terms import (
    MAX_LOG_RATIO,
    MAX_WEIGHT,
    POLICY_METRICS,
    PolicyObjective,
    PolicyStream,
)
from rlhf_kernels.ops.token_logprobs.triton import _on_device

BLOCK_SIZE = 2048  # tokens at a time; a program is one block, or one sequence where the loss depends on sequences
NUM_WARPS = 32  # fewer, and the largest variants spill registers
SCALE_BLOCK_SIZE, SCALE_PROGRAMS = 4096, 1024

_MAX_LOG_RATIO = tl.constexpr(MAX_LOG_RATIO)
_MAX_LOG_WEIGHT = tl.constexpr(math.log(MAX_WEIGHT))
_NUM_METRICS = tl.constexpr(len(POLICY_METRICS))


@triton.jit
def clamped(x, low, high):
    """As torch.clamp: NaN stays NaN."""
    return tl.where(x > high, high, tl.where(x < low, low, x))


@triton.jit
def _k3(log_ratio):
    """e^-d - 1 + d; near 0, where that loses its digits, d^2/2 (1 - d/3 (1 - d/4 (...)))."""
    d = clamped(log_ratio, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    series = d * 0.0 + 1.0
    for n in tl.static_range(12, 2, -1):
        series = 1.0 - d * series * (1.0 / n)
    return tl.where(tl.abs(d) < 1.0, d * d * 0.5 * series, tl.exp(-d) - 1.0 + d)


@triton.jit
def policy_terms(logprob, log_ratio, ratio, advantage, ratio_low, ratio_high, dual_clip, kind):
    """Return the policy loss, its derivative by the log-prob, and whether it is clipped."""
    slope = ratio if kind == "gspo" else tl.where(tl.abs(log_ratio) > _MAX_LOG_RATIO, 0.0, ratio)
    bounded = clamped(ratio, ratio_low, ratio_high)
    cut = ((ratio > ratio_high) & (advantage > 0)) | ((ratio < ratio_low) & (advantage < 0))
    if kind == "reinforce":
        return -advantage * logprob, -advantage, cut
    if kind == "cispo":
        return -bounded * advantage * logprob, -bounded * advantage, (ratio < ratio_low) | (ratio > ratio_high)
    loss = -tl.minimum(ratio * advantage, bounded * advantage)
    if dual_clip is not None:
        loss = tl.where(advantage < 0, tl.minimum(loss, -dual_clip * advantage), loss)
        cut = cut | ((advantage < 0) & (ratio > dual_clip))
    return loss, tl.where(cut, 0.0, -advantage * slope), cut


@triton.jit
def kl_terms(log_ratio, to_ref, estimator, unbiased):
    """Return the KL estimate and its derivative by the log-prob; `to_ref` is log-prob less reference."""
    d = clamped(to_ref, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    kl, grad = d, d * 0.0 + 1.0
    if estimator == "k2":
        kl, grad = d * d * 0.5, d
    if estimator == "k3":
        kl = _k3(d)
        grad = d - kl  # 1 - e^-d
    if unbiased:
        grad = tl.exp(clamped(log_ratio, -_MAX_LOG_RATIO, _MAX_LOG_WEIGHT)) * d
    return kl, tl.where(tl.abs(to_ref) > _MAX_LOG_RATIO, 0.0, grad)


@triton.jit
def ratio_of(log_ratio):
    """Return e^x, x clamped."""
    return tl.exp(clamped(log_ratio, -_MAX_LOG_RATIO, _MAX_LOG_RATIO))


@triton.jit
def _load(ptr, index, valid, used):
    """What is not used is 0.0; it is read all the same, for a load that waits for its mask takes twice as long."""
    return tl.where(used, tl.load(ptr + index, mask=valid, other=0.0).to(tl.float32), 0.0)


@triton.jit
def _weighted(gap, trained, sequence_weight, low, high, level, masks):
    """Return a block's mismatch weights, the mask that they leave, and which are out of bounds."""
    raw = gap * 0.0 + sequence_weight if level == "sequence" or level == "geometric" else ratio_of(gap)
    outside = trained & ((raw < low) | (raw > high))
    if level == "off":
        return gap * 0.0 + 1.0, trained, outside
    return (raw, trained & ~outside, outside) if masks else (clamped(raw, low, high), trained, outside)


@triton.jit
def _over_sequence(first, last, logprobs_ptr, old_ptr, mask_ptr, rollout_ptr, low, high, kind, level, masks, block):
    """Return the trained tokens of a sequence (at least 1), its mismatch weight and its GSPO ratio."""
    count = tl.zeros([block], tl.float32)
    log_weight, log_ratio = count, count
    for start in range(first, last, block):
        index = start + tl.arange(0, block)
        valid = index < last
        kept = tl.load(mask_ptr + index, mask=valid, other=0) != 0
        if level != "off":
            gap = _load(old_ptr, index, valid, kept) - _load(rollout_ptr, index, valid, kept)
            log_weight += gap
            if level == "token":
                _, kept, _ = _weighted(gap, kept, 1.0, low, high, level, masks)
        if kind == "gspo" and logprobs_ptr is not None and old_ptr is not None:
            log_ratio += _load(logprobs_ptr, index, valid, kept) - _load(old_ptr, index, valid, kept)
        count += tl.where(kept, 1.0, 0.0)
    num_trained = tl.maximum(tl.sum(count, axis=0), 1.0)
    total_weight = tl.sum(log_weight, axis=0)
    total_weight = total_weight / num_trained if level == "geometric" else total_weight
    return num_trained, ratio_of(total_weight), ratio_of(tl.sum(log_ratio, axis=0) / num_trained)


@triton.jit
def _policy_kernel(
    logprobs_ptr, entropy_ptr, old_ptr, advantages_ptr, mask_ptr, bounds_ptr, ref_ptr, rollout_ptr, weights_ptr,
    grad_logprobs_ptr, grad_entropy_ptr, sums_ptr,
    num_tokens, inv_denominator, kl_coef, entropy_coef, ratio_low, ratio_high, dual_clip, low, high,
    LOSS: tl.constexpr, KL: tl.constexpr, UNBIASED: tl.constexpr, LEVEL: tl.constexpr, MASKS: tl.constexpr,  # noqa: N803
    SEQUENCES: tl.constexpr, MEANS: tl.constexpr, BLOCK: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """One sequence or one block of tokens a program. Before there are log-probs it writes, in place of gradients, by
    what a token's policy loss and its other terms are multiplied in the whole."""
    program = tl.program_id(0).to(tl.int64)
    first = program * BLOCK
    last = tl.minimum(first + BLOCK, num_tokens)
    share, sequence_weight, sequence_ratio = inv_denominator, 1.0, 1.0
    if SEQUENCES:
        first = tl.load(bounds_ptr + program).to(tl.int64)
        last = tl.load(bounds_ptr + program + 1).to(tl.int64)
        num_trained, sequence_weight, sequence_ratio = _over_sequence(
            first, last, logprobs_ptr, old_ptr, mask_ptr, rollout_ptr, low, high, LOSS, LEVEL, MASKS, BLOCK
        )
        share = inv_denominator / num_trained if MEANS else inv_denominator

    zeros = tl.zeros([BLOCK], tl.float32)
    policy_sum, kl_sum, entropy_sum, tokens, clipped, ratios = zeros, zeros, zeros, zeros, zeros, zeros
    kl_to_old, weights, masked_tokens, out_of_bounds = zeros, zeros, zeros, zeros
    for start in range(first, last, BLOCK):
        index = start + tl.arange(0, BLOCK)
        valid = index < last
        trained = tl.load(mask_ptr + index, mask=valid, other=0) != 0
        logprob = zeros if logprobs_ptr is None else _load(logprobs_ptr, index, valid, trained)
        old = logprob if old_ptr is None else _load(old_ptr, index, valid, trained)
        weight, kept, outside = zeros + 1.0, trained, valid & False
        if rollout_ptr is not None:
            gap = old - _load(rollout_ptr, index, valid, trained)
            weight, kept, outside = _weighted(gap, trained, sequence_weight, low, high, LEVEL, MASKS)
        weight = weight if weights_ptr is None else _load(weights_ptr, index, valid, trained)

        grad, grad_entropy = share * weight, zeros + share
        if logprobs_ptr is not None:
            log_ratio = logprob - old
            ratio = zeros + sequence_ratio if LOSS == "gspo" else ratio_of(log_ratio)
            advantage = _load(advantages_ptr, index, valid, trained)
            loss, grad, cut = policy_terms(logprob, log_ratio, ratio, advantage, ratio_low, ratio_high, dual_clip, LOSS)
            grad *= weight
            if ref_ptr is not None:
                kl, grad_kl = kl_terms(log_ratio, logprob - _load(ref_ptr, index, valid, trained), KL, UNBIASED)
                grad += kl_coef * grad_kl
                kl_sum += tl.where(kept, kl, 0.0)
            entropy_sum += zeros if entropy_ptr is None else _load(entropy_ptr, index, valid, kept)
            grad, grad_entropy = share * grad, zeros - entropy_coef * share
            policy_sum += tl.where(kept, weight * loss, 0.0)
            tokens += tl.where(kept, 1.0, 0.0)
            clipped += tl.where(kept & cut, 1.0, 0.0)
            ratios += tl.where(kept, ratio, 0.0)
            kl_to_old += tl.where(kept, _k3(log_ratio), 0.0)
            weights += tl.where(kept, weight, 0.0)
            masked_tokens += tl.where(trained, 1.0, 0.0)
            out_of_bounds += tl.where(outside, 1.0, 0.0)
        if grad_logprobs_ptr is not None:
            grad = tl.where(kept, grad, 0.0).to(grad_logprobs_ptr.dtype.element_ty)
            tl.store(grad_logprobs_ptr + index, grad, mask=valid)
        if grad_entropy_ptr is not None:
            grad_entropy = tl.where(kept, grad_entropy, 0.0).to(grad_entropy_ptr.dtype.element_ty)
            tl.store(grad_entropy_ptr + index, grad_entropy, mask=valid)

    if logprobs_ptr is not None:
        policy, kl, bonus = tl.sum(policy_sum, axis=0), tl.sum(kl_sum, axis=0), tl.sum(entropy_sum, axis=0)
        terms = (policy + kl_coef * kl - entropy_coef * bonus, policy, kl, bonus)
        for i in tl.static_range(4):
            tl.store(sums_ptr + program * _NUM_METRICS + i, share * terms[i])
        sums = (tokens, clipped, ratios, kl_to_old, kl_sum, entropy_sum, weights, masked_tokens, out_of_bounds)
        for i in tl.static_range(9):
            tl.store(sums_ptr + program * _NUM_METRICS + 4 + i, tl.sum(sums[i], axis=0))


def loss_options(objective: PolicyObjective) -> dict[str, Any]:
    """Return the numbers and names of an objective's token losses, as the kernels take them."""
    return {
        "kl_coef": float(objective.kl_coef),
        "entropy_coef": float(objective.entropy_coef),
        "ratio_low": 1 - float(objective.clip_low),
        "ratio_high": 1 + float(objective.clip_high),
        "dual_clip": None if objective.dual_clip is None else float(objective.dual_clip),
        "LOSS": objective.policy_loss,
        "KL": objective.kl_estimator,
        "UNBIASED": objective.kl_unbiased_gradient,
    }


def launch_policy(
    logprobs: Tensor | None,
    entropy: Tensor | None,
    stream: PolicyStream,
    objective: PolicyObjective,
    grad_logprobs: Tensor | None = None,
    grad_entropy: Tensor | None = None,
) -> Tensor:
    """Return the metrics and fill the gradients that are given; before there are log-probs, see `_policy_kernel`."""
    size = len(stream.advantages)
    programs = len(stream.cu_seqlens) - 1 if objective.needs_sequences else triton.cdiv(size, BLOCK_SIZE)
    sums = torch.empty((programs, len(POLICY_METRICS)), dtype=torch.float32, device=stream.advantages.device)
    columns = [logprobs, entropy, stream.old_logprobs, stream.advantages, stream.loss_mask.view(torch.uint8)]
    columns += [stream.cu_seqlens, stream.ref_logprobs, stream.rollout_logprobs, stream.weights]
    columns = [None if column is None else column.contiguous() for column in columns]
    if programs:
        with _on_device(sums):
            _policy_kernel[(programs,)](
                *(*columns, grad_logprobs, grad_entropy, sums, size, 1.0 / stream.denominator(objective)),
                **loss_options(objective),
                low=float(objective.weight_low),
                high=float(objective.weight_high),
                LEVEL=objective.weight_level,
                MASKS=objective.weight_mode == "mask",
                SEQUENCES=objective.needs_sequences,
                MEANS=objective.reduction == "seq_mean_token_mean",
                BLOCK=BLOCK_SIZE,
                num_warps=NUM_WARPS,
            )
    return sums.sum(dim=0)


@triton.jit
def _scale_kernel(values_ptr, factor_ptr, size, BLOCK: tl.constexpr):  # noqa: N803
    """Multiply in place; a factor of 1, which is read on the device, touches nothing."""
    factor = tl.load(factor_ptr)
    if factor == 1.0:
        return
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, size, step):
        index = start + tl.arange(0, BLOCK)
        value = tl.load(values_ptr + index, mask=index < size).to(tl.float32) * factor
        tl.store(values_ptr + index, value.to(values_ptr.dtype.element_ty), mask=index < size)


@once_differentiable
def scaled_gradients(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    """A backward pass: the first two inputs' gradients, which were saved, times `ctx.factor` and the loss's own."""
    if ctx.factor is None:
        raise RuntimeError("a fused policy loss scales its gradients in place: its backward pass runs once")
    grads, factor, ctx.factor = ctx.saved_tensors, grad_loss if ctx.factor == 1 else grad_loss * ctx.factor, None
    for grad in grads:
        if grad is not None and grad.numel():
            programs = min(SCALE_PROGRAMS, triton.cdiv(grad.numel(), SCALE_BLOCK_SIZE))
            with _on_device(grad):
                _scale_kernel[(programs,)](grad, factor, grad.numel(), BLOCK=SCALE_BLOCK_SIZE, num_warps=8)
    return (*grads, *(None for _ in ctx.needs_input_grad[2:]))


@torch.compiler.disable
def packed_policy_loss_triton(
    logprobs: Tensor, entropy: Tensor | None, stream: PolicyStream, objective: PolicyObjective
) -> tuple[Tensor, Tensor]:
    """Return loss and metrics as `packed_policy_loss` does, which checks the arguments."""
    return _PackedPolicyLoss.apply(logprobs, entropy, stream, objective)


class _PackedPolicyLoss(torch.autograd.Function):
    """Gradients are made in the forward pass; the backward pass only scales them."""

    @staticmethod
    def forward(ctx: Any, logprobs: Tensor, entropy: Tensor | None, *terms: Any) -> tuple[Tensor, Tensor]:
        grads = [torch.empty_like(x) if x is not None and x.requires_grad else None for x in (logprobs, entropy)]
        metrics = launch_policy(logprobs, entropy, *terms, *grads)
        ctx.save_for_backward(*grads)
        ctx.factor = 1.0
        ctx.mark_non_differentiable(metrics)
        return metrics[0].clone(), metrics

    backward = staticmethod(scaled_gradients)
