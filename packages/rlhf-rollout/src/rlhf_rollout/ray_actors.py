"""Engines and reward models as Ray actors, and how the driver and the trainer see them. Only this file imports Ray."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import numpy as np
import ray
from ray.exceptions import RayActorError, RayTaskError

from rlhf_data.errors import EngineError, RewardError, RlhfError, WeightSyncError, with_hint
from rlhf_rollout.engines import EngineSpec, build_engine
from rlhf_rollout.protocols import Completion, RolloutEngine, SamplingParams
from rlhf_rollout.rewards.model import LocalScorer
from rlhf_rollout.weights import WeightBucket

Part = TypeVar("Part")


class _Started(Generic[Part]):
    """What an actor runs, or the error that kept it from starting.

    The error is raised by the first call: Ray would bury it in the report of an actor's death.
    """

    def __init__(self, build: Callable[[], Part]) -> None:
        started = time.perf_counter()
        self._built: Part | RlhfError
        try:
            self._built = build()
        except RlhfError as error:
            self._built = error
        self._startup_s = time.perf_counter() - started

    @property
    def part(self) -> Part:
        if isinstance(self._built, RlhfError):
            raise self._built
        return self._built

    def seconds(self) -> float:
        """Return how long it took to start. Raises what kept it from starting."""
        if isinstance(self._built, RlhfError):
            raise self._built
        return self._startup_s


class EngineActor:
    """Runs one engine in a process of its own: `ray.remote(EngineActor).options(max_concurrency=...)`.

    Every `generate` call that runs at once takes one of the actor's `max_concurrency` places.
    """

    def __init__(self, kind: str, spec: EngineSpec) -> None:
        self._started: _Started[RolloutEngine] = _Started(lambda: build_engine(kind, spec))

    @property
    def _engine(self) -> RolloutEngine:
        return self._started.part

    async def ready(self) -> float:
        """Return the seconds that the engine took to start, once it has. Raises what kept it from starting."""
        return self._started.seconds()

    async def generate(self, token_ids: np.ndarray, sampling: SamplingParams) -> list[Completion]:
        """See `RolloutEngine.generate`."""
        return await self._engine.generate(token_ids, sampling)

    async def begin_weight_update(self, policy_version: int) -> None:
        """See `RolloutEngine.begin_weight_update`."""
        await self._engine.begin_weight_update(policy_version)

    async def receive_weights(self, bucket: WeightBucket) -> None:
        """See `RolloutEngine.receive_weights`."""
        await self._engine.receive_weights(bucket)

    async def finish_weight_update(self) -> None:
        """See `RolloutEngine.finish_weight_update`."""
        await self._engine.finish_weight_update()

    async def sleep(self) -> None:
        """See `RolloutEngine.sleep`."""
        await self._engine.sleep()

    async def wake_up(self) -> None:
        """See `RolloutEngine.wake_up`."""
        await self._engine.wake_up()

    async def close(self) -> None:
        """See `RolloutEngine.close`."""
        await self._engine.close()


class RewardModelActor:
    """Runs one reward model in a process of its own: `ray.remote(RewardModelActor)`. Arguments as of `LocalScorer`."""

    def __init__(self, path: str, **options: Any) -> None:
        self._started: _Started[LocalScorer] = _Started(lambda: LocalScorer(path, **options))

    async def ready(self) -> float:
        """Return the seconds that the model took to load, once it has. Raises what kept it from loading."""
        return self._started.seconds()

    async def has_moments(self) -> bool:
        """See `LocalScorer.has_moments`."""
        return self._started.part.has_moments

    async def score(self, token_ids: list[np.ndarray]) -> list[float]:
        """See `LocalScorer.score`."""
        return await self._started.part.score(token_ids)


@contextmanager
def _plain_errors(gone: type[RlhfError], part: str = "engine") -> Iterator[None]:
    """Raise the actor's own errors as themselves, and `gone` when its process has died."""
    try:
        yield
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, RlhfError):
            raise cause from None
        raise
    except RayActorError as error:
        raise gone(
            with_hint(f"the {part}'s process is gone: {error}", "its log tells why (Ray's session folder)")
        ) from error


class RayEngine:
    """A `RolloutEngine` in another process.

    Args:
        handle: of an `EngineActor`.
    """

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    async def ready(self) -> float:
        """Wait until the engine has started; return the seconds that it took in its process."""
        with _plain_errors(EngineError):
            return await self.handle.ready.remote()

    async def generate(self, token_ids: np.ndarray, sampling: SamplingParams) -> list[Completion]:
        """See `RolloutEngine.generate`. A cancelled call gives its request up in the engine too."""
        reference = self.handle.generate.remote(token_ids, sampling)
        try:
            with _plain_errors(EngineError):
                return await reference
        except asyncio.CancelledError:
            ray.cancel(reference)
            raise

    async def begin_weight_update(self, policy_version: int) -> None:
        """See `RolloutEngine.begin_weight_update`."""
        with _plain_errors(WeightSyncError):
            await self.handle.begin_weight_update.remote(policy_version)

    async def receive_weights(self, bucket: WeightBucket) -> None:
        """See `RolloutEngine.receive_weights`."""
        with _plain_errors(WeightSyncError):
            await self.handle.receive_weights.remote(bucket)

    async def finish_weight_update(self) -> None:
        """See `RolloutEngine.finish_weight_update`."""
        with _plain_errors(WeightSyncError):
            await self.handle.finish_weight_update.remote()

    async def sleep(self) -> None:
        """See `RolloutEngine.sleep`."""
        with _plain_errors(EngineError):
            await self.handle.sleep.remote()

    async def wake_up(self) -> None:
        """See `RolloutEngine.wake_up`."""
        with _plain_errors(EngineError):
            await self.handle.wake_up.remote()

    async def close(self) -> None:
        """Close the engine and end its process."""
        try:
            with _plain_errors(EngineError):
                await self.handle.close.remote()
        finally:
            ray.kill(self.handle)


class RayScorer:
    """A `Scorer` in another process.

    Args:
        handle: of a `RewardModelActor`.
    """

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    async def ready(self) -> float:
        """Wait until the model has loaded; return the seconds that it took in its process."""
        with _plain_errors(RewardError, "reward model"):
            return await self.handle.ready.remote()

    async def has_moments(self) -> bool:
        """See `LocalScorer.has_moments`."""
        with _plain_errors(RewardError, "reward model"):
            return await self.handle.has_moments.remote()

    async def score(self, token_ids: list[np.ndarray]) -> list[float]:
        """See `LocalScorer.score`."""
        with _plain_errors(RewardError, "reward model"):
            return await self.handle.score.remote(token_ids)
