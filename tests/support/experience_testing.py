"""Shards of rollouts in which each token has a version of the weights."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rlhf_data.records import FinishReason, Rollout, Span, SpanSource, Verdict, VerdictKind
from rlhf_train.batching import Denominators
from rlhf_train.learning.columns import RolloutColumns
from rlhf_train.learning.experience import Experience

# Of the two rollouts of `experience_of`, as those that follow.
MASK = torch.tensor([[False, True, True, True], [False, True, False, False]])
COUNTS = Denominators(num_tokens=4, num_sequences=2, max_tokens=3)
ADVANTAGES = torch.tensor([[9.0, 1.0, 2.0, 3.0], [9.0, -4.0, 9.0, 9.0]])


def of_versions(name: str, *versions: int, logprobs: Sequence[float] | None = None) -> Rollout:
    """A rollout of a prompt token and one token by each of these versions."""
    spans = [Span(SpanSource.PROMPT, [1])]
    for version, logprob in zip(versions, logprobs or [0.0] * len(versions), strict=True):
        spans.append(Span(SpanSource.POLICY, [2], [logprob], version))
    return Rollout(name, "group", tuple(spans), FinishReason.STOP, verdict=Verdict(VerdictKind.OK, 1.0))


def experience_of(old: Tensor, rollout: Tensor, **columns: Tensor) -> Experience:
    """Two rollouts of one prompt token, with three response tokens and one."""
    experience = Experience(RolloutColumns.of([of_versions("a", 3, 3, 3), of_versions("b", 3)], [0.0, 0.0]))
    experience.rollout_logprobs = rollout.clone()
    experience.columns = {"old_logprobs": old.clone(), **columns}
    return experience
