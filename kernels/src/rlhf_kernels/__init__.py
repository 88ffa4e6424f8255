"""Fused operators of reinforcement learning on language models, each with a plain torch twin."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_kernels.dispatch import accumulate_, token_logprobs

__all__ = ["accumulate_", "token_logprobs"]


def __getattr__(name: str) -> Any:
    """Load torch only when an operator is asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rlhf_kernels import dispatch

    return getattr(dispatch, name)
