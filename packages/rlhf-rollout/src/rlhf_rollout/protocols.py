"""What an engine and a reward are: small Protocols, torch-free, with one contract suite for every implementation."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from rlhf_data.errors import ConfigError
from rlhf_data.records import FinishReason, Prompt, Rollout, Verdict, freeze_arrays
from rlhf_rollout.weight_sync.bucket import WeightBucket


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample.

    Attributes:
        num_samples: completions a prompt.
        max_tokens: new tokens at most.
        min_tokens: new tokens before a stop token may end it.
        temperature: 0.0 is greedy; log-probs are of the distribution after temperature (1.0 when greedy).
        top_p: nucleus mass in (0, 1].
        top_k: -1 for all tokens.
        stop_token_ids: end a completion, and stay its last token; the model's own end tokens always do.
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
        token_ids: [n] int32, a stop token included.
        logprobs: [n] float32, nats, of the distribution sampled from.
        finish_reason: why it ended.
        policy_version: the weights that sampled it.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    finish_reason: FinishReason
    policy_version: int

    def __post_init__(self) -> None:
        freeze_arrays(self, token_ids=np.int32, logprobs=np.float32)


@runtime_checkable
class RolloutEngine(Protocol):
    """Generates from live weights. All methods may be called from one event loop, `generate` many times at once."""

    async def generate(self, token_ids: np.ndarray, sampling: SamplingParams) -> list[Completion]:
        """Return `sampling.num_samples` completions of one prompt. Raises EngineError."""

    async def begin_weight_update(self, policy_version: int) -> None:
        """Stop generating and get ready for buckets."""

    async def receive_weights(self, bucket: WeightBucket) -> None:
        """Load one bucket; the sender may reuse its buffer once this returns. Raises WeightSyncError."""

    async def finish_weight_update(self) -> None:
        """Put the weights in force, forget cached prefixes, and generate on as the new policy version."""

    async def sleep(self) -> None:
        """Free the device's memory; nothing may be in flight."""

    async def wake_up(self) -> None:
        """Take the memory back; the weights are those from before `sleep`."""

    async def close(self) -> None:
        """Free everything."""


class RewardFunction(Protocol):
    """Scores rollouts. Never raises for a bad sample: that is a verdict."""

    async def score(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Verdict]:
        """Return one verdict a rollout, in order."""

    async def close(self) -> None:
        """End what runs behind it."""
