"""The plain torch twin of `logprob_kl` with the KL over the whole vocabulary."""

import torch
from torch import Tensor

from rlhf_kernels.ops.linear_token_logprobs.reference import Head, head_logits
from rlhf_kernels.ops.token_logprobs.reference import token_logprobs_reference


def logprob_kl_reference(policy: Head, reference: Head, token_ids: Tensor, temperature: float) -> tuple[Tensor, ...]:
    """Return log-probs, entropies, the reference's log-probs and KL(policy || reference), [N] in at least float32."""
    logits = head_logits(policy, token_ids)
    with torch.no_grad():
        ref_logits = head_logits(reference, token_ids)
    logprobs, entropy, _ = token_logprobs_reference(logits, token_ids, temperature)
    ref_logprobs, _, _ = token_logprobs_reference(ref_logits, token_ids, temperature)
    logp = _all_logprobs(logits, temperature)
    ref_logp = _all_logprobs(ref_logits, temperature)
    probs = logp.exp()
    # p (log p - log q) tends to 0 as p does, but -inf minus -inf would make it NaN.
    gone = probs == 0
    kl = (probs * (logp.masked_fill(gone, 0.0) - ref_logp.masked_fill(gone, 0.0))).sum(-1)
    return logprobs, entropy, ref_logprobs, kl.masked_fill(token_ids < 0, 0.0)


def _all_logprobs(logits: Tensor, temperature: float) -> Tensor:
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return torch.log_softmax((scores - scores.detach().amax(-1, keepdim=True)) / temperature, dim=-1)
