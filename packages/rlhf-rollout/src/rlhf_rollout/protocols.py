"""Protocols of engines and rewards: small, torch-free, with one contract suite for every implementation."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import numpy as np

from rlhf_data.bounds import bounded, check_bounds
from rlhf_data.errors import ConfigError, DataError, EngineError, unknown
from rlhf_data.records import FinishReason, Prompt, Rollout, Span, SpanSource, Verdict, freeze_routes
from rlhf_rollout.weights.bucket import WeightBucket

PauseMode = Literal["drain", "keep", "restart"]
PAUSE_MODES: tuple[PauseMode, ...] = get_args(PauseMode)


# Values with which tokens are drawn from the model's distribution at its temperature.
_NEUTRAL = {"top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How completions are sampled.

    Attributes:
        num_samples: completions per prompt.
        max_tokens: new tokens per completion at most.
        min_tokens: new tokens before a stop token may end a completion.
        temperature: 0.0 is greedy. Log-probs are those of the distribution after temperature (1.0 when greedy).
        top_p: nucleus mass in (0, 1].
        top_k: -1 for all tokens.
        min_p: tokens less likely than this share of the most likely one's probability are left out; 0 for all tokens.
        repetition_penalty: divides positive logits of tokens that prompt or completion hold, and multiplies negative
            ones; 1 for none (arXiv:1909.05858). Log-probs are those after `top_p`, `top_k`, `min_p` and this.
        stop_token_ids: tokens that end a completion, in addition to the model's own end tokens. The token that ends a
            completion remains its last token.
        stop: texts that end a completion. The token that completes one is its last token. Special tokens count by
            their text.
        seed: makes the completions of one request repeatable.
        adapter: name of the adapter that computes the request, one of `EngineSpec.lora_modules`; for "http" a model's
            name on the server. None: the engine's weights, with the adapter of its updates if it takes one.
    """

    num_samples: int = bounded(1, ge=1)
    max_tokens: int = bounded(16, ge=1)
    min_tokens: int = 0
    temperature: float = bounded(1.0, ge=0)
    top_p: float = bounded(1.0, gt=0, le=1)
    top_k: int = bounded(-1, ge=-1)
    min_p: float = bounded(0.0, ge=0, le=1)
    repetition_penalty: float = bounded(1.0, gt=0)
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    seed: int | None = None
    adapter: str | None = None

    def __post_init__(self) -> None:
        check_bounds(self)
        if isinstance(self.stop, str) or not all(isinstance(one, str) and one for one in self.stop):
            raise ConfigError(f"stop must be a list of texts that are not empty, got {self.stop!r}")
        if self.temperature == 0 and self.num_samples > 1:
            message = f"``num_samples`` is {self.num_samples} at ``temperature=0``: greedy responses are all the same"
            raise ConfigError(message, hint="use ``num_samples=1``, or a ``temperature`` above 0")

    @property
    def changes(self) -> dict[str, float]:
        """The fields that change the model's distribution at its temperature, each with the value that would not."""
        return {name: value for name, value in _NEUTRAL.items() if getattr(self, name) != value}

    @property
    def what_changes(self) -> str:
        """What `changes` do, in words."""
        return f"samples from a {'part of the' if self.repetition_penalty == 1 else 'changed'} distribution"


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled continuation of a prompt, as tokens.

    Attributes:
        spans: the tokens, stop token included, in policy spans. A request during which the weights change has
            one span per policy version. Log-probs are in nats, under the distribution that each token was drawn from.
        finish_reason: why it ended.
        num_cached_tokens: prompt tokens whose keys and values were in the engine's cache; None if the engine does not
            say.
        routes: the experts of the first R tokens of prompt and completion, as in `Rollout`. The last token has none: it
            has not gone through the model.
        drafts: how many drafts of vLLM the model has checked, how many tokens they had, and how many were accepted.
    """

    spans: tuple[Span, ...]
    finish_reason: FinishReason
    num_cached_tokens: int | None = None
    routes: np.ndarray | None = None
    drafts: tuple[int, int, int] = (0, 0, 0)

    def __post_init__(self) -> None:
        freeze_routes(self)
        if not self.spans or any(span.source is not SpanSource.POLICY for span in self.spans):
            raise DataError(f"a completion is made of policy spans, got {[str(span.source) for span in self.spans]}")

    def __reduce__(self) -> tuple[Any, ...]:
        # Between processes, the arrays of thousands of spans would take several times as long as their bytes.
        spans = [(span.token_ids.tobytes(), span.logprobs.tobytes(), span.policy_version) for span in self.spans]
        return _completion, (spans, self.finish_reason, self.num_cached_tokens, self.routes, self.drafts)

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
        """The oldest policy version that drew one of its tokens."""
        return min(span.policy_version for span in self.spans)


@dataclass(slots=True, eq=False)
class Draft:
    """One sample that is being written. It only grows, so that other threads may read it meanwhile.

    Numbers are in arrays of Python: lists of them would take nine times the memory. Other threads read copies of parts:
    an array cannot grow while numpy looks at it.

    Attributes:
        token_ids: what is written so far, [n] int32. Any sequence may be given.
        logprobs: [n] float32, nats. Any sequence may be given.
        versions: where the tokens of each policy version begin, and the version.
        routes: parts [n, layers, top_k] of the experts of prompt and sample, from the prompt's first token on.
        num_cached_tokens: see `Completion`.
        finish_reason: why it ended; None before. It is set after the last token.
        drafts: see `Completion`.
    """

    token_ids: "array[int]" = field(default_factory=lambda: array("i"))
    logprobs: "array[float]" = field(default_factory=lambda: array("f"))
    versions: list[tuple[int, int]] = field(default_factory=list)
    routes: list[np.ndarray] = field(default_factory=list)
    num_cached_tokens: int | None = None
    finish_reason: FinishReason | None = None
    drafts: tuple[int, int, int] = (0, 0, 0)

    def __post_init__(self) -> None:
        if not isinstance(self.token_ids, array):
            self.token_ids = array("i", np.asarray(self.token_ids, np.int32).tobytes())
        if not isinstance(self.logprobs, array):
            self.logprobs = array("f", np.asarray(self.logprobs, np.float32).tobytes())

    def __reduce__(self) -> tuple[Any, ...]:
        numbers = self.token_ids.tobytes(), self.logprobs.tobytes()  # see `Completion.__reduce__`
        more = self.versions, self.routes, self.num_cached_tokens, self.finish_reason, self.drafts
        return _draft, (*numbers, *more)

    def go_on(self, policy_version: int) -> None:
        """Count the tokens from here on as those of `policy_version`."""
        if not self.versions or self.versions[-1][1] != policy_version:
            self.versions.append((len(self.token_ids), policy_version))

    def completion(self, num_prompt_tokens: int) -> Completion:
        """Return the finished sample of a prompt. It has routes if there is one for each token but the last."""
        starts = [start for start, _ in self.versions]
        ends = [*starts[1:], len(self.token_ids)]
        spans = [
            Span(SpanSource.POLICY, self.token_ids[start:end], self.logprobs[start:end], version)
            for (start, version), end in zip(self.versions, ends, strict=True)
            if start < end
        ] or [Span(SpanSource.POLICY, [], [], self.versions[-1][1])]
        is_told = sum(map(len, self.routes)) == num_prompt_tokens + len(self.token_ids) - 1
        routes = np.concatenate(self.routes) if self.routes and is_told else None
        return Completion(tuple(spans), self.finish_reason, self.num_cached_tokens, routes, self.drafts)

    def reopen(self, num_prompt_tokens: int) -> None:
        """Prepare a sample of a failed engine for another one, which writes the rest.

        Experts of tokens that are not there any more are dropped, and so is an end that was no choice of the policy.
        """
        if self.finish_reason is FinishReason.ABORT:
            self.finish_reason = None
        num_routes = num_prompt_tokens + len(self.token_ids) - 1
        if sum(map(len, self.routes)) > num_routes:
            self.routes = [np.concatenate(self.routes)[:num_routes]]

    def after(self, num_tokens: int, num_parts: int) -> "Draft":
        """Return what came after the first `num_tokens` tokens and the first `num_parts` parts of the routes.

        The last token is held back until the sample has ended or goes on: it may be an end of which nobody knows yet.
        """
        reason = self.finish_reason
        size = min(len(self.token_ids), len(self.logprobs)) - (reason is None)
        return Draft(
            self.token_ids[num_tokens : max(size, 0)],
            self.logprobs[num_tokens : max(size, 0)],
            [(start, version) for start, version in self.versions if start <= size],
            self.routes[num_parts:],
            self.num_cached_tokens,
            reason,
        )


def _completion(spans: Sequence[tuple[bytes, bytes, int]], *others: Any) -> Completion:
    made = [
        Span(SpanSource.POLICY, np.frombuffer(token_ids, np.int32), np.frombuffer(logprobs, np.float32), version)
        for token_ids, logprobs, version in spans
    ]
    return Completion(tuple(made), *others)


def _draft(token_ids: bytes, logprobs: bytes, *others: Any) -> Draft:
    return Draft(array("i", token_ids), array("f", logprobs), *others)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHealth:
    """The state that an engine reports.

    Attributes:
        policy_version: version of the weights in force.
        num_in_flight: requests that are being decoded or wait; vLLM counts each of their sequences.
        is_paused: requests wait for `resume` or for the end of a weight update.
        is_asleep: the engine has freed the device's memory and cannot generate.
    """

    policy_version: int
    num_in_flight: int
    is_paused: bool
    is_asleep: bool


@runtime_checkable
class RolloutEngine(Protocol):
    """Generates with weights that can be updated while it runs.

    `generate` may be called concurrently. Every other method is a control call: it may come from another event loop,
    and it never queues behind `generate` calls. It waits for them only where its docstring says that requests in flight
    finish first. Every call raises EngineError when the engine has failed or its process has ended.
    """

    async def generate(
        self,
        token_ids: np.ndarray,
        sampling: SamplingParams,
        *,
        timeout_s: float | None = None,
        drafts: Sequence[Draft] | None = None,
        images: Sequence[str] = (),
    ) -> list[Completion]:
        """Return `sampling.num_samples` completions of one prompt [P] int32.

        `drafts` are the samples, one each, which the engine writes and the caller may read at any time. The engine goes
        on behind what they hold already, so that a failed engine's request can be finished by another one. `sampling`
        is that of the whole samples. An engine behind HTTP, which tells nothing before the end, leaves them empty.

        `images` are the paths of the images whose tokens the prompt has, in order. Callers name them only to engines
        whose `EngineSpec.images` is set.

        `timeout_s` is for how long the engine may write nothing; None for its own limit. Raises EngineError when the
        request exceeds the engine's context, and StalledError when the limit passes.
        """

    async def pause(self, mode: PauseMode) -> int:
        """Stop generating until `resume`; requests that arrive meanwhile wait. Their limits begin again after it.

        `mode` decides about the requests in flight. "drain" lets them finish first. "keep" freezes them and continues
        them after `resume`, with the weights that are then in force. "restart" ends them and starts them again after
        `resume`, from their prompts and what was written, whose keys and values are computed again. No mode draws an
        answer anew: longer ones meet more pauses, so those that are left would be too short. Returns the number of
        sequences that were in flight. Raises EngineError for a mode that the engine does not support.
        """

    async def resume(self) -> None:
        """Generate again, or once the weight update that has begun ends. Does nothing unless the engine is paused."""

    async def health(self) -> EngineHealth:
        """Return the engine's state. Raises EngineError when it cannot generate any more."""

    async def begin_weight_update(self, policy_version: int) -> None:
        """Prepare for buckets of weights of version `policy_version`.

        Unless the engine is paused, requests in flight finish first. Later requests wait for the end of the update.
        """

    async def receive_weights(self, bucket: WeightBucket) -> None:
        """Load one bucket; the sender may reuse its buffer once this returns.

        Raises WeightSyncError for weights that do not fit the model, and EngineError for those that did not arrive.
        """

    async def finish_weight_update(self) -> None:
        """Put the new weights and their version in force, and generate again unless paused.

        What the engine has cached of older weights is dropped, unless `EngineSpec.keep_kv` asks to keep it.
        """

    async def sleep(self, keep_weights: bool = True) -> None:
        """Free the device's memory. Raises EngineError while requests are in flight.

        Weights that need not be kept may be dropped, which takes no host memory and less time. After `wake_up`, such an
        engine refuses requests until a weight update is complete.
        """

    async def wake_up(self) -> None:
        """Allocate the memory again, and restore the weights from before `sleep` if it kept them."""

    async def close(self) -> None:
        """End the engine and free what it holds."""


def check_pause_mode(mode: str, available: Sequence[PauseMode] = PAUSE_MODES, engine: str = "this engine") -> None:
    """Raise EngineError for a pause mode that does not exist, or that is not among the engine's `available` ones."""
    if mode not in PAUSE_MODES:
        raise EngineError(unknown("pause mode", mode, PAUSE_MODES))
    if mode not in available:
        hint = f"use one of: {', '.join(available)}" if available else "use engine vllm"
        raise EngineError(f"{engine} cannot pause with mode {mode}", hint=hint)


class RewardFunction(Protocol):
    """Scores rollouts. A sample that cannot be scored gets a failed verdict instead of raising an error."""

    async def score(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Verdict]:
        """Return one verdict per rollout, in order."""

    async def close(self) -> None:
        """End its processes and connections."""
