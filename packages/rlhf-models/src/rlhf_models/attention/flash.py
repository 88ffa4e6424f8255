"""FlashAttention over sequences that are stored end to end, on a GPU.

Version 2 is part of torch. Version 4 comes with the package `flash-attn-4`, and runs here on GPUs of compute capability
9 and 10: Hopper, and Blackwell for data centers. torch can call its functions as well, after
`torch.nn.attention.activate_flash_attention_impl`, but that is a switch for all models of a process, and does not pass
on the longest lengths.
"""

import functools
import importlib
import inspect
import logging
import os
import warnings
from importlib.util import find_spec
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_PACKAGE = "flash_attn.cute"
_MAJORS = (9, 10)  # major numbers of the compute capability
_LARGEST_HEAD = 128  # for which each of these GPUs has kernels
# The functions that are called, and their arguments. They are private: another version may change them.
_CALLED = {
    "_flash_attn_fwd": {"softmax_scale", "causal", "return_lse"},
    "_flash_attn_bwd": {"softmax_scale", "causal", "deterministic"},
}


def flash_4_unavailable_reason(head_dim: int) -> str | None:
    """Return why FlashAttention 4 cannot run here with heads of size `head_dim`, or None if it can."""
    if not torch.cuda.is_available():
        return "it runs on CUDA, and there is no GPU"
    if torch.cuda.get_device_capability()[0] not in _MAJORS:
        return f"it needs a GPU of compute capability 9 or 10, and this is a {torch.cuda.get_device_name()}"
    if head_dim > _LARGEST_HEAD or head_dim % 8:
        return f"its head size must be a multiple of 8 and at most {_LARGEST_HEAD}, the model's is {head_dim}"
    try:
        _flash_4()
    except ImportError as error:
        return f"the package flash-attn-4 cannot be imported: {error}"
    return None


def flash_4_is_faster(head_dim: int) -> bool:
    """Return whether FlashAttention 4 can run here and was measured to be faster than 2 (`docs/measured.md`)."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9 or head_dim not in (64, 128):
        return False
    reason = flash_4_unavailable_reason(head_dim)
    _log_choice_once(reason)
    return reason is None


@functools.cache
def _log_choice_once(reason: str | None) -> None:
    if reason is None:
        logger.info("packed sequences take FlashAttention 4")
    else:
        message = "packed sequences take FlashAttention 2: %s; 4, of rlhf-models' extra `flash`, is faster on this GPU"
        logger.info(message, reason)


@functools.cache
def _flash_4() -> ModuleType:
    """Import FlashAttention 4, which takes seconds. Raises ImportError where it cannot be used."""
    if find_spec("flash_attn") is None or find_spec(_PACKAGE) is None:
        raise ImportError(f"no module {_PACKAGE}")
    # Its kernels are compiled at their first call, in tens of seconds. They are kept for later processes.
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", os.path.join(cache_dir(), "flash_attention_4"))
    # Its compiler warns about its own kernels.
    warnings.filterwarnings("ignore", message=r"Argument \w+ \(position \d+\) cannot be converted to a JitArgument")
    try:
        module = importlib.import_module(f"{_PACKAGE}.interface")
    except Exception as error:  # any: an import with unsuitable dependencies may raise whatever they raise
        raise ImportError(f"{type(error).__name__}: {error}") from error
    for name, arguments in _CALLED.items():
        function = getattr(module, name, None)
        if function is None or not arguments | {*Lengths._fields} <= inspect.signature(function).parameters.keys():
            raise ImportError(f"its function {name} is missing or takes other arguments than in the version 4.0.0b36")
    return module


class Lengths(NamedTuple):
    """Where sequences lie among the queries and among the keys; queries see keys of their own sequence only.

    The names are those of FlashAttention's arguments.

    Attributes:
        cu_seqlens_q, cu_seqlens_k: [S + 1] int32, the bounds of the S sequences.
        max_seqlen_q, max_seqlen_k: tokens of the longest sequence.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Lengths,
    *,
    causal: bool,
    scale: float | None,
    version: int,
) -> tuple[Tensor, Tensor]:
    """Return the output [N, H, D], and the logarithms of the softmax's denominators, [H, N] float32.

    Args:
        query: [N, H, D] bfloat16 or float16.
        key, value: [M, K, D], K dividing H.
        lengths: lengths of the sequences in N and M.
        causal: whether a query sees only the keys up to its own place, the last query and the last key being level.
        scale: factor of the scores; None means D ** -0.5.
        version: 2 or 4.

    Source: Dao 2023, arXiv:2307.08691, algorithm 1.
    """
    if version == 4:
        options = {"softmax_scale": scale, "causal": causal, "return_lse": True}
        return _flash_4()._flash_attn_fwd(query, key, value, **lengths._asdict(), **options)[:2]
    flash = torch.ops.aten._flash_attention_forward
    return flash(query, key, value, *lengths, 0.0, causal, False, scale=scale)[:2]


def backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    lengths: Lengths,
    *,
    causal: bool,
    scale: float | None,
    version: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value.

    Args:
        gradient: gradient of the output, [N, H, D].
        output, lse: what `forward` returned.
        query, key, value, lengths, causal, scale, version: what it got.

    Source: Dao 2023, arXiv:2307.08691, algorithm 2.
    """
    tensors = (query, key, value, output)
    if version == 4:
        deterministic = torch.are_deterministic_algorithms_enabled()
        options = {"softmax_scale": scale, "causal": causal, "deterministic": deterministic}
        return _flash_4()._flash_attn_bwd(*tensors, gradient, lse, **lengths._asdict(), **options)[:3]
    flash = torch.ops.aten._flash_attention_backward
    # Without dropout there is no state of a random generator.
    no_state = (torch.zeros(2, dtype=torch.uint64, device=query.device), torch.empty(0, device=query.device))
    return flash(gradient, *tensors, lse, *lengths, 0.0, causal, *no_state, scale=scale)
