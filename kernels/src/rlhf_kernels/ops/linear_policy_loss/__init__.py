"""Policy loss of a packed token stream from hidden states and the LM head, without storing the logits."""

from dataclasses import replace

import torch
from torch import Tensor

from rlhf_kernels.dispatch import takes_triton
from rlhf_kernels.objective import PolicyObjective
from rlhf_kernels.ops.linear_policy_loss.reference import linear_policy_loss_reference
from rlhf_kernels.ops.linear_token_logprobs import check_head
from rlhf_kernels.ops.packed_policy_loss.terms import PolicyStream, check_column
from rlhf_kernels.ops.token_logprobs import check_below, check_temperature


def linear_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    stream: PolicyStream,
    objective: PolicyObjective,
    *,
    temperature: float = 1.0,
    weight_grad_dtype: torch.dtype | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the loss and metrics of `packed_policy_loss`, with log-probs and entropy, without storing the logits.

        logprobs, entropy = token_logprobs(hidden @ weight.T + bias, token_ids, temperature)
        loss, metrics     = packed_policy_loss(logprobs, stream, objective, entropy=entropy)

    Gradients of the loss flow to `hidden` and `weight`. On CUDA the forward pass computes them and the backward pass,
    which can run only once, scales them in place. An untrained token costs as much as a trained one, so leave untrained
    rows out of the stream where there are many.

    Args:
        hidden: [N, H] bfloat16, float16 or float32.
        weight: [V, H], the LM head, in the dtype of `hidden`.
        token_ids: [N] int32 or int64, below V. A negative id marks an untrained row. On CUDA an id of V or more gives
            NaN.
        stream, objective: as in `packed_policy_loss`.
        temperature: > 0. Log-probs are those of the distribution sampled at this temperature.
        weight_grad_dtype: dtype in which CUDA sums the weight's gradient over chunks of tokens. None means the dtype of
            `weight`. float32 rounds only once and takes 4 V H more bytes.
        bias: [V], a constant in the dtype of `hidden`; None for zeros. -inf gives a token the probability 0, and its
            row of the weight a gradient of exactly 0.

    Returns:
        loss: float32 scalar.
        metrics: [8] float32, named by `POLICY_METRICS`.
        logprobs, entropy: [N] float32, nats, without gradient, 0.0 outside the loss mask.

    Raises:
        ValueError: as `packed_policy_loss`, a stream with a loss of its own, or (on the CPU) a token id beyond the
            vocabulary.
    """
    check_head(hidden, weight, bias)
    if bias is not None and bias.requires_grad:
        raise ValueError("the bias of linear_policy_loss is a constant, and the one given requires a gradient")
    if stream.own_loss is not None:
        raise ValueError("linear_policy_loss knows no `own_loss`; use packed_policy_loss with linear_token_logprobs")
    check_column("token_ids", token_ids, hidden, (torch.int32, torch.int64))
    stream.check(hidden, objective)
    check_temperature(temperature)
    check_below(token_ids, len(weight))
    # The mask and the negative ids say the same thing from here on: the kernels look only at the ids.
    stream = replace(stream, loss_mask=stream.loss_mask & (token_ids >= 0))
    token_ids = token_ids.masked_fill(~stream.loss_mask, -1)
    if takes_triton("linear_policy_loss", hidden):
        from rlhf_kernels.ops.linear_policy_loss.triton import linear_policy_loss_triton

        terms = (token_ids, temperature, stream, objective, weight_grad_dtype)
        return linear_policy_loss_triton(hidden, weight, *terms, bias=bias)
    return linear_policy_loss_reference(hidden, weight, token_ids, temperature, stream, objective, bias)
