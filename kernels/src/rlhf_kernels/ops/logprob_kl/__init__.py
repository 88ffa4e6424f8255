"""Log-probabilities of a policy and of its reference, and their divergence, from hidden states and LM heads."""

from typing import NamedTuple

import torch
from torch import Tensor

from rlhf_kernels.dispatch import takes_triton
from rlhf_kernels.ops.linear_token_logprobs import check_head, linear_token_logprobs
from rlhf_kernels.ops.logprob_kl.reference import logprob_kl_reference
from rlhf_kernels.ops.token_logprobs import check_below, check_tokens


class LogprobKL(NamedTuple):
    """What a policy and its reference say of one token a row; [N] float32, nats, 0.0 in an ignored row.

    Attributes:
        logprobs: of the token, by the policy.
        entropy: of the policy's distribution.
        ref_logprobs: of the token, by the reference; carries no gradient.
        k1, k2, k3: estimates of KL(policy || reference) from the token.
        kl: KL(policy || reference) over the whole vocabulary; None where it was not asked for.
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
    """Return log-probabilities of both models and the KL between them; neither's logits are whole in memory on CUDA.

        x = (hidden weight^T + bias) / temperature,   logp = log_softmax(x);   ref_logp likewise
        d = logp[i] - ref_logp[i]                     for the token i
        k1 = d,   k2 = d^2 / 2,   k3 = e^-d - 1 + d
        kl = sum_v exp(logp[v]) (logp[v] - ref_logp[v])

    Gradients flow to `hidden`, `weight` and `bias`, exactly; none to the reference. Equal models give exactly 0. A
    row whose token id is negative is ignored: its results and gradients are 0.0, whatever its hidden states.

    Args:
        hidden: [N, H] bfloat16, float16 or float32.
        weight: [V, H], of the same dtype.
        ref_hidden: [N, H_r], on the same device; H_r and the dtype may be others than the policy's.
        ref_weight: [V, H_r], of the dtype of `ref_hidden`.
        token_ids: [N] integers below V. On CUDA an id of V or more gives NaN, because to raise would stall the stream.
        temperature: > 0; of both distributions.
        bias, ref_bias: [V], of their heads' dtypes.
        full_kl: whether `kl` is wanted; its gradient costs both heads' products again.

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
        # Without a term of both models' whole rows there is nothing to gain from reading them together.
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
