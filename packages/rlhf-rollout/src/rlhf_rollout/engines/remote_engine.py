"""An engine in a process of its own: what that process answers, and the `RolloutEngine` that asks it."""

import asyncio
import secrets
from abc import ABC, abstractmethod
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlhf_data.records import FinishReason
from rlhf_rollout.engines.requests import Progress, deadline
from rlhf_rollout.engines.spec import EngineSpec
from rlhf_rollout.protocols import Completion, Draft, EngineHealth, PauseMode, RolloutEngine, SamplingParams
from rlhf_rollout.weights.bucket import WeightBucket

_REPORT_INTERVAL_S = 1.0
_REASONS = (None, *FinishReason)
_HEAD = 5  # numbers per draft in the heads of a report


@dataclass(frozen=True, slots=True, eq=False)
class Report:
    """What was added to drafts since the caller looked, as a few arrays: thousands of objects take long to pickle.

    Attributes:
        heads: for each draft the numbers of its tokens, its versions and its parts of routes, its cached prompt tokens,
            or -1 if they are unknown, and the place of its reason in `_REASONS`. Without versions there is nothing.
        token_ids, logprobs: the tokens of all drafts, one draft after the other.
        versions: where each version begins in its draft, and the version.
        routes: parts of the routes of all drafts.
    """

    heads: "array[int]" = field(default_factory=lambda: array("q"))
    token_ids: "array[int]" = field(default_factory=lambda: array("i"))
    logprobs: "array[float]" = field(default_factory=lambda: array("f"))
    versions: "array[int]" = field(default_factory=lambda: array("q"))
    routes: list[np.ndarray] = field(default_factory=list)

    def add(self, part: Draft) -> None:
        """Append what a draft has got; see `Draft.after`."""
        num_cached = -1 if part.num_cached_tokens is None else part.num_cached_tokens
        reason = _REASONS.index(part.finish_reason)
        sizes = len(part.token_ids), len(part.versions), len(part.routes)
        self.heads.extend((*sizes, num_cached, reason))
        self.token_ids.extend(part.token_ids)
        self.logprobs.extend(part.logprobs)
        for version in part.versions:
            self.versions.extend(version)
        self.routes.extend(part.routes)

    def give_to(self, drafts: Sequence[Draft | None]) -> bool:
        """Add to each draft what it has got, in the order of `add`; None for those of requests that have ended.

        Returns whether there is a new token.
        """
        token_ids = memoryview(self.token_ids).cast("B")
        logprobs = memoryview(self.logprobs).cast("B")
        first = first_version = first_routes = 0
        has_new = False
        for place, draft in enumerate(drafts):
            num, num_versions, num_routes, num_cached, reason = self.heads[_HEAD * place : _HEAD * (place + 1)]
            if draft is not None and num_versions:
                versions = self.versions[2 * first_version : 2 * (first_version + num_versions)]
                draft.token_ids.frombytes(token_ids[4 * first : 4 * (first + num)])
                draft.logprobs.frombytes(logprobs[4 * first : 4 * (first + num)])
                draft.versions = list(zip(versions[::2], versions[1::2], strict=True))
                draft.routes += self.routes[first_routes : first_routes + num_routes]
                draft.num_cached_tokens = None if num_cached < 0 else num_cached
                draft.finish_reason = _REASONS[reason]
                has_new = has_new or num > 0
            first += num
            first_version += num_versions
            first_routes += num_routes
        return has_new


class EngineHost:
    """What the engine's process answers. Subclasses build the engine.

    Attributes:
        part: the engine.
    """

    part: RolloutEngine
    _drafts: dict[str, Sequence[Draft]]  # by the names of the requests in flight

    async def generate(self, request: Sequence[Any]) -> list[Completion]:
        """See `RolloutEngine.generate`; the caller enforces the deadline. `written` knows the request by its name.

        `request` has the prompt's tokens, the sampling, the name, the drafts, the deadline in seconds, and the images:
        Ray would pickle each argument of a call apart, which takes longer than the engine's work on a request.
        """
        token_ids, sampling, name, drafts, timeout_s, images = request
        self._drafts[name] = drafts
        try:
            more = {"images": images} if images else {}
            return await self.part.generate(token_ids, sampling, timeout_s=timeout_s, drafts=drafts, **more)
        finally:
            del self._drafts[name]

    async def written(self, counts: Mapping[str, int], known: "array[int]") -> Report:
        """Return what requests in flight have written after what the caller knows of each draft.

        Args:
            counts: number of drafts by the name of their request.
            known: [2 * drafts], tokens and parts of routes of each draft; see `Draft.after`.
        """
        report = Report()
        sizes = iter(known)
        for name, count in counts.items():
            # Requests may end on another thread, and begin after they are known.
            drafts = self._drafts.get(name) or [Draft()] * count
            for draft, num_tokens, num_parts in zip(drafts, sizes, sizes, strict=False):
                report.add(draft.after(num_tokens, num_parts))
        return report

    async def call(self, method: str, *arguments: Any) -> Any:
        """Return the result of a control call of the engine."""
        return await getattr(self.part, method)(*arguments)


class EngineClient(ABC):
    """A `RolloutEngine` in another process, called through its `EngineHost`. Every call has a deadline.

    What the engine writes is read every second while requests are in flight, so that hardly more than a second of it is
    lost when the process dies.

    Args:
        spec: gives the deadlines.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._progress = Progress()
        self._drafts: dict[str, Sequence[Draft]] = {}  # by the names of the requests in flight
        self._reading: asyncio.Task[None] | None = None

    @abstractmethod
    async def _ask(self, method: str, *arguments: Any) -> Any:
        """Return what a method of the host returns. A call that is cancelled is given up in the process, too.

        Raises the RlhfError that the method raises, and EngineError when the process has ended.
        """

    async def ready(self) -> None:
        """Wait until the process has started. Raises EngineError, or the error that kept the engine from starting."""
        await self._await("the start", self._spec.start_timeout_s, None, "ready")

    async def generate(
        self,
        token_ids: np.ndarray,
        sampling: SamplingParams,
        *,
        timeout_s: float | None = None,
        drafts: Sequence[Draft] | None = None,
        images: Sequence[str] = (),
    ) -> list[Completion]:
        """See `RolloutEngine.generate`. If the call is cancelled or late, the engine drops the request, too."""
        name = secrets.token_hex(8)
        drafts = drafts or [Draft() for _ in range(sampling.num_samples)]
        timeout_s = self._spec.request_timeout_s if timeout_s is None else timeout_s
        self._drafts[name] = drafts
        if self._reading is None or self._reading.done():  # its event loop may have ended
            self._reading = asyncio.create_task(self._read())
        try:
            # This side's deadline counts, also for the message: the engine's own one comes later.
            request = (token_ids, sampling, name, drafts, 2 * timeout_s, tuple(images))
            return await self._await("a request", timeout_s, self._progress, "generate", request)
        finally:
            del self._drafts[name]
            if not self._drafts:
                self._reading.cancel()
                self._reading = None

    async def _read(self) -> None:
        """Keep the drafts of the requests in flight up to date. A call that fails is made again: others tell why."""
        while True:
            await asyncio.sleep(_REPORT_INTERVAL_S)
            asked = dict(self._drafts)
            counts = {name: len(drafts) for name, drafts in asked.items()}
            known = array("q")
            for drafts in asked.values():
                for draft in drafts:
                    known.extend((len(draft.token_ids), len(draft.routes)))
            with suppress(Exception):
                report = await self._await("a report", self._spec.health_timeout_s, None, "written", counts, known)
                # A draft of a request that has ended is complete, or another engine goes on with it.
                own = [draft if name in self._drafts else None for name, drafts in asked.items() for draft in drafts]
                if report.give_to(own):
                    self._progress.advance()

    async def pause(self, mode: PauseMode) -> int:
        """See `RolloutEngine.pause`."""
        num_found = await self._call("pause", mode, drains=mode == "drain")
        self._progress.pause()
        return num_found

    async def resume(self) -> None:
        """See `RolloutEngine.resume`."""
        self._progress.resume()
        await self._call("resume")

    async def health(self) -> EngineHealth:
        """See `RolloutEngine.health`."""
        return await self._await("a health check", self._spec.health_timeout_s, None, "call", "health")

    async def begin_weight_update(self, policy_version: int) -> None:
        """See `RolloutEngine.begin_weight_update`."""
        await self._call("begin_weight_update", policy_version, drains=True)

    async def receive_weights(self, bucket: WeightBucket) -> None:
        """See `RolloutEngine.receive_weights`."""
        await self._call("receive_weights", bucket)

    async def finish_weight_update(self) -> None:
        """See `RolloutEngine.finish_weight_update`."""
        await self._call("finish_weight_update")

    async def sleep(self, keep_weights: bool = True) -> None:
        """See `RolloutEngine.sleep`."""
        await self._call("sleep", keep_weights)

    async def wake_up(self) -> None:
        """See `RolloutEngine.wake_up`."""
        await self._call("wake_up")

    async def _call(self, method: str, *arguments: Any, drains: bool = False) -> Any:
        """Make a control call. One that `drains` waits for the requests in flight, as long as they get further."""
        timeout_s = self._spec.control_timeout_s + (self._spec.request_timeout_s if drains else 0.0)
        progress = self._progress if drains else None
        return await self._await(f"`{method}`", timeout_s, progress, "call", method, *arguments)

    async def _await(self, what: str, timeout_s: float, progress: Progress | None, method: str, *arguments: Any) -> Any:
        """Return the result of a call, which `what` names in the message when it is late."""
        async with deadline(timeout_s, f"{what} of an engine's process", progress=progress):
            return await self._ask(method, *arguments)
