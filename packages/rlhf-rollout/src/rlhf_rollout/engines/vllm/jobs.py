"""The requests of the stepping thread: jobs, and the sequences that vLLM runs for them."""

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlhf_data.records import Span, SpanSource
from rlhf_rollout.engines.stopping import Decode, StopWatch
from rlhf_rollout.protocols import Completion, SamplingParams


def uncancellable() -> "Future[Any]":
    """Return a future that its waiters cannot cancel, so that the stepping thread can always set its result."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


@dataclass(slots=True, eq=False)
class Job:
    """One `generate` call.

    Attributes:
        prompt: token ids.
        sampling: how its samples are drawn.
        decode: returns the text of tokens; for `sampling.stop`.
        future: resolves to the completions, in the order of the samples.
        completions: finished samples by their index.
        request_ids: ids of its sequences in vLLM.
    """

    prompt: list[int]
    sampling: SamplingParams
    decode: Decode | None = None
    future: "Future[list[Completion]]" = field(default_factory=uncancellable)
    completions: dict[int, Completion] = field(default_factory=dict)
    request_ids: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Sample:
    """One sequence in flight.

    Attributes:
        job: the call that it belongs to.
        index: its number within the job.
        spans: what earlier weights wrote.
        token_ids, logprobs: what the weights in force have written.
        routes: parts [n, layers, top_k] of the experts of its tokens, from the prompt's first one on.
        num_cached_tokens: see `Completion`.
        watch: finds the texts that end it; None if there are none.
    """

    job: Job
    index: int
    spans: list[Span] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    routes: list[np.ndarray] = field(default_factory=list)
    num_cached_tokens: int | None = None
    watch: StopWatch | None = None

    def __post_init__(self) -> None:
        if self.job.decode is not None:
            self.watch = StopWatch(self.job.sampling, self.job.decode)

    def add(self, token_ids: list[int]) -> bool:
        """Add new tokens, up to the one that completes a text of `stop`; return whether there is one."""
        for number, token_id in enumerate(token_ids if self.watch is not None else (), 1):
            if self.watch.completes(token_id):
                self.token_ids += token_ids[:number]
                return True
        self.token_ids += token_ids
        return False

    def end_span(self, policy_version: int) -> None:
        """Turn what was written since the last span into a span of its own."""
        if self.token_ids or not self.spans:
            logprobs = self.logprobs[: len(self.token_ids)]
            self.spans.append(Span(SpanSource.POLICY, self.token_ids, logprobs, policy_version))
        self.token_ids = []
        self.logprobs = []

    def all_routes(self) -> np.ndarray | None:
        """Return the experts of all tokens but the last, [R, layers, top_k], once the last span has ended.

        None if vLLM gave none, or not exactly those: nothing else says which token a row belongs to.
        """
        num_tokens = len(self.job.prompt) + sum(len(span.token_ids) for span in self.spans)
        if sum(map(len, self.routes)) != num_tokens - 1:
            return None
        return np.concatenate(self.routes)
