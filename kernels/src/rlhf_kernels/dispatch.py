"""Choice of implementation: Triton on CUDA, the plain torch twin elsewhere."""

import contextlib
import functools
import logging

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

FLOATS = (torch.bfloat16, torch.float16, torch.float32)  # input dtypes of the kernels, which compute in float32


def takes_triton(operator: str, tensor: Tensor) -> bool:
    """Return whether an operator runs its Triton kernel. A fallback on CUDA is logged once, with the reason."""
    if not tensor.is_cuda:
        return False
    if reason := triton_unavailable_reason():
        log_fallback_once(operator, reason)
    return reason is None


def on_device(tensor: Tensor) -> contextlib.AbstractContextManager:
    """Make the tensor's device current: Triton launches on the current device, whatever its arguments are on."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


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
    """Warn that an operator runs its slower twin. Each pair of operator and reason is logged once per process."""
    logger.warning("%s runs as plain torch: %s", operator, reason)
