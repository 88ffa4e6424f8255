"""Engines in processes of their own, so that nothing else delays the launches of their models. Needs no Ray.

`process_host` is the other side.
"""

import asyncio
import base64
import logging
import math
import os
import pickle
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlhf_data.errors import EngineError, RewardError
from rlhf_rollout.engines.build import build_engine
from rlhf_rollout.engines.places import EnginePlaces
from rlhf_rollout.engines.remote_engine import EngineClient
from rlhf_rollout.engines.spec import EngineSpec
from rlhf_rollout.event_loop import EventLoopThread
from rlhf_rollout.protocols import RolloutEngine
from rlhf_rollout.workers.guarded import WorkerOptions
from rlhf_rollout.workers.rpc import Call, CallError, UserCode, WorkerProcess
from rlhf_rollout.workers.user_code import Target

_WITH_PROCESS = ("transformers", "vllm")  # the other kinds compute next to nothing
_NO_LIMIT_GB = float(2**20)
_CODE = UserCode(
    target=Target("rlhf_rollout.engines"),
    program="rlhf_rollout.engines.process_host",
    name="the engine",
    process="the engine's process",
    is_shared=True,
)
_GONE_HINT = "the log tells why, if anything does; often the machine ran out of memory"


async def start_engine(kind: str, spec: EngineSpec, environ: Mapping[str, str] | None = None) -> RolloutEngine:
    """Return a running engine of a kind named in `ENGINE_KINDS`; one that holds a model has a process of its own.

    `environ` are further variables of the process. Raises as `build_engine` does. If the call is cancelled, the process
    ends.
    """
    if kind not in _WITH_PROCESS:
        return build_engine(kind, spec)
    spec.check_kind(kind)
    engine = ProcessEngine(kind, spec, environ)
    try:
        await engine.ready()
    except BaseException:
        await engine.close()
        raise
    return engine


async def start_engines(
    kind: str, spec: EngineSpec, places: EnginePlaces, environ: Mapping[str, str] | None = None
) -> list[RolloutEngine]:
    """Return running engines of a kind named in `ENGINE_KINDS`, one per place.

    Each has a seed of its own: with one seed for all, engines would draw the same numbers for requests without a seed.
    If one does not start, all are closed.

    Args:
        kind: as for `start_engine`.
        spec: the settings of each engine. Its share of a GPU's memory is that of one engine.
        places: where they run.
        environ: further variables of their processes.

    Raises:
        ConfigError, EngineError: as `start_engine` does.
    """
    if places.most_per_gpu > 1:  # the others allocate memory while one starts
        spec = replace(spec, measures_memory=False)
    starts = []
    for number, own in enumerate(places.environs()):
        seed = None if spec.seed is None else spec.seed + number
        starts.append(asyncio.create_task(start_engine(kind, replace(spec, seed=seed), own | dict(environ or {}))))
    try:
        return list(await asyncio.gather(*starts))
    except BaseException:
        for start in starts:
            start.cancel()
        for ended in await asyncio.gather(*starts, return_exceptions=True):
            if not isinstance(ended, BaseException):
                await ended.close()
        raise


class ProcessEngine(EngineClient):
    """A `RolloutEngine` in a process that this one starts. Wait for `ready` before any other call.

    The process has this one's environment, writes to this one's standard error, and ends with this one. Ctrl-C does not
    reach it. It may be used from any event loop.

    Args:
        kind: one of `ENGINE_KINDS`.
        spec: how the process builds the engine.
        environ: further variables of the process, which libraries read when they are imported.
    """

    def __init__(self, kind: str, spec: EngineSpec, environ: Mapping[str, str] | None = None) -> None:
        super().__init__(spec)
        self._kind = kind
        self._environ = dict(environ or {})
        # Libraries are set by variables, and the GPU's driver reserves far more addresses than the machine has memory.
        names = tuple(name for name in os.environ if name.isidentifier())
        self._process = WorkerProcess(_CODE, WorkerOptions(env=names, memory_gb=_NO_LIMIT_GB))
        self._thread = EventLoopThread("engine-calls")
        self._is_ready = False
        self._is_closed = False

    async def ready(self) -> None:
        """See `EngineClient.ready`."""
        await super().ready()
        self._is_ready = True

    async def close(self) -> None:
        """Close the engine and end its process, at once if it has not started."""
        if self._is_closed:
            return
        try:
            if self._is_ready and self._process.alive:
                await self._call("close")
        finally:
            self._is_closed = True
            await asyncio.to_thread(self._end)

    def _end(self) -> None:
        if not self._is_ready:  # the start cannot be interrupted otherwise
            self._process.kill()
        self._thread.start(self._process.shut_down()).result()
        self._thread.close()

    async def _ask(self, method: str, *arguments: Any) -> Any:
        if self._is_closed:
            raise EngineError("the engine was closed")
        if method == "ready":
            arguments = (self._kind, self._spec, self._environ)
        return await asyncio.wrap_future(self._thread.start(self._exchange(method, arguments)))

    async def _exchange(self, method: str, arguments: tuple[Any, ...]) -> Any:
        """Make a call on the thread of the connection."""
        try:
            if method == "ready":
                await self._process.start()
            if self._process.has_failed:
                ending = await asyncio.to_thread(self._process.ending)
                raise CallError(f"{_CODE.process} {ending}", is_fatal=True)
            answer = await self._process.call(Call({"method": method, "arguments": packed(arguments)}), math.inf)
        except RewardError as error:  # the import failed
            raise EngineError(str(error)) from None
        except CallError as failure:
            raise EngineError(str(failure), hint=_GONE_HINT if failure.is_fatal else None) from None
        for name, level, text in answer["logged"]:
            logging.getLogger(name).log(level, "%s", text)
        result = unpacked(answer["result"])
        if answer["is_raised"]:
            raise result
        return result


def packed(value: Any) -> str:
    """Return any value that can be pickled as text for a line of JSON."""
    return base64.b64encode(pickle.dumps(value, pickle.HIGHEST_PROTOCOL)).decode("ascii")


def unpacked(text: str) -> Any:
    """Return the value of which `packed` has made a text."""
    return pickle.loads(base64.b64decode(text))
