"""Records that cross a process: frozen, validated where they are made, picklable, made of numpy arrays.

A rollout is made only of token spans; text is a view of it and never its source.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from rlhf_data.errors import DataError


class SpanSource(StrEnum):
    """Who wrote the tokens of a span."""

    PROMPT = "prompt"
    POLICY = "policy"
    ENVIRONMENT = "environment"


class FinishReason(StrEnum):
    """Why a rollout ended: at a stop token, at the length limit, or because it was given up."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class VerdictKind(StrEnum):
    """What became of a reward: the first three are scores to learn from, the last two are failures of the scorer."""

    OK = "ok"
    WRONG = "wrong"
    UNPARSABLE = "unparsable"
    TIMEOUT = "timeout"
    CRASH = "crash"

    @property
    def failed(self) -> bool:
        """Whether there is no score at all."""
        return self in (VerdictKind.TIMEOUT, VerdictKind.CRASH)


def freeze_arrays(record: Any, **dtypes: type) -> None:
    """Give fields of a frozen record the dtypes named and make them read-only. Raises DataError unless they are 1-D."""
    for name, dtype in dtypes.items():
        # A view: the caller's own array stays writeable.
        array = np.ascontiguousarray(getattr(record, name), dtype=dtype).view()
        if array.ndim != 1:
            raise DataError(f"{type(record).__name__}.{name} must be one-dimensional, got shape {array.shape}")
        array.flags.writeable = False
        object.__setattr__(record, name, array)


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the policy is asked.

    Attributes:
        prompt_id: unique in its data set.
        token_ids: [P] int32, P >= 1; exactly what the engine receives.
        text: the rendered prompt; a view of the tokens for rewards and people.
        label: the reference answer, as the reward function receives it.
        source: the data source it came from.
    """

    prompt_id: str
    token_ids: np.ndarray
    text: str
    label: str | None = None
    source: str = "default"

    def __post_init__(self) -> None:
        freeze_arrays(self, token_ids=np.int32)
        if not len(self.token_ids):
            raise DataError(f"prompt {self.prompt_id!r} has no tokens")


@dataclass(frozen=True, slots=True)
class Span:
    """A run of tokens from one author.

    Attributes:
        source: who wrote them.
        token_ids: [n] int32.
        logprobs: [n] float32, nats, under the distribution they were sampled from; for policy spans only.
        policy_version: optimizer steps behind the weights that sampled them; for policy spans only.
    """

    source: SpanSource
    token_ids: np.ndarray
    logprobs: np.ndarray | None = None
    policy_version: int | None = None

    def __post_init__(self) -> None:
        freeze_arrays(self, token_ids=np.int32)
        if (self.source is SpanSource.POLICY) != (self.logprobs is not None and self.policy_version is not None):
            message = f"a {self.source} span carries log-probs and a policy version exactly when it is the policy's"
            raise DataError(message)
        if self.logprobs is not None:
            freeze_arrays(self, logprobs=np.float32)
            if len(self.logprobs) != len(self.token_ids):
                raise DataError(f"{len(self.logprobs)} log-probs for {len(self.token_ids)} tokens")


@dataclass(frozen=True, slots=True)
class Verdict:
    """A reward and how it came about.

    Attributes:
        kind: see `VerdictKind`.
        reward: what the policy learns from; None exactly when `kind.failed`.
        score: the raw score; the reward itself when the scorer tells no difference.
        detail: one line for people, such as an exception's text.
        extra: further numbers to log.
    """

    kind: VerdictKind
    reward: float | None = None
    score: float | None = None
    detail: str = ""
    extra: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind.failed != (self.reward is None):
            raise DataError(f"a verdict `{self.kind}` with reward {self.reward}")
        if self.reward is not None and not np.isfinite(self.reward):
            raise DataError(f"the reward is {self.reward}")
        if self.score is None:
            object.__setattr__(self, "score", self.reward)


@dataclass(frozen=True, slots=True)
class Rollout:
    """One finished sample of the policy: token spans in order, the first one the prompt.

    Attributes:
        rollout_id: unique in a run.
        group_id: shared by the samples of one prompt.
        spans: the tokens, in order.
        finish_reason: why it ended.
        text: the decoded response.
        verdict: None until scored.
    """

    rollout_id: str
    group_id: str
    spans: tuple[Span, ...]
    finish_reason: FinishReason
    text: str = ""
    verdict: Verdict | None = None

    def __post_init__(self) -> None:
        if not self.spans or self.spans[0].source is not SpanSource.PROMPT:
            raise DataError(f"rollout {self.rollout_id!r} does not begin with its prompt")

    @property
    def token_ids(self) -> np.ndarray:
        """[L] int32: all tokens."""
        return np.concatenate([span.token_ids for span in self.spans])

    @property
    def loss_mask(self) -> np.ndarray:
        """[L] bool: True for the tokens the policy wrote, the only ones that are trained."""
        return np.concatenate([np.full(len(span.token_ids), span.source is SpanSource.POLICY) for span in self.spans])

    @property
    def rollout_logprobs(self) -> np.ndarray:
        """[L] float32, nats: the engine's log-prob of each policy token, 0.0 elsewhere."""
        return np.concatenate(
            [
                np.zeros(len(span.token_ids), np.float32) if span.logprobs is None else span.logprobs
                for span in self.spans
            ]
        )

    @property
    def num_tokens(self) -> int:
        """L, prompt included."""
        return sum(len(span.token_ids) for span in self.spans)

    @property
    def num_response_tokens(self) -> int:
        """The number of tokens the policy wrote."""
        return sum(len(span.token_ids) for span in self.spans if span.source is SpanSource.POLICY)

    @property
    def policy_version(self) -> int:
        """The oldest version that wrote a token of it."""
        return min((span.policy_version for span in self.spans if span.policy_version is not None), default=0)


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """All samples of one prompt.

    Attributes:
        group_id: carried by every rollout of it: nothing is positional.
        prompt: what was asked.
        rollouts: the samples.
    """

    group_id: str
    prompt: Prompt
    rollouts: tuple[Rollout, ...]

    def __post_init__(self) -> None:
        strays = [rollout.rollout_id for rollout in self.rollouts if rollout.group_id != self.group_id]
        if strays:
            raise DataError(f"rollouts {strays} do not belong to group {self.group_id!r}")
