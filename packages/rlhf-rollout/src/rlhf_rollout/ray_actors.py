"""Engines and reward models as Ray actors, and handles to them. Only this file and `ray_internals` import Ray."""

import asyncio
import getpass
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import ray
from ray.exceptions import ActorDiedError, RayActorError, RayTaskError

from rlhf_data.errors import EngineError, RewardError, RlhfError
from rlhf_rollout.engines import EngineSpec, build_engine
from rlhf_rollout.engines.remote_engine import EngineClient, EngineHost
from rlhf_rollout.engines.requests import Progress
from rlhf_rollout.host import collection_paused, place_vllm_sockets, spare_collection, wait_passively
from rlhf_rollout.ray_internals import process_name, session_folder
from rlhf_rollout.rewards.model import LocalScorer

_MAX_LATE = 2  # calls in a row that a reward model's process may leave without an answer


def node_address() -> str:
    """Return the IP address by which other nodes of the cluster reach this worker's."""
    return ray.util.get_node_ip_address()


def own_gpus() -> list[str]:
    """Return the GPUs that Ray assigned to this task or actor, as CUDA_VISIBLE_DEVICES names them, in their order."""
    assigned = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    return sorted(assigned, key=lambda name: (len(name), name))  # by length first, so that "10" comes after "9"


def prepare_process(gpus: Sequence[str] = ()) -> None:
    """Set what libraries read once in this worker: its GPUs, how threads wait, and the folders for files.

    Temporary files go to Ray's session folder. A run removes it with its cluster, and so also what killed processes
    have left. What torch compiles stays where it would be otherwise, for later runs. Call this before torch is
    imported.

    Args:
        gpus: see `own_gpus`; empty for those that Ray assigned to this worker, which it does not set where
            RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES is set. A worker without GPUs sees what it inherits.
    """
    if visible := list(gpus) or own_gpus():
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible)
    wait_passively()
    # torch keeps what it compiles among temporary files.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(tempfile.gettempdir(), f"torchinductor_{_user()}"))
    session = session_folder()
    if os.access(session, os.W_OK):
        place_vllm_sockets()  # where they would be otherwise: the session folder has a long path
        tempfile.tempdir = session


def _user() -> str:
    with suppress(KeyError, OSError):  # a container may have no name for its user
        return getpass.getuser()
    return f"uid_{os.getuid()}"


class _Actor:
    """Builds one part, an engine or a reward model, in its own process and calls its methods.

    An error of the build is kept and raised by every call. Raised here, it would reach the caller only as a line in
    Ray's report of a dead actor.
    """

    def __init__(self, build: Callable[[], Any], gpus: Sequence[str]) -> None:
        prepare_process(gpus)
        started = time.perf_counter()
        self._error: RlhfError | None = None
        try:
            with collection_paused():
                self._built = build()
            spare_collection()
        except RlhfError as error:
            self._error = error
        self._startup_s = time.perf_counter() - started

    @property
    def part(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._built

    async def ready(self) -> float:
        """Return how many seconds the part took to start. Raises the error that kept it from starting."""
        if self._error is not None:
            raise self._error
        return self._startup_s

    async def call(self, method: str, *arguments: Any) -> Any:
        """Return the result of a coroutine method of the part."""
        return await getattr(self.part, method)(*arguments)


class EngineActor(_Actor, EngineHost):
    """Runs one `RolloutEngine`: `RemoteEngine` is its actor class.

    Requests and control calls have separate concurrency groups of Ray, each with its own event loop and thread.
    Therefore control calls start at once, however many requests are in flight or queued.
    """

    def __init__(
        self, kind: str, spec: EngineSpec, gpus: Sequence[str] = (), environ: Mapping[str, str] | None = None
    ) -> None:
        os.environ.update(environ or {})
        super().__init__(lambda: build_engine(kind, spec), gpus)
        self._drafts = {}

    generate = ray.method(concurrency_group="requests")(EngineHost.generate)
    written = ray.method(concurrency_group="control")(EngineHost.written)
    call = ray.method(concurrency_group="control")(EngineHost.call)


RemoteEngine = ray.remote(concurrency_groups={"requests": 1024, "control": 64})(EngineActor)
"""The Ray actor class of `EngineActor`: `RemoteEngine.options(...).remote(kind, spec)`."""


class RewardModelActor(_Actor):
    """Runs one reward model: `ray.remote(RewardModelActor)`. Takes the arguments of `LocalScorer`."""

    def __init__(self, path: str, gpus: Sequence[str] = (), **options: Any) -> None:
        super().__init__(lambda: LocalScorer(path, **options), gpus)

    async def has_moments(self) -> bool:
        """See `LocalScorer.has_moments`."""
        return self.part.has_moments


def end_actors(handles: Sequence[Any]) -> None:
    """End the processes of actors, whatever they are doing. Ray does not restart them."""
    for handle in handles:
        ray.kill(handle)


@contextmanager
def plain_errors(gone: type[RlhfError], process: str = "the engine's process") -> Iterator[None]:
    """Raise an actor's RlhfError without Ray's wrapper, and `gone` when the actor's process has died."""
    try:
        yield
    except RayTaskError as error:
        raise error.cause if isinstance(error.cause, RlhfError) else error from None
    except RayActorError as error:
        hint = "its log in Ray's session folder tells why; often the machine ran out of memory"
        raise gone(f"{process} is gone: {error}", hint=hint) from error


class RayEngine(EngineClient):
    """A `RolloutEngine` in an actor, called through its `EngineActor`.

    Args:
        handle: Ray's handle of the actor.
        spec: gives the deadlines; None for the defaults of `EngineSpec`.
        start: starts another actor in place of this one and returns its handle; needed by `restart` only.
    """

    def __init__(self, handle: Any, spec: EngineSpec | None = None, start: Callable[[], Any] | None = None) -> None:
        super().__init__(spec or EngineSpec(model=""))
        self.handle = handle
        self._start = start

    def __reduce__(self) -> tuple[Any, ...]:
        return RayEngine, (self.handle, self._spec)  # only the process that started the actor can restart it

    @property
    def process(self) -> str:
        """Name of the process that runs the engine now; another one after `restart`."""
        return process_name(self.handle)

    def kill(self) -> None:
        """End the process, whatever it does. Calls fail until `restart`."""
        ray.kill(self.handle)

    def restart(self) -> None:
        """End the process, whatever it does, and start another one. `ready` waits for it."""
        if self._start is None:
            raise EngineError("this process did not start the engine and cannot restart it")
        self.kill()
        self.handle = self._start()
        self._progress = Progress()

    async def close(self) -> None:
        """Close the engine and end its process."""
        try:
            await self._call("close")
        finally:
            ray.kill(self.handle)

    async def _ask(self, method: str, *arguments: Any) -> Any:
        reference = getattr(self.handle, method).remote(*arguments)
        try:
            with plain_errors(EngineError):
                return await reference
        except asyncio.CancelledError:
            ray.cancel(reference)
            raise


class RayScorer:
    """A `Scorer` in another process, called through its `RewardModelActor`; `ModelReward` keeps the deadline.

    A process that misses the deadline twice in a row is killed. Ray restarts a process while its actor has restarts
    left. It counts those of the actor's whole life, so another actor takes the place of one that has answered before.

    Args:
        handle: Ray's handle of the actor.
        start: starts another actor in place of this one and returns its handle; None if nobody may.
    """

    def __init__(self, handle: Any, start: Callable[[], Any] | None = None) -> None:
        self.handle = handle
        self._start = start
        self._has_answered = False  # this actor
        self._num_late = 0  # calls since the last answer

    @property
    def handles(self) -> list[Any]:
        """Ray's handles of the scorer's processes: it has one."""
        return [self.handle]

    async def score(self, token_ids: list[np.ndarray]) -> list[float]:
        """See `LocalScorer.score`. A call that is cancelled or late is given up in the process, too."""
        handle = self.handle
        reference = handle.call.remote("score", token_ids)
        try:
            with plain_errors(RewardError, "the reward model's process"):
                scores = await reference
        except asyncio.CancelledError:
            ray.cancel(reference)
            self._num_late += 1
            if self._num_late == _MAX_LATE:
                self._num_late = 0
                ray.kill(handle, no_restart=False)
            raise
        except RewardError as error:
            if isinstance(error.__cause__, ActorDiedError):
                self._replace(handle)
            raise
        self._num_late = 0
        self._has_answered = self._has_answered or handle is self.handle
        return scores

    def _replace(self, handle: Any) -> None:
        """Start another actor, once for all calls that notice the death of this one."""
        if self._start is None or handle is not self.handle or not self._has_answered:
            return
        ray.kill(handle)  # it may have restarts left
        self.handle = self._start()
        self._has_answered = False
