"""Log-probability, entropy and log-sum-exp from hidden states and the LM head, without storing the logits."""

from torch import Tensor

from rlhf_kernels.dispatch import FLOATS, takes_triton
from rlhf_kernels.ops.linear_token_logprobs.reference import linear_token_logprobs_reference
from rlhf_kernels.ops.token_logprobs import TokenLogprobs, check_below, check_tokens


def linear_token_logprobs(
    hidden: Tensor, weight: Tensor, token_ids: Tensor, *, temperature: float = 1.0, bias: Tensor | None = None
) -> TokenLogprobs:
    """Return the results of `token_logprobs` for an LM head's logits. On CUDA the logits are never all in memory.

        logits = hidden weight^T + bias

    All three results carry exact gradients to `hidden`, `weight` and `bias`. A row with a negative token id is ignored:
    its results and gradients are 0.0, even if its hidden state is not finite.

    Args:
        hidden: [N, H] bfloat16, float16 or float32. Logits that are written to memory are rounded to this dtype.
        weight: [V, H], same dtype.
        token_ids: [N] integers below V. On CUDA an id of V or more gives NaN, because raising would stall the stream.
        temperature: > 0. Results are those of the distribution sampled at this temperature.
        bias: [V], same dtype.

    Returns:
        `TokenLogprobs`: three tensors [N] float32, nats.

    Raises:
        ValueError: a wrong shape, dtype, device, temperature, or (on the CPU) token id.
    """
    check_head(hidden, weight, bias)
    check_tokens(token_ids, hidden.shape[0], hidden.device, temperature)
    if takes_triton("linear_token_logprobs", hidden):
        from rlhf_kernels.ops.linear_token_logprobs.triton import linear_token_logprobs_triton

        return linear_token_logprobs_triton((hidden, weight, bias), token_ids, temperature)
    check_below(token_ids, weight.shape[0])
    return linear_token_logprobs_reference((hidden, weight, bias), token_ids, temperature)


def check_head(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raise ValueError unless hidden states and an LM head agree in shape, dtype and device."""
    tensors = [hidden, weight] if bias is None else [hidden, weight, bias]
    fits = hidden.ndim == weight.ndim == 2 and hidden.shape[1] == weight.shape[1] and 0 not in weight.shape
    if not fits or (bias is not None and bias.shape != weight.shape[:1]):
        got = " and ".join(str(list(tensor.shape)) for tensor in tensors)
        raise ValueError(f"an LM head takes hidden [N, H], weight [V, H] and bias [V], V and H above 0; got {got}")
    if hidden.dtype not in FLOATS or len({tensor.dtype for tensor in tensors}) > 1:
        got = ", ".join(str(tensor.dtype) for tensor in tensors)
        raise ValueError(f"hidden, weight and bias must share one of bfloat16, float16 and float32; got {got}")
    if len({tensor.device for tensor in tensors}) > 1:
        got = ", ".join(str(tensor.device) for tensor in tensors)
        raise ValueError(f"hidden, weight and bias must be on one device; got {got}")
