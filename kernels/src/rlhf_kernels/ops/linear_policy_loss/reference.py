"""The plain torch twin of `linear_policy_loss`: full logits and autograd."""

import torch
from torch import Tensor
from torch.nn.functional import linear

from rlhf_kernels.objective import PolicyObjective
from rlhf_kernels.ops.packed_policy_loss.reference import packed_policy_loss_reference
from rlhf_kernels.ops.packed_policy_loss.terms import PolicyStream
from rlhf_kernels.ops.token_logprobs.reference import token_logprobs_reference


def linear_policy_loss_reference(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    temperature: float,
    stream: PolicyStream,
    objective: PolicyObjective,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return loss, metrics, log-probs and entropy as `linear_policy_loss` does."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    logits = linear(hidden.to(wide), weight.to(wide), None if bias is None else bias.to(wide))
    logprobs, entropy = token_logprobs_reference(logits, token_ids, temperature)[:2]
    loss, metrics = packed_policy_loss_reference(logprobs, entropy, stream, objective)
    return loss, metrics, logprobs.detach(), entropy.detach()
