"""A teacher's distributions of the tokens that a policy wrote, and how far the policy's are from them, to be learned.

Shape letters: N tokens, V vocabulary, K of its tokens.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from rlhf_kernels.ops.packed_policy_loss.terms import MIN_REST
from rlhf_models.batch import TokenBatch, to_device
from rlhf_train.algorithms.token_specs import DistributionSpec
from rlhf_train.losses.preference import MAX_BLOCK, distillation_loss

MIN_LOGPROB = -1e3  # nats; in place of -inf


def most_likely(logits: Tensor, top_k: int, temperature: float) -> Tensor:
    """Return the ids of each distribution's most likely tokens, their log-probs, and that of all others together.

    Args:
        logits: [N, V] float.
        top_k: K, from 1 to V.
        temperature: of the distribution, > 0.

    Returns:
        [N, 2 K + 1] float32, K ids and then K + 1 log-probs in nats, at least `MIN_LOGPROB`: of no others, too, where K
        is V. Ids are exact up to 2**24.
    """
    found = []
    for block in logits.split(max(MAX_BLOCK // logits.shape[-1], 1)):
        logprobs = (block.float() / temperature).log_softmax(-1)
        top = logprobs.topk(top_k)
        # From the others themselves: 1 minus the sum of the first would have no digit left where they have nearly all.
        rest = logprobs.scatter(1, top.indices, -torch.inf).logsumexp(-1, keepdim=True)
        found.append(torch.cat([top.indices.float(), top.values, rest], dim=1))
    return torch.cat(found).clamp(min=MIN_LOGPROB)


def teacher_column(
    teacher: Callable[..., Tensor], batch: TokenBatch, wanted: Tensor, *, top_k: int, temperature: float
) -> Tensor:
    """Return `most_likely` of the teacher before each wanted token, [b, t, 2 K + 1] float32; 0.0 for other tokens.

    Args:
        teacher: a causal language model, see `rlhf_models.actor.Actor`.
        batch: its input.
        wanted: [b, t] bool in the layout of `batch`, on the CPU.
    """
    index = (batch.host_target_mask & wanted).flatten().nonzero()[:, 0]
    index = to_device(index, batch.input_ids.device)
    found = most_likely(teacher(batch, logits_after=index - 1), top_k, temperature)
    flat = found.new_zeros(wanted.numel(), found.shape[1])
    return flat.index_copy(0, index, found).view(*wanted.shape, -1)


def coarse_divergence(logprobs: Tensor, teacher_logprobs: Tensor, spec: DistributionSpec) -> Tensor:
    """Return the divergence of the policy's and the teacher's distribution over K tokens and the rest, for each token.

        D(p', q'),   p' = (p_1, ..., p_K, 1 - p_1 - ... - p_K),   q' likewise

    D is that of `preference.distillation_loss`, but with forward_kl less the entropy of q', which is a constant: all
    are 0 for equal distributions. As all other tokens count as one, it is at most the divergence of the whole
    distributions, and equal to it if K is the vocabulary.

    Args:
        logprobs: [N, K] float, nats, of the policy; carries the gradient.
        teacher_logprobs: [N, K + 1] float, nats, of the same tokens and of all others together; a constant.
        spec: the divergence and its beta.

    Returns:
        [N] float32, nats, >= 0 up to rounding. Only one backward pass is possible.

    Source: Agarwal et al. 2023 (GKD, on-policy), arXiv:2306.13649, over the whole vocabulary.
    """
    # A probability of 0 is one of e^-1000, and that of all others is at least `MIN_REST`.
    logprobs, target = (each.float().clamp(min=MIN_LOGPROB) for each in (logprobs, teacher_logprobs.detach()))
    rest = (1 - logprobs.exp().sum(-1, keepdim=True)).clamp(min=MIN_REST)
    whole = torch.cat([logprobs, rest.log()], dim=1)
    target = torch.cat([target[:, :-1], target[:, -1:].clamp(min=math.log(MIN_REST))], dim=1)
    found = distillation_loss(whole, target, divergence=spec.divergence, jsd_beta=spec.jsd_beta)
    return found + (target.exp() * target).sum(-1) if spec.divergence == "forward_kl" else found


class TeacherTerm:
    """The divergence from the teacher for the trained tokens of a micro-batch, as `rlhf_models.actor.VocabularyTerm`.

    Args:
        column: [N, 2 K + 1] float32, see `most_likely`.
        spec: the divergence.
        coef: its weight in the loss, reward units per nat.

    Attributes:
        divergence: what the last call returned, without gradient.
    """

    def __init__(self, column: Tensor, spec: DistributionSpec, coef: float) -> None:
        self.ids = column[:, : spec.top_k].long()
        self._logprobs = column[:, spec.top_k :]
        self.coef = coef
        self._spec = spec
        self.divergence = column.new_zeros(len(column))

    def __call__(self, logprobs: Tensor) -> Tensor:
        """Return the divergence of each token, [N], from the policy's log-probs [N, K] of `ids`."""
        found = coarse_divergence(logprobs, self._logprobs, self._spec)
        self.divergence = found.detach()
        return found
