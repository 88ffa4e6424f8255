"""Log-probability of one token a row, and entropy of the row, from logits."""

import torch
from torch import Tensor

from rlhf_kernels.dispatch import FLOATS, takes_triton
from rlhf_kernels.ops.token_logprobs.reference import token_logprobs_reference


def token_logprobs(logits: Tensor, token_ids: Tensor, *, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return the log-probability of one token a row, and the entropy of the row's distribution.

        logprob_n = x[n, token_ids[n]] - logsumexp(x[n]),   entropy_n = -sum_v p[n, v] * log p[n, v]
        x = logits / temperature,   p = softmax(x)

    Both results carry gradients to `logits`. A row whose token id is negative is ignored: its results are 0.0 and so
    are its gradients, whatever its logits.

    Args:
        logits: [N, V] bfloat16, float16 or float32.
        token_ids: [N] integers below V. On CUDA an id of V or more gives NaN, because to raise would stall the stream.
        temperature: > 0; results are those of the distribution sampled at this temperature.

    Returns:
        logprobs: [N] float32, nats.
        entropy: [N] float32, nats.

    Raises:
        ValueError: a wrong shape, dtype, device, temperature, or (on the CPU) token id.
    """
    _check_arguments(logits, token_ids, temperature)
    if takes_triton("token_logprobs", logits):
        from rlhf_kernels.ops.token_logprobs.triton import token_logprobs_triton

        return token_logprobs_triton(logits, token_ids, temperature)
    return token_logprobs_reference(logits, token_ids, temperature)


def _check_arguments(logits: Tensor, token_ids: Tensor, temperature: float) -> None:
    if logits.ndim != 2 or token_ids.shape != logits.shape[:1]:
        shapes = f"logits {list(logits.shape)} and token_ids {list(token_ids.shape)}"
        raise ValueError(f"token_logprobs takes logits [N, V] and token_ids [N]; got {shapes}")
    if logits.dtype not in FLOATS:
        raise ValueError(f"token_logprobs takes logits in bfloat16, float16 or float32; got {logits.dtype}")
    if token_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"token_logprobs takes token_ids in int32 or int64; got {token_ids.dtype}")
    if token_ids.device != logits.device:
        raise ValueError(f"token_ids are on {token_ids.device}, logits on {logits.device}; both must be on one device")
    if not 0 < temperature < float("inf"):
        raise ValueError(f"temperature is {temperature}; it must be positive and finite")
    if logits.shape[1] == 0:
        raise ValueError("token_logprobs needs a vocabulary of at least one token; got logits of width 0")
    if token_ids.device.type == "cpu" and token_ids.numel() and int(token_ids.max()) >= logits.shape[1]:
        raise ValueError(f"token id {int(token_ids.max())} is outside the vocabulary of {logits.shape[1]}")
