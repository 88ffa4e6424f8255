"""The requests of the stepping thread: jobs, and the sequences that vLLM runs for them."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlhf_rollout.engines.stopping import Decode, StopWatch
from rlhf_rollout.protocols import Completion, Draft, SamplingParams


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
        drafts: its samples.
        decode: returns the text of tokens; for `sampling.stop`.
        future: resolves to the completions, in the order of the samples.
        request_ids: ids of its sequences in vLLM.
    """

    prompt: list[int]
    sampling: SamplingParams
    drafts: Sequence[Draft]
    decode: Decode | None = None
    future: "Future[list[Completion]]" = field(default_factory=uncancellable)
    request_ids: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Sample:
    """One sequence in flight.

    Attributes:
        job: the call that it belongs to.
        draft: what is written.
        num_skipped: experts, from the prompt's first token on, that the draft has already and vLLM tells again.
        watch: finds the texts that end it; None if there are none.
    """

    job: Job
    draft: Draft
    num_skipped: int
    watch: StopWatch | None = None

    def add(self, token_ids: list[int]) -> bool:
        """Add new tokens, up to the one that completes a text of `stop`; return whether there is one."""
        for number, token_id in enumerate(token_ids if self.watch is not None else (), 1):
            if self.watch.completes(token_id):
                self.draft.token_ids.fromlist(token_ids[:number])
                return True
        self.draft.token_ids.fromlist(token_ids)
        return False

    def add_routes(self, routes: np.ndarray) -> None:
        """Add experts, which vLLM tells of the prompt with the first token, and then of the token before."""
        skipped = min(self.num_skipped, len(routes))
        self.num_skipped -= skipped
        self.draft.routes.append(routes[skipped:])
