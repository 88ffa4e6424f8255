"""Fused `logprob_kl`: reads blocks of both models' logits together, forward and again backward."""

import torch
from torch import Tensor

from rlhf_kernels.ops.linear_token_logprobs.reference import Head
from rlhf_kernels.ops.linear_token_logprobs.triton import head_results


@torch.compiler.disable  # kernels write into buffers, which a traced graph would copy
def logprob_kl_triton(policy: Head, reference: Head, token_ids: Tensor, temperature: float) -> tuple[Tensor, ...]:
    """Return what `logprob_kl_reference` does."""
    reference = (None if tensor is None else tensor.detach() for tensor in reference)
    logprobs, entropy, _, kl, ref_logprobs = head_results(token_ids, temperature, *policy, *reference)
    return logprobs, entropy, ref_logprobs, kl
