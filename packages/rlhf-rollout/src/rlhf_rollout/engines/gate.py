"""What the engines share that answer requests by themselves: what they refuse, and a gate while weights come in."""

import asyncio
from abc import ABC, abstractmethod
from concurrent.futures import Future

import numpy as np

from rlhf_data.errors import EngineError, WeightSyncError
from rlhf_rollout.engines.requests import check_request
from rlhf_rollout.protocols import Completion, SamplingParams


class GatedEngine(ABC):
    """A `RolloutEngine` but for its model: subclasses complete prompts and receive weights.

    Args:
        max_model_len: prompt and completion together, in tokens.
        vocab_size: token ids lie below it.
        enable_sleep: allow `sleep`.

    Attributes:
        policy_version: of the weights in force.
    """

    def __init__(self, *, max_model_len: int, vocab_size: int, enable_sleep: bool) -> None:
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._enable_sleep = enable_sleep
        self._opening: Future[None] | None = None  # held back are those that wait for it; of any event loop
        self._num_in_flight = 0
        self._updating: int | None = None
        self._incomplete: str | None = None
        self._asleep = self._closed = False
        self.policy_version = 0

    @abstractmethod
    async def _complete(self, token_ids: np.ndarray, sampling: SamplingParams) -> list[Completion]:
        """Return the completions of a request that can be generated."""

    async def generate(self, token_ids: np.ndarray, sampling: SamplingParams) -> list[Completion]:
        """See `RolloutEngine.generate`."""
        if self._closed:
            raise EngineError("the engine was closed")
        if self._asleep:
            raise EngineError("the engine sleeps", hint="await wake_up() before generate()")
        check_request(token_ids, sampling, max_model_len=self._max_model_len, vocab_size=self._vocab_size)
        self._num_in_flight += 1
        try:
            while (opening := self._opening) is not None:
                # Shielded: a waiter that is cancelled must not cancel the opening for the others.
                await asyncio.shield(asyncio.wrap_future(opening))
            if self._incomplete:
                raise EngineError(f"the engine's weights are incomplete: {self._incomplete}", hint="send all of them")
            return await self._complete(token_ids, sampling)
        finally:
            self._num_in_flight -= 1

    async def begin_weight_update(self, policy_version: int) -> None:
        """See `RolloutEngine.begin_weight_update`."""
        self._opening = self._opening or Future()
        self._updating = policy_version

    async def sleep(self) -> None:
        """See `RolloutEngine.sleep`."""
        if not self._enable_sleep:
            raise EngineError("this engine cannot sleep", hint="build it with EngineSpec(enable_sleep=True)")
        if self._num_in_flight:
            raise EngineError(f"the engine cannot sleep with {self._num_in_flight} requests in flight")
        self._asleep = True

    async def wake_up(self) -> None:
        """See `RolloutEngine.wake_up`."""
        self._asleep = False

    async def close(self) -> None:
        """See `RolloutEngine.close`."""
        self._closed = True

    def _check_updating(self) -> int:
        if self._updating is None:
            raise WeightSyncError("no weight update has begun")
        return self._updating

    def _end_update(self, incomplete: str | None = None) -> None:
        """Let requests through: with the new weights, or to be refused for what is `incomplete`."""
        if incomplete is None:
            self.policy_version = self._check_updating()
        self._updating, self._incomplete = None, incomplete
        opening, self._opening = self._opening, None
        if opening is not None:
            opening.set_result(None)
