"""Fused operators of reinforcement learning on language models, each with a plain torch twin."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_kernels.ops.accumulate import accumulate_
    from rlhf_kernels.ops.segmented_scan import packed_gae, segmented_scan
    from rlhf_kernels.ops.token_logprobs import token_logprobs

__all__ = ["accumulate_", "packed_gae", "segmented_scan", "token_logprobs"]

_FOLDERS = {
    "accumulate_": "accumulate",
    "packed_gae": "segmented_scan",
    "segmented_scan": "segmented_scan",
    "token_logprobs": "token_logprobs",
}


def __getattr__(name: str) -> Any:
    """Load torch only when an operator is asked for."""
    if name not in _FOLDERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"rlhf_kernels.ops.{_FOLDERS[name]}"), name)
