"""Chooses an engine per request: the least loaded, another one after a failure, the same one within a conversation."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlhf_data.errors import ConfigError, EngineError, joined
from rlhf_data.records import FinishReason
from rlhf_rollout.engines.requests import StalledError
from rlhf_rollout.protocols import Completion, RolloutEngine, SamplingParams
from rlhf_rollout.unfinished import UnfinishedGroups

_MAX_BARREN = 2  # attempts in a row in which no sample of a request grows
_MAX_ATTEMPTS = 32  # per request: one that ends its engine each time must not end all of them for ever
_MAX_CONVERSATIONS = 1 << 16


@dataclass(slots=True)
class _Place:
    """An attached engine."""

    engine: RolloutEngine
    number: int
    num_running: int = 0  # completions
    num_failures: int = 0  # since its last success
    is_suspended: bool = False


class EngineRouter:
    """Sends requests to the attached engines. Use it from one event loop.

    A request goes to the engine with the fewest completions in flight; engines whose last requests failed come last.
    When an engine raises, aborts a completion, or returns too few completions, the request is sent again, to another
    engine if there is one, which goes on where the first one ended. A request fails when it gets no further in two
    attempts in a row. If it is because engines write nothing, what they wrote so far is the answer, cut by its length.
    While all engines are suspended, requests wait.

    Args:
        engines: engines to attach at once.

    Attributes:
        num_retries: how many requests were sent again so far.
        unfinished: what is written of groups that are not complete.
        prompt_tokens: prompt tokens so far of completions whose engine says how many of them were cached, and these.
        drafts: the sum of `Completion.drafts` so far.
        busy_s: seconds, summed over the engines, in which an engine had a completion in flight, by the clock of the
            event loop. Read it in the loop.
        on_result: called after each attempt with its engine and its error, which is None after a success.
        on_load: called with an engine and its completions in flight when these change.
    """

    def __init__(self, engines: Iterable[RolloutEngine] = ()) -> None:
        self._places: list[_Place] = []
        self._conversations: OrderedDict[str, _Place] = OrderedDict()
        self._num_attached = 0
        self._change = asyncio.Event()  # an engine can be used, or is gone for good
        self.num_retries = 0
        self.unfinished = UnfinishedGroups()
        self.prompt_tokens = np.zeros(2, np.int64)
        self.drafts = np.zeros(3, np.int64)
        self._num_busy = 0  # engines with a completion in flight
        self._busy_s = 0.0  # ends of busy times less their beginnings
        self.on_result: Callable[[RolloutEngine, Exception | None], None] | None = None
        self.on_load: Callable[[RolloutEngine, int], None] | None = None
        for engine in engines:
            self.attach(engine)

    @property
    def engines(self) -> list[RolloutEngine]:
        """The engines that are attached, in the order of `attach`."""
        return [place.engine for place in self._places]

    @property
    def busy_s(self) -> float:
        return self._busy_s + self._num_busy * asyncio.get_running_loop().time()

    def num_in_flight(self, engine: RolloutEngine) -> int:
        """Return the completions that `engine` has in flight. Raises ConfigError if it is not attached."""
        return self._place_of(engine).num_running

    def describe(self) -> str:
        """Return what each attached engine has in flight, in words."""
        parts = []
        for place in self._places:
            state = ", suspended" if place.is_suspended else ""
            parts.append(f"engine {place.number} has {place.num_running} completions in flight{state}")
        return "; ".join(parts)

    def attach(self, engine: RolloutEngine) -> None:
        """Send requests to `engine`, too. Raises ConfigError when it is already attached."""
        if any(place.engine is engine for place in self._places):
            raise ConfigError("the engine is attached already")
        self._places.append(_Place(engine, self._num_attached))
        self._num_attached += 1
        self._change.set()

    def detach(self, engine: RolloutEngine) -> None:
        """Send no more requests to `engine`; those in flight still return. Raises ConfigError if it is not attached."""
        gone = self._place_of(engine)
        self._places = [place for place in self._places if place is not gone]
        self._change.set()

    def suspend(self, engine: RolloutEngine) -> None:
        """Send no more requests to `engine` until `restore`. Raises ConfigError if it is not attached."""
        self._place_of(engine).is_suspended = True

    def restore(self, engine: RolloutEngine) -> None:
        """Send requests to `engine` again, and forget its failures. Raises ConfigError if it is not attached."""
        place = self._place_of(engine)
        place.is_suspended = False
        place.num_failures = 0
        self._change.set()

    async def generate(
        self,
        token_ids: np.ndarray,
        sampling: SamplingParams,
        *,
        conversation: str | None = None,
        group_id: str | None = None,
        images: Sequence[str] = (),
    ) -> list[Completion]:
        """Return `sampling.num_samples` completions of one prompt [P] int32, which has `images`.

        Requests with the same `conversation` go to the same
        engine, whose cache holds their common prefix, as long as it is attached and does not fail. What is written for
        a group is kept in `unfinished` until its `forget`. Raises EngineError when no engine is attached or all
        attempts failed; the message names the failure of each attempt.
        """
        errors: list[str] = []
        failed: _Place | None = None
        drafts = self.unfinished.drafts(group_id, conversation, token_ids, sampling, images)
        if all(draft.finish_reason for draft in drafts):  # before the run was interrupted
            return [draft.completion(len(token_ids)) for draft in drafts]
        num_written = 0
        num_barren = 0
        while num_barren < _MAX_BARREN and len(errors) < _MAX_ATTEMPTS:
            if errors:
                self.num_retries += 1
            place = await self._pick(failed, conversation)
            self._load(place, sampling.num_samples)
            try:
                known = conversation is not None and getattr(place.engine, "takes_conversation", False)
                more: dict[str, Any] = {"conversation": conversation} if known else {}
                if images:
                    more["images"] = images
                completions = await place.engine.generate(token_ids, sampling, drafts=drafts, **more)
                _check_complete(completions, sampling)
            except Exception as error:  # an engine in another process or on another machine may raise anything
                place.num_failures += 1
                errors.append(f"engine {place.number}: {type(error).__name__}: {error}")
                failed = place
                is_stalled = isinstance(error, StalledError)
                self._report(place, error)
                for draft in drafts:
                    draft.reopen(len(token_ids))
                if all(draft.finish_reason for draft in drafts):  # it failed before it could answer
                    return [draft.completion(len(token_ids)) for draft in drafts]
                size = sum(len(draft.token_ids) for draft in drafts)
                num_barren = 0 if size > num_written else num_barren + 1
                num_written = size
            else:
                place.num_failures = 0
                self._report(place, None)
                for completion in completions:
                    self.drafts += completion.drafts
                    if completion.num_cached_tokens is not None:
                        self.prompt_tokens += (len(token_ids), completion.num_cached_tokens)
                return completions
            finally:
                self._load(place, -sampling.num_samples)
        if is_stalled and all(draft.token_ids for draft in drafts):
            for draft in drafts:
                draft.finish_reason = draft.finish_reason or FinishReason.LENGTH
            return [draft.completion(len(token_ids)) for draft in drafts]
        raise EngineError(joined(errors, "; "))

    def _load(self, place: _Place, num_completions: int) -> None:
        """Count completions that an engine begins, or ends if the number is negative."""
        was_busy = place.num_running > 0
        place.num_running += num_completions
        change = (place.num_running > 0) - was_busy
        self._num_busy += change
        self._busy_s -= change * asyncio.get_running_loop().time()
        if self.on_load is not None:
            self.on_load(place.engine, place.num_running)

    def _report(self, place: _Place, error: Exception | None) -> None:
        if self.on_result is not None:
            self.on_result(place.engine, error)

    def _place_of(self, engine: RolloutEngine) -> _Place:
        for place in self._places:
            if place.engine is engine:
                return place
        raise ConfigError("the engine is not attached")

    async def _usable(self) -> list[_Place]:
        """Wait until at least one engine is not suspended, and return all of these."""
        while self._places:
            usable = [place for place in self._places if not place.is_suspended]
            if usable:
                return usable
            self._change.clear()
            await self._change.wait()
        raise EngineError("no engine is attached", hint="attach an engine before sending requests")

    async def _pick(self, failed: _Place | None, conversation: str | None) -> _Place:
        """Return the engine for a request; `failed` is the one whose attempt at it failed, if any."""
        usable = await self._usable()
        home = self._conversations.get(conversation) if conversation is not None else None
        if home is None or home is failed or home.num_failures or home not in usable:
            others = [place for place in usable if place is not failed]
            candidates = others or usable
            home = min(candidates, key=lambda place: (place.num_failures, place.num_running, place.number))
        if conversation is not None:
            self._conversations[conversation] = home
            # The least recently used one is forgotten: nobody says when a conversation has ended.
            self._conversations.move_to_end(conversation)
            if len(self._conversations) > _MAX_CONVERSATIONS:
                self._conversations.popitem(last=False)
        return home


def _check_complete(completions: Sequence[Completion], sampling: SamplingParams) -> None:
    if len(completions) != sampling.num_samples:
        raise EngineError(f"{len(completions)} completions instead of {sampling.num_samples}")
    num_aborted = sum(completion.finish_reason is FinishReason.ABORT for completion in completions)
    if num_aborted:
        raise EngineError(f"{num_aborted} of {sampling.num_samples} completions were aborted")
