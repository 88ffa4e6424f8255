"""Fused operators for reinforcement learning on language models, each with a plain torch twin."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_kernels.objective import PolicyObjective
    from rlhf_kernels.ops.accumulate import accumulate_
    from rlhf_kernels.ops.adamw_bf16_moments import adamw_bf16_moments_
    from rlhf_kernels.ops.linear_policy_loss import linear_policy_loss
    from rlhf_kernels.ops.linear_sample import linear_sample
    from rlhf_kernels.ops.linear_token_logprobs import linear_token_logprobs
    from rlhf_kernels.ops.logprob_kl import logprob_kl
    from rlhf_kernels.ops.merge_attention import merge_attention_
    from rlhf_kernels.ops.packed_policy_loss import POLICY_METRICS, PolicyStream, packed_policy_loss
    from rlhf_kernels.ops.segmented_scan import packed_gae, segmented_scan
    from rlhf_kernels.ops.token_logprobs import token_logprobs

__all__ = [
    "POLICY_METRICS",
    "PolicyObjective",
    "PolicyStream",
    "accumulate_",
    "adamw_bf16_moments_",
    "linear_policy_loss",
    "linear_sample",
    "linear_token_logprobs",
    "logprob_kl",
    "merge_attention_",
    "packed_gae",
    "packed_policy_loss",
    "segmented_scan",
    "token_logprobs",
]

# The module of each public name. Most operators are named like their folder.
_MODULES = {name: f"ops.{name.rstrip('_')}" for name in __all__} | {
    "POLICY_METRICS": "ops.packed_policy_loss",
    "PolicyObjective": "objective",
    "PolicyStream": "ops.packed_policy_loss",
    "packed_gae": "ops.segmented_scan",
}


def __getattr__(name: str) -> Any:
    """Import the operator on first use, so that importing the package does not import torch."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"rlhf_kernels.{_MODULES[name]}"), name)
