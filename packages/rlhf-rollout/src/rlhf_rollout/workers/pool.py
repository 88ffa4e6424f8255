"""The processes of a user's code: replaced when they die, and always ended."""

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf_data.errors import RewardError
from rlhf_rollout.workers import leftovers
from rlhf_rollout.workers.guarded import DEFAULT_WORKER, WorkerOptions
from rlhf_rollout.workers.rpc import Call, CallError, UserCode, WorkerProcess

_LOGGER = logging.getLogger(__name__)
_MAX_STARTS = 3  # in a row that may fail, once one has succeeded
_START_PAUSE_S = 0.5


class WorkerPool:
    """Runs calls of a user's code in a fixed number of processes. Use it from one event loop.

    A call goes to the process with the fewest calls, which is started for the first one. When a process dies, the calls
    in it are run again from the start, one half in one extra process and the other in another, and so on with the half
    whose process dies, so that the one at fault fails alone while the others lose little time. There are at most as
    many extra processes at the same time as others, but at least two.

    Args:
        code: what the processes run.
        options: how they run.
        num_processes: processes, at least one.
        timeout_s: seconds that the code may take until it answers or asks, and between two answers to it.
        log_path: file for what the code prints; None for this process's standard error.

    Attributes:
        num_replaced: processes that died or hung, or in which too many functions hung, so far.
    """

    def __init__(
        self,
        code: UserCode,
        options: WorkerOptions = DEFAULT_WORKER,
        *,
        num_processes: int,
        timeout_s: float,
        log_path: Path | None = None,
    ) -> None:
        self._code = code
        self._options = options
        self._timeout_s = timeout_s
        self._log_path = log_path
        self._slots = [_Slot() for _ in range(num_processes)]
        self._extra: dict[Hashable, _Slot] = {}
        self._admission = asyncio.Semaphore(max(num_processes, 2))
        self._processes: set[WorkerProcess] = set()  # all that have not ended
        self._retiring: set[asyncio.Task[None]] = set()
        self._num_failed_starts = 0
        self._has_started = False
        self._closing = asyncio.Event()
        self.num_replaced = 0

    async def start(self) -> None:
        """End what dead runs have left and start all processes. Raises RewardError if the code cannot be imported."""
        await asyncio.to_thread(leftovers.sweep)
        await asyncio.gather(*(self._process_of(slot) for slot in self._slots))

    async def call(self, call: Call, timeout_s: float | None = None) -> Any:
        """Run one call and return its result; `timeout_s` replaces that of the pool.

        Raises CallError when the code fails, RewardError when its processes cannot be started.
        """
        slot = min(self._slots, key=lambda slot: slot.num_calls)
        while True:
            try:
                return await self._call(slot, call, timeout_s or self._timeout_s)
            except CallError as failure:
                if failure.again is None or self._closing.is_set():
                    raise
                slot = self._extra.setdefault(failure.again, _Slot(failure.again))

    async def close(self) -> None:
        """End all processes, also those that hang or are starting."""
        self._closing.set()
        await asyncio.gather(*(process.shut_down() for process in self._processes), *self._retiring)

    async def _call(self, slot: "_Slot", call: Call, timeout_s: float) -> Any:
        slot.num_calls += 1
        process = None
        try:
            process = await self._process_of(slot)
            return await process.call(call, timeout_s)
        finally:
            slot.num_calls -= 1
            if slot.key is not None:
                if not slot.num_calls:
                    self._extra.pop(slot.key, None)
                    self._in_background(self._retire(slot))
            elif process is not None and slot.process is process and not process.alive:
                self._leave(slot)

    async def _retire(self, slot: "_Slot") -> None:
        """End the process of an extra slot, which no call has any more."""
        if slot.process is not None:
            self.num_replaced += not slot.process.alive
            await self._end(slot.process)
        if slot.is_admitted:
            self._admission.release()

    def _leave(self, slot: "_Slot") -> None:
        """End the process of a slot, which gets no more calls: at once if it is dead, else after those that it has."""
        process = slot.process
        slot.process = None
        self.num_replaced += 1
        if process.alive:
            text = "%d plain functions of %s hang; their process is replaced once its other calls have ended"
            _LOGGER.warning(text, process.num_hanging, self._code.name)
        self._in_background(self._end(process))

    async def _end(self, process: WorkerProcess) -> None:
        """Shut a process down once its calls have ended."""
        await process.drain()
        self._processes.discard(process)

    def _in_background(self, ending: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(ending)
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    async def _process_of(self, slot: "_Slot") -> WorkerProcess:
        """Return the process of a slot; start another one when it has died."""
        async with slot.lock:
            if slot.process is not None:
                if slot.process.alive and not slot.process.is_worn:
                    return slot.process
                self._leave(slot)
            if slot.key is not None and not slot.is_admitted:
                await self._admission.acquire()
                slot.is_admitted = True
            while not await self._start(slot):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_START_PAUSE_S):
                        await self._closing.wait()
            return slot.process

    async def _start(self, slot: "_Slot") -> bool:
        """Start a process in a slot; return whether that succeeded.

        Raises RewardError when the code cannot be imported: the first start, or several in a row, have failed.
        """
        if self._closing.is_set():
            raise RewardError(f"{self._code.name}'s processes have been shut down")
        process = WorkerProcess(self._code, self._options, log_path=self._log_path)
        slot.process = process
        self._processes.add(process)  # `close` may come while it starts
        try:
            await process.start()
        except BaseException as error:  # also CancelledError, after which nobody would use it
            slot.process = None
            await self._end(process)
            if not isinstance(error, RewardError):
                raise
            self._num_failed_starts += 1
            if not self._closing.is_set():
                if self._num_failed_starts >= _MAX_STARTS or not self._has_started:
                    raise
                _LOGGER.warning("%s", error)
            return False
        self._num_failed_starts = 0
        self._has_started = True
        return True


@dataclass(eq=False, slots=True)
class _Slot:
    """A place for a process. `num_calls` includes those that wait for the process to start.

    An extra place has the `key` of the calls that are tried again in it, and needs admission before it is used.
    """

    key: Hashable | None = None
    is_admitted: bool = False
    process: WorkerProcess | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    num_calls: int = 0
