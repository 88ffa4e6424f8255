"""The common part of engines that hold a model themselves: checks, pausing, and the state of a weight update."""

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import ClassVar

import numpy as np

from rlhf_data.errors import EngineError, WeightSyncError
from rlhf_rollout.engines.requests import DROPPED, Progress, check_images, check_request, deadline
from rlhf_rollout.engines.spec import EngineSpec
from rlhf_rollout.protocols import Completion, Draft, EngineHealth, PauseMode, SamplingParams, check_pause_mode


class Gate:
    """Holds requests back while it is closed and counts those that have passed. Works across event loops and threads.

    Attributes:
        num_waiting: requests that wait for the gate to open.
        num_inside: requests that have passed the gate and are not done.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Futures of threads and not asyncio.Event, whose waiters must all belong to one event loop.
        self._opening: Future[None] | None = None  # None while the gate is open
        self._emptying: Future[None] | None = None
        self.num_waiting = 0
        self.num_inside = 0

    @property
    def is_closed(self) -> bool:
        """Whether requests are held back."""
        return self._opening is not None

    @asynccontextmanager
    async def passing(self) -> AsyncIterator[None]:
        """Wait until the gate is open, and count as inside for as long as the context lasts."""
        with self._lock:
            self.num_waiting += 1
        try:
            # The gate may have closed again between `opened` and `_enter`, so ask until one try succeeds.
            while not self._enter():
                await self.opened()
        finally:
            with self._lock:
                self.num_waiting -= 1
        try:
            yield
        finally:
            self._leave()

    async def opened(self) -> None:
        """Wait until the gate is open."""
        while (opening := self._opening) is not None:
            await _wait_for(opening)

    async def emptied(self) -> None:
        """Wait until no request is inside."""
        with self._lock:
            if not self.num_inside:
                return
            self._emptying = self._emptying or Future()
            emptying = self._emptying
        await _wait_for(emptying)

    def close(self) -> None:
        """Hold requests back from now on."""
        with self._lock:
            self._opening = self._opening or Future()

    def open(self) -> None:
        """Let requests pass."""
        with self._lock:
            opening, self._opening = self._opening, None
        if opening is not None:
            opening.set_result(None)

    def _enter(self) -> bool:
        with self._lock:
            if self._opening is not None:
                return False
            self.num_inside += 1
            return True

    def _leave(self) -> None:
        emptying = None
        with self._lock:
            self.num_inside -= 1
            if not self.num_inside:
                emptying, self._emptying = self._emptying, None
        if emptying is not None:
            emptying.set_result(None)


async def _wait_for(future: "Future[None]") -> None:
    # Shielded, so that one cancelled waiter does not cancel the future for the others.
    await asyncio.shield(asyncio.wrap_future(future))


class GatedEngine(ABC):
    """The part of a `RolloutEngine` that does not depend on its model; subclasses complete prompts and load weights.

    Args:
        spec: the engine's settings.
        vocab_size: token ids lie below it; None leaves them unchecked.

    Attributes:
        pause_modes: the modes of `pause` that the engine supports.
        policy_version: version of the weights in force.
    """

    pause_modes: ClassVar[tuple[PauseMode, ...]] = ("drain",)

    def __init__(self, spec: EngineSpec, *, vocab_size: int | None) -> None:
        self._spec = spec
        self._vocab_size = vocab_size
        self._gate = Gate()
        self._progress = Progress()
        self._num_sequences = 0  # sequences of the requests inside the gate
        self._updating: int | None = None
        self._incomplete: str | None = None
        self._paused = False
        self._num_pausing = 0
        self._awaits_resume = False
        self._asleep = False
        self._closed = False
        self.policy_version = 0

    @abstractmethod
    async def _complete(
        self, token_ids: np.ndarray, sampling: SamplingParams, drafts: Sequence[Draft]
    ) -> list[Completion]:
        """Write the drafts of a request that has passed all checks, and return the completions.

        An engine that reads images also takes their paths, as `images`.
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
        """See `RolloutEngine.generate`."""
        self._check_awake()
        check_images(images, self._spec)
        check_request(token_ids, sampling, max_model_len=self._spec.max_model_len, vocab_size=self._vocab_size)
        timeout_s = self._spec.request_timeout_s if timeout_s is None else timeout_s
        async with deadline(timeout_s, "a generation request", progress=self._progress), self._gate.passing():
            self._check_usable()
            self._check_awake()  # it may have fallen asleep since
            if self._incomplete:
                message = f"the engine's weights are incomplete: {self._incomplete}"
                raise EngineError(message, hint="send a complete weight update")
            self._num_sequences += sampling.num_samples
            try:
                drafts = drafts or [Draft() for _ in range(sampling.num_samples)]
                more = {"images": images} if images else {}
                return await self._complete(token_ids, sampling, drafts, **more)
            finally:
                self._num_sequences -= sampling.num_samples

    async def pause(self, mode: PauseMode) -> int:
        """See `RolloutEngine.pause`. All sequences of a request count until the request is done."""
        check_pause_mode(mode, self.pause_modes, type(self).__name__)
        self._paused = True
        self._gate.close()
        num_found = self._num_sequences
        self._num_pausing += 1
        try:
            if mode == "drain":
                await self._drain_in_time("`pause`")
            self._awaits_resume = self._paused  # unless it was resumed meanwhile
        finally:
            self._num_pausing -= 1
            # If all callers are gone, or take the engine for dead, nobody would call `resume`.
            if not self._awaits_resume and not self._num_pausing:
                self._paused = False
                self._open_unless_updating()
        if self._paused:
            self._progress.pause()
        return num_found

    async def resume(self) -> None:
        """See `RolloutEngine.resume`."""
        self._paused = False
        self._awaits_resume = False
        self._progress.resume()
        self._open_unless_updating()

    def _open_unless_updating(self) -> None:
        if self._updating is None:
            self._gate.open()

    async def health(self) -> EngineHealth:
        """See `RolloutEngine.health`."""
        self._check_usable()
        return EngineHealth(
            policy_version=self.policy_version,
            num_in_flight=self._gate.num_waiting + self._gate.num_inside,
            is_paused=self._gate.is_closed,
            is_asleep=self._asleep,
        )

    async def begin_weight_update(self, policy_version: int) -> None:
        """See `RolloutEngine.begin_weight_update`."""
        self._gate.close()
        try:
            if not self._paused:
                await self._drain_in_time("`begin_weight_update`")
        except BaseException:
            # The caller was cancelled while requests drained, so its update never comes: let waiting requests pass.
            if self._updating is None and not self._paused:
                self._gate.open()
            raise
        self._updating = policy_version

    async def sleep(self, keep_weights: bool = True) -> None:
        """See `RolloutEngine.sleep`."""
        if not self._spec.enable_sleep:
            raise EngineError("this engine cannot sleep", hint="build it with EngineSpec(enable_sleep=True)")
        num_in_flight = self._gate.num_waiting + self._gate.num_inside
        if num_in_flight:
            raise EngineError(f"the engine cannot sleep with {num_in_flight} requests in flight")
        if self._updating is not None:
            raise EngineError("the engine cannot sleep during a weight update", hint="finish the update first")
        self._asleep = True
        if not keep_weights:
            self._incomplete = DROPPED

    async def wake_up(self) -> None:
        """See `RolloutEngine.wake_up`."""
        self._asleep = False

    async def close(self) -> None:
        """See `RolloutEngine.close`. Requests that wait fail."""
        self._closed = True
        self._gate.open()  # waiting requests pass it and then find the engine closed

    async def _drain(self) -> None:
        """Wait until no request is being completed."""
        await self._gate.emptied()

    async def _drain_in_time(self, what: str) -> None:
        timeout_s = self._spec.control_timeout_s + self._spec.request_timeout_s
        async with deadline(timeout_s, what, progress=self._progress):
            await self._drain()

    def _check_usable(self) -> None:
        if self._closed:
            raise EngineError("the engine was closed")

    def _check_awake(self) -> None:
        if self._asleep:
            raise EngineError("the engine sleeps", hint="await wake_up() before generate()")

    def _check_updating(self) -> int:
        if self._updating is None:
            raise WeightSyncError("no weight update has begun")
        return self._updating

    def _end_update(self, incomplete: str | None = None) -> None:
        """End a weight update and let requests pass; they are refused if `incomplete` tells what is missing."""
        if incomplete is None:
            self.policy_version = self._check_updating()
        self._updating = None
        self._incomplete = incomplete
        if not self._paused:
            self._gate.open()
