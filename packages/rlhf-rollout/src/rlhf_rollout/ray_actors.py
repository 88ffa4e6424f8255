"""Engines as Ray actors: the actor, the driver's view of it, and the trainer's. The only file here that imports Ray."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayActorError, RayTaskError

from rlhf_data.errors import EngineError, RlhfError, WeightSyncError, with_hint
from rlhf_rollout.engines import EngineSpec, build_engine
from rlhf_rollout.protocols import Completion, RolloutEngine, SamplingParams
from rlhf_rollout.weights import WeightBucket


class EngineActor:
    """Runs one engine in a process of its own: `ray.remote(EngineActor).options(max_concurrency=...)`.

    Every `generate` call that runs at once takes one of the actor's `max_concurrency` places.
    """

    def __init__(self, kind: str, spec: EngineSpec) -> None:
        started = time.perf_counter()
        self._built: RolloutEngine | RlhfError
        try:
            self._built = build_engine(kind, spec)
        except RlhfError as error:
            # Raised by the first call instead: Ray would bury it in the report of an actor's death.
            self._built = error
        self._startup_s = time.perf_counter() - started

    @property
    def _engine(self) -> RolloutEngine:
        if isinstance(self._built, RlhfError):
            raise self._built
        return self._built

    async def ready(self) -> float:
        """Return the seconds that the engine took to start, once it has. Raises what kept it from starting."""
        if isinstance(self._built, RlhfError):
            raise self._built
        return self._startup_s

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


@contextmanager
def _plain_errors(gone: type[RlhfError]) -> Iterator[None]:
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
            with_hint(f"the engine's process is gone: {error}", "its log tells why (Ray's session folder)")
        ) from error


class RayEngine:
    """A `RolloutEngine` in another process, for the driver's event loop.

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


class EngineClient:
    """An engine in another process as the trainer's rank 0 drives it: blocking calls that may run on any thread.

    Args:
        handle: of an `EngineActor`.
    """

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def begin(self, policy_version: int) -> None:
        """Stop the engine and get it ready for buckets."""
        with _plain_errors(WeightSyncError):
            ray.get(self._handle.begin_weight_update.remote(policy_version))

    def receive(self, bucket: WeightBucket) -> None:
        """Have the engine load a bucket; the buffer may be reused once this returns."""
        with _plain_errors(WeightSyncError):
            ray.get(self._handle.receive_weights.remote(bucket))

    def finish(self) -> None:
        """Put the weights in force and let the engine generate on."""
        with _plain_errors(WeightSyncError):
            ray.get(self._handle.finish_weight_update.remote())
