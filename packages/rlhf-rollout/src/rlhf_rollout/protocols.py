"""Protocols of engines and rewards: small, torch-free, with one contract suite for every implementation."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args, runtime_checkable

import numpy as np

from rlhf_data.errors import ConfigError, DataError, EngineError, unknown
from rlhf_data.records import FinishReason, Prompt, Rollout, Span, SpanSource, Verdict
from rlhf_rollout.weight_sync.bucket import WeightBucket

PauseMode = Literal["drain", "keep", "restart"]
PAUSE_MODES: tuple[PauseMode, ...] = get_args(PauseMode)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample.

    Attributes:
        num_samples: completions per prompt.
        max_tokens: limit of new tokens.
        min_tokens: new tokens before a stop token may end a completion.
        temperature: 0.0 is greedy. Log-probs are those of the distribution after temperature (1.0 when greedy).
        top_p: nucleus mass in (0, 1].
        top_k: -1 for all tokens.
        stop_token_ids: end a completion and stay its last token, as the model's own end tokens always do.
        seed: makes the completions of one request repeatable.
    """

    num_samples: int = 1
    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.num_samples < 1 or self.max_tokens < 1:
            raise ConfigError(f"num_samples ({self.num_samples}) and max_tokens ({self.max_tokens}) must be at least 1")
        if self.temperature < 0 or not 0 < self.top_p <= 1:
            raise ConfigError(f"temperature {self.temperature} must be >= 0 and top_p {self.top_p} in (0, 1]")
        if self.temperature == 0 and self.num_samples > 1:
            raise ConfigError("greedy sampling (temperature 0) gives the same completion each time: use num_samples 1")


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled continuation, token in, token out.

    Attributes:
        spans: the tokens, stop token included, in policy spans. A request that lives through a weight update has one
            span per policy version; log-probs are in nats, under the distribution that each token was drawn from.
        finish_reason: why it ended.
    """

    spans: tuple[Span, ...]
    finish_reason: FinishReason

    def __post_init__(self) -> None:
        if not self.spans or any(span.source is not SpanSource.POLICY for span in self.spans):
            raise DataError(f"a completion is made of policy spans, got {[str(span.source) for span in self.spans]}")

    @classmethod
    def single(
        cls, token_ids: Sequence[int], logprobs: Sequence[float], finish_reason: FinishReason, policy_version: int
    ) -> "Completion":
        """Return a completion that one policy version drew: token ids [n] and log-probs [n], nats."""
        return cls((Span(SpanSource.POLICY, token_ids, logprobs, policy_version),), finish_reason)

    @property
    def token_ids(self) -> np.ndarray:
        """[n] int32: the tokens of all spans."""
        return np.concatenate([span.token_ids for span in self.spans])

    @property
    def logprobs(self) -> np.ndarray:
        """[n] float32, nats: the log-probs of all spans."""
        return np.concatenate([span.logprobs for span in self.spans])

    @property
    def policy_version(self) -> int:
        """The oldest version that drew a token of it."""
        return min(span.policy_version for span in self.spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHealth:
    """What an engine says of itself.

    Attributes:
        policy_version: of the weights in force.
        num_in_flight: requests or sequences that are decoded or wait.
        is_paused: requests wait for `resume` or for the end of a weight update.
        is_asleep: its memory was given back.
    """

    policy_version: int
    num_in_flight: int
    is_paused: bool
    is_asleep: bool


@runtime_checkable
class RolloutEngine(Protocol):
    """Generates from live weights.

    `generate` may be called many times at once. Every other method is a control call, which never waits behind
    `generate` calls except to let requests in flight finish, and may be made from another event loop. Every call raises
    EngineError when the engine has failed or is gone.
    """

    async def generate(
        self, token_ids: np.ndarray, sampling: SamplingParams, *, timeout_s: float | None = None
    ) -> list[Completion]:
        """Return `sampling.num_samples` completions of one prompt [P] int32.

        `timeout_s` is the deadline of the request; without one the engine's own applies, if it has any. Raises
        EngineError when the request does not fit the engine or the deadline passes.
        """

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating until `resume`; requests that arrive meanwhile wait.

        What becomes of the requests in flight depends on `mode`: "drain" lets them finish first, "keep" freezes them
        where they are and continues them afterwards with the weights that are then in force, "restart" discards what
        they have generated so far and starts them again. Raises EngineError for a mode that the engine does not have.
        """

    async def resume(self) -> None:
        """Generate again. Does nothing unless the engine is paused."""

    async def health(self) -> EngineHealth:
        """Return the engine's state. Raises EngineError when it cannot generate any more."""

    async def begin_weight_update(self, policy_version: int) -> None:
        """Get ready for buckets. Requests in flight are drained unless the engine is paused."""

    async def receive_weights(self, bucket: WeightBucket) -> None:
        """Load one bucket; the sender may reuse its buffer once this returns. Raises WeightSyncError."""

    async def finish_weight_update(self) -> None:
        """Put the weights in force, forget cached prefixes, and generate as the new policy version unless paused."""

    async def sleep(self) -> None:
        """Free the device's memory. Raises EngineError while requests are in flight."""

    async def wake_up(self) -> None:
        """Take the memory back; the weights are those from before `sleep`."""

    async def close(self) -> None:
        """Free everything."""


def check_pause_mode(mode: str, available: Sequence[PauseMode] = PAUSE_MODES, engine: str = "this engine") -> None:
    """Raise EngineError for a mode that does not exist, or that is not among those `available` to the engine."""
    if mode not in PAUSE_MODES:
        raise EngineError(unknown("pause mode", mode, PAUSE_MODES))
    if mode not in available:
        hint = f"use one of: {', '.join(available)}" if available else "use engine vllm"
        raise EngineError(f"{engine} cannot pause by {mode}", hint=hint)


class RewardFunction(Protocol):
    """Scores rollouts. Never raises for a bad sample: that is a verdict."""

    async def score(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Verdict]:
        """Return one verdict per rollout, in order."""

    async def close(self) -> None:
        """End what runs behind it."""
