"""Log-probability of one token per row of logits, with the entropy and log-sum-exp of the row."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlhf_kernels.dispatch import FLOATS, takes_triton
from rlhf_kernels.ops.token_logprobs.reference import (
    TokenLogprobs,
    sharded_token_logprobs_reference,
    token_logprobs_reference,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def token_logprobs(
    logits: Tensor,
    token_ids: Tensor,
    *,
    temperature: float = 1.0,
    inplace_backward: bool = False,
    group: "ProcessGroup | None" = None,
    vocab_start: int = 0,
) -> TokenLogprobs:
    """Return the log-probability of one token per row, and the entropy and log-sum-exp of the row.

        logprob_n = x[n, token_ids[n]] - logsumexp(x[n]),   entropy_n = -sum_v p[n, v] * log p[n, v]
        x = logits / temperature,   p = softmax(x)

    All three carry gradients to `logits`. A row with a negative token id is ignored: its results and gradients are 0.0,
    even if its logits are not finite.

    Args:
        logits: [N, V] bfloat16, float16 or float32. With a group: [N, V_r], the columns of the vocabulary that this
            rank holds, from `vocab_start` on.
        token_ids: [N] integers below the size of the whole vocabulary. On CUDA, and with a group, an id beyond it gives
            NaN, because raising would wait for the device or for the other ranks.
        temperature: > 0. Results are those of the distribution sampled at this temperature.
        inplace_backward: let the backward pass write the gradient over the logits, which halves the memory. The logits
            must not be read afterwards. Autograd raises if another node that saved them needs them, or if the backward
            pass is run again (`retain_graph=True`).
        group: ranks that share the vocabulary. Every rank gets the results of whole rows and must derive the same loss
            from them; each rank gets the gradient of its own columns.
        vocab_start: id of the first column.

    Returns:
        `TokenLogprobs`: three tensors [N] float32, nats.

    Raises:
        ValueError: a wrong shape, dtype, device, temperature, or (on the CPU) token id; `vocab_start` without a group;
            `inplace_backward` for logits that are a leaf of the graph.
    """
    _check_arguments(logits, token_ids, temperature)
    if vocab_start and group is None:
        raise ValueError(f"vocab_start is {vocab_start} without a group: logits are then the whole vocabulary's")
    if inplace_backward and torch.is_grad_enabled() and logits.requires_grad and logits.is_leaf:
        raise ValueError("inplace_backward would overwrite a leaf; it is for logits that a model has computed")
    if takes_triton("token_logprobs", logits):
        from rlhf_kernels.ops.token_logprobs.triton import token_logprobs_triton

        return token_logprobs_triton(logits, token_ids, temperature, inplace_backward, group, vocab_start)
    if group is not None:
        return sharded_token_logprobs_reference(logits, token_ids, temperature, group, vocab_start)
    check_below(token_ids, logits.shape[1])
    return token_logprobs_reference(logits, token_ids, temperature)


def check_tokens(token_ids: Tensor, num_rows: int, device: torch.device, temperature: float) -> None:
    """Raise ValueError unless token ids are one integer per row, on the device of the rows, and temperature > 0."""
    if token_ids.shape != (num_rows,) or token_ids.dtype not in (torch.int32, torch.int64):
        got = f"{list(token_ids.shape)} in {token_ids.dtype}"
        raise ValueError(f"token_ids must be [{num_rows}], one per row, in int32 or int64; got {got}")
    if token_ids.device != device:
        raise ValueError(f"token_ids are on {token_ids.device}, the rest on {device}; all must be on one device")
    check_temperature(temperature)


def check_temperature(temperature: float) -> None:
    """Raise ValueError unless a temperature is above 0 and finite."""
    if not 0 < temperature < float("inf"):
        raise ValueError(f"temperature is {temperature}; it must be positive and finite")


def check_below(token_ids: Tensor, vocab_size: int) -> None:
    """Raise ValueError for an id outside the vocabulary. Checked on CPUs only: on CUDA it would stall the stream."""
    if token_ids.device.type == "cpu" and token_ids.numel() and int(token_ids.max()) >= vocab_size:
        raise ValueError(f"token id {int(token_ids.max())} is outside the vocabulary of {vocab_size}")


def _check_arguments(logits: Tensor, token_ids: Tensor, temperature: float) -> None:
    if logits.ndim != 2 or logits.shape[1] == 0:
        got = list(logits.shape)
        raise ValueError(f"token_logprobs takes logits [N, V] with at least one token in the vocabulary; got {got}")
    if logits.dtype not in FLOATS:
        raise ValueError(f"token_logprobs takes logits in bfloat16, float16 or float32; got {logits.dtype}")
    check_tokens(token_ids, logits.shape[0], logits.device, temperature)
