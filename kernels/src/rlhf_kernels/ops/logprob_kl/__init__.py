"""Log-probabilities of a policy and its reference, and the KL between them, from hidden states and LM heads."""

from typing import NamedTuple

import torch
from torch import Tensor

from rlhf_kernels.dispatch import takes_triton
from rlhf_kernels.ops.linear_token_logprobs import check_head, linear_token_logprobs
from rlhf_kernels.ops.logprob_kl.reference import logprob_kl_reference
from rlhf_kernels.ops.token_logprobs import check_below, check_tokens


class LogprobKL(NamedTuple):
    """Results per row, [N] float32 in nats, 0.0 in ignored rows.

    Attributes:
        logprobs: log-prob of the row's token under the policy.
        entropy: entropy of the policy's distribution.
        ref_logprobs: log-prob of the row's token under the reference, without gradient.
        k1, k2, k3: estimates of KL(policy || reference) from the token.
        kl: KL(policy || reference) summed over the vocabulary; None unless `full_kl` was set.
    """

    logprobs: Tensor
    entropy: Tensor
    ref_logprobs: Tensor
    k1: Tensor
    k2: Tensor
    k3: Tensor
    kl: Tensor | None


def logprob_kl(
    hidden: Tensor,
    weight: Tensor,
    ref_hidden: Tensor,
    ref_weight: Tensor,
    token_ids: Tensor,
    *,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    ref_bias: Tensor | None = None,
    full_kl: bool = False,
) -> LogprobKL:
    """Return log-probs of both models and the KL between them. On CUDA the logits are never all in memory.

        x = (hidden weight^T + bias) / temperature,   logp = log_softmax(x);   ref_logp likewise
        d = logp[i] - ref_logp[i]                     for the token i
        k1 = d,   k2 = d^2 / 2,   k3 = e^-d - 1 + d
        kl = sum_v exp(logp[v]) (logp[v] - ref_logp[v])

    `hidden`, `weight` and `bias` get exact gradients; the reference gets none. Equal models give exactly 0. A row with
    a negative token id is ignored: its results and gradients are 0.0, even if its hidden states are not finite.

    Args:
        hidden: [N, H] bfloat16, float16 or float32.
        weight: [V, H], same dtype.
        ref_hidden: [N, H_r], on the same device. H_r and the dtype may differ from the policy's.
        ref_weight: [V, H_r], dtype of `ref_hidden`.
        token_ids: [N] integers below V. On CUDA an id of V or more gives NaN, because raising would stall the stream.
        temperature: > 0, applied to both distributions.
        bias, ref_bias: [V], in the dtypes of their heads.
        full_kl: whether to compute `kl`. Its gradient computes the logits of both heads a second time.

    Raises:
        ValueError: a wrong shape, dtype, device, temperature, or (on the CPU) token id.

    Source: Schulman 2020, "Approximating KL divergence" (joschu.net/blog/kl-approx.html).
    """
    check_head(hidden, weight, bias)
    check_head(ref_hidden, ref_weight, ref_bias)
    check_tokens(token_ids, len(hidden), hidden.device, temperature)
    if len(ref_hidden) != len(hidden) or len(ref_weight) != len(weight) or ref_hidden.device != hidden.device:
        got = f"{len(hidden)} x {len(weight)} on {hidden.device}, {len(ref_hidden)} x {len(ref_weight)}"
        raise ValueError(f"policy and reference must share rows, vocabulary, device; got {got} on {ref_hidden.device}")
    kl = None
    if not full_kl:
        # Only the full KL reads the rows of both models together; without it, two separate calls cost the same.
        logprobs, entropy, _ = linear_token_logprobs(hidden, weight, token_ids, temperature=temperature, bias=bias)
        with torch.no_grad():
            reference = linear_token_logprobs(ref_hidden, ref_weight, token_ids, temperature=temperature, bias=ref_bias)
        ref_logprobs = reference.logprobs
    else:
        policy_head, ref_head = (hidden, weight, bias), (ref_hidden, ref_weight, ref_bias)
        if takes_triton("logprob_kl", hidden):
            from rlhf_kernels.ops.logprob_kl.triton import logprob_kl_triton as compute
        else:
            check_below(token_ids, len(weight))
            compute = logprob_kl_reference
        logprobs, entropy, ref_logprobs, kl = compute(policy_head, ref_head, token_ids, temperature)
    difference = logprobs - ref_logprobs
    k3 = torch.expm1(-difference) + difference
    return LogprobKL(logprobs, entropy, ref_logprobs, difference, difference**2 / 2, k3, kl)
