"""Tokens drawn from an LM head's distribution, and their log-probs, from hidden states without storing the logits."""

import torch
from torch import Tensor

from rlhf_kernels.dispatch import takes_triton
from rlhf_kernels.ops.linear_sample.reference import SampledTokens, linear_sample_reference
from rlhf_kernels.ops.linear_token_logprobs import check_head


def linear_sample(
    hidden: Tensor, weight: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, *, bias: Tensor | None = None
) -> SampledTokens:
    """Draw one token per row from the softmax of an LM head's logits. On a Hopper GPU the logits are never in memory.

        logits  = hidden weight^T + bias
        token   ~ softmax(logits / temperature)
        logprob = log softmax(logits / temperature)[token]

    A row of temperature 0 takes its likeliest token, of equal ones the first, and its log-prob is that at temperature
    1. A draw depends on the row's hidden state, seed and position alone: neither on the other rows nor on their number.
    The same seed and position give the same noise, so a sequence needs one seed, and a position per token.

    If a logit of a row is NaN or +inf, or all are -inf, its token is 0 and its log-prob NaN. A logit of -inf, by the
    bias, is never drawn.

    Args:
        hidden: [N, H] bfloat16, float16 or float32.
        weight: [V, H], same dtype.
        temperature: [N] float32, >= 0. On CUDA a negative one gives NaN, because raising would stall the stream.
        seeds: [N] int64.
        positions: [N] int64.
        bias: [V], same dtype as `hidden`.

    Returns:
        `SampledTokens`: token ids, log-probs and log-sum-exps, each [N].

    Raises:
        ValueError: a wrong shape, dtype, device, or (on the CPU) temperature.
    """
    check_head(hidden, weight, bias)
    _check_rows(hidden, (("temperature", temperature), ("seeds", seeds), ("positions", positions)))
    if is_fused(hidden, weight):
        from rlhf_kernels.ops.linear_sample import triton

        return triton.linear_sample_triton((hidden, weight, bias), temperature, seeds, positions)
    if not hidden.is_cuda and not bool(((temperature >= 0) & temperature.isfinite()).all()):
        wrong = temperature[~((temperature >= 0) & temperature.isfinite())][0].item()
        raise ValueError(f"temperatures must be finite and at least 0; got {wrong}\nhint: 0 takes the likeliest token")
    return linear_sample_reference((hidden, weight, bias), temperature, seeds, positions)


def is_fused(hidden: Tensor, weight: Tensor) -> bool:
    """Return whether `linear_sample` takes hidden states [N, H] and a weight [V, H] without logits in memory."""
    if not takes_triton("linear_sample", hidden):
        return False
    from rlhf_kernels.ops.linear_token_logprobs import product

    return product.fits(hidden, weight)


def _check_rows(hidden: Tensor, columns: tuple[tuple[str, Tensor], ...]) -> None:
    """Raise ValueError unless each column has one number per row, of its dtype and on the device of `hidden`."""
    for name, column in columns:
        dtype = torch.float32 if name == "temperature" else torch.int64
        if column.shape == hidden.shape[:1] and column.dtype == dtype and column.device == hidden.device:
            continue
        got = f"{list(column.shape)} {column.dtype} on {column.device}"
        message = f"{name} must be [{len(hidden)}] {dtype} on {hidden.device}; got {got}"
        raise ValueError(f"{message}\nhint: linear_sample takes one number per row of hidden")
