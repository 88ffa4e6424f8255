"""The operators as users call them: arguments checked, then Triton on CUDA and the plain twin elsewhere."""

import functools
import logging

import torch
from torch import Tensor

from rlhf_kernels.ops.accumulate.reference import accumulate_reference_
from rlhf_kernels.ops.token_logprobs.reference import token_logprobs_reference

logger = logging.getLogger(__name__)

LOGIT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


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
    if _takes_triton("token_logprobs", logits):
        from rlhf_kernels.ops.token_logprobs.triton import token_logprobs_triton

        return token_logprobs_triton(logits, token_ids, temperature)
    return token_logprobs_reference(logits, token_ids, temperature)


def accumulate_(total: Tensor, part: Tensor) -> None:
    """Add `part` to `total` in place, as gradients of micro-batches are added up.

        total_n = total_n + part_n

    Args:
        total: float32, of any shape, contiguous.
        part: bfloat16, float16 or float32, as many elements in the same order.

    Raises:
        ValueError: a wrong shape, dtype, device or layout.
    """
    if total.dtype != torch.float32 or part.dtype not in LOGIT_DTYPES:
        message = "accumulate_ adds bfloat16, float16 or float32 to float32"
        raise ValueError(f"{message}; got {part.dtype} and {total.dtype}")
    if total.numel() != part.numel() or total.device != part.device:
        shapes = f"{list(part.shape)} on {part.device} and {list(total.shape)} on {total.device}"
        raise ValueError(f"accumulate_ takes as many elements as there are sums, on one device; got {shapes}")
    if not total.is_contiguous():
        raise ValueError("accumulate_ needs contiguous sums, which it changes in place")
    if _takes_triton("accumulate_", total):
        from rlhf_kernels.ops.accumulate.triton import accumulate_triton_

        return accumulate_triton_(total, part)
    return accumulate_reference_(total, part)


def _takes_triton(operator: str, tensor: Tensor) -> bool:
    """Return whether an operator's kernel runs; on CUDA it is logged once when it does not."""
    if not tensor.is_cuda:
        return False
    if reason := triton_unavailable_reason():
        log_fallback_once(operator, reason)
    return reason is None


@functools.cache
def triton_unavailable_reason() -> str | None:
    """Return why Triton kernels cannot run on the current CUDA device, or None when they can."""
    try:
        import triton
    except ImportError as error:
        return f"triton cannot be imported ({error})"
    capability = torch.cuda.get_device_capability()
    if capability < (7, 0):
        return f"triton {triton.__version__} needs compute capability 7.0, the GPU has {capability[0]}.{capability[1]}"
    return None


@functools.cache
def log_fallback_once(operator: str, reason: str) -> None:
    """Warn that an operator takes its slower twin; the same pair is logged only once in a process."""
    logger.warning("%s runs as plain torch: %s", operator, reason)


def _check_arguments(logits: Tensor, token_ids: Tensor, temperature: float) -> None:
    if logits.ndim != 2 or token_ids.shape != logits.shape[:1]:
        shapes = f"logits {list(logits.shape)} and token_ids {list(token_ids.shape)}"
        raise ValueError(f"token_logprobs takes logits [N, V] and token_ids [N]; got {shapes}")
    if logits.dtype not in LOGIT_DTYPES:
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
