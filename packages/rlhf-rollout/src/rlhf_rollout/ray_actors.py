"""Engines and reward models as Ray actors, and how the driver and the trainer see them. Only this file imports Ray."""

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayActorError, RayTaskError

from rlhf_data.errors import EngineError, RewardError, RlhfError, WeightSyncError
from rlhf_rollout.engines import EngineSpec, build_engine
from rlhf_rollout.host import visible_devices, wait_passively
from rlhf_rollout.protocols import Completion, SamplingParams
from rlhf_rollout.rewards.model import LocalScorer
from rlhf_rollout.weight_sync.bucket import WeightBucket


def prepare_process() -> None:
    """Set what PyTorch reads once in this worker: its GPUs, and how its threads wait. Call before torch is imported."""
    wait_passively()
    assigned = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    devices = visible_devices(assigned, os.environ)
    if devices is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = devices


class _Actor:
    """Runs one part in a process of its own: every call that runs at once takes a place of `max_concurrency`.

    What keeps the part from starting is raised by each call: Ray would bury it in the report of an actor's death.
    """

    def __init__(self, build: Callable[[], Any]) -> None:
        prepare_process()
        started = time.perf_counter()
        self._error: RlhfError | None = None
        try:
            self._built = build()
        except RlhfError as error:
            self._error = error
        self._startup_s = time.perf_counter() - started

    @property
    def part(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._built

    async def ready(self) -> float:
        """Return the seconds that the part took to start, once it has. Raises what kept it from starting."""
        if self._error is not None:
            raise self._error
        return self._startup_s

    async def call(self, method: str, *arguments: Any) -> Any:
        """Return what a coroutine method of the part returns."""
        return await getattr(self.part, method)(*arguments)


class EngineActor(_Actor):
    """Runs one `RolloutEngine`: `ray.remote(EngineActor).options(max_concurrency=...)`."""

    def __init__(self, kind: str, spec: EngineSpec) -> None:
        super().__init__(lambda: build_engine(kind, spec))


class RewardModelActor(_Actor):
    """Runs one reward model: `ray.remote(RewardModelActor)`. Arguments as of `LocalScorer`."""

    def __init__(self, path: str, **options: Any) -> None:
        super().__init__(lambda: LocalScorer(path, **options))

    async def has_moments(self) -> bool:
        """See `LocalScorer.has_moments`."""
        return self.part.has_moments


@contextmanager
def plain_errors(gone: type[RlhfError], process: str = "the engine's process") -> Iterator[None]:
    """Raise an actor's own errors as themselves, and `gone` when its process has died."""
    try:
        yield
    except RayTaskError as error:
        raise error.cause if isinstance(error.cause, RlhfError) else error from None
    except RayActorError as error:
        hint = "its log tells why (Ray's session folder); out of memory is the usual reason"
        raise gone(f"{process} is gone: {error}", hint=hint) from error


class RayEngine:
    """A `RolloutEngine` in another process, by the handle of its `EngineActor`."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    async def _call(self, method: str, *arguments: Any, gone: type[RlhfError] = EngineError) -> Any:
        with plain_errors(gone):
            return await self.handle.call.remote(method, *arguments)

    async def ready(self) -> float:
        """Wait until the engine has started; return the seconds that it took in its process."""
        with plain_errors(EngineError):
            return await self.handle.ready.remote()

    async def generate(self, token_ids: np.ndarray, sampling: SamplingParams) -> list[Completion]:
        """See `RolloutEngine.generate`. A cancelled call gives its request up in the engine too."""
        reference = self.handle.call.remote("generate", token_ids, sampling)
        try:
            with plain_errors(EngineError):
                return await reference
        except asyncio.CancelledError:
            ray.cancel(reference)
            raise

    async def begin_weight_update(self, policy_version: int) -> None:
        """See `RolloutEngine.begin_weight_update`."""
        await self._call("begin_weight_update", policy_version, gone=WeightSyncError)

    async def receive_weights(self, bucket: WeightBucket) -> None:
        """See `RolloutEngine.receive_weights`."""
        await self._call("receive_weights", bucket, gone=WeightSyncError)

    async def finish_weight_update(self) -> None:
        """See `RolloutEngine.finish_weight_update`."""
        await self._call("finish_weight_update", gone=WeightSyncError)

    async def sleep(self) -> None:
        """See `RolloutEngine.sleep`."""
        await self._call("sleep")

    async def wake_up(self) -> None:
        """See `RolloutEngine.wake_up`."""
        await self._call("wake_up")

    async def close(self) -> None:
        """Close the engine and end its process."""
        try:
            await self._call("close")
        finally:
            ray.kill(self.handle)


class RayScorer:
    """A `Scorer` in another process, by the handle of its `RewardModelActor`."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def score(self, token_ids: list[np.ndarray]) -> list[float]:
        """See `LocalScorer.score`."""
        with plain_errors(RewardError, "the reward model's process"):
            return await self._handle.call.remote("score", token_ids)
