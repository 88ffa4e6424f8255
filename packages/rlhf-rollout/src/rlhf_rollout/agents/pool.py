"""The processes of an agent: started before they are needed, replaced when they die, always ended."""

import asyncio
import logging
from collections.abc import Coroutine, Hashable
from pathlib import Path
from typing import Any

from rlhf_data.errors import ConfigError, RewardError
from rlhf_rollout.agents.process import AgentError, AgentProcess, Attempt
from rlhf_rollout.rewards import leftovers
from rlhf_rollout.rewards.sources import DEFAULT_WORKER, WorkerOptions
from rlhf_rollout.rewards.user_function import RewardTarget

_LOGGER = logging.getLogger(__name__)
_MAX_STARTS = 3  # in a row that may fail


class AgentPool:
    """Runs episodes of one agent in a fixed number of processes. Use it from one event loop.

    An episode goes to the process with the fewest episodes. When a process dies, the episodes in it are run again from
    the start, one half in one extra process and the other in another, and so on with the half whose process dies, so
    that the one at fault fails alone while the others lose little time. There are at most as many extra processes at
    the same time as others, but at least two.

    Args:
        target: the agent's file or module, and a name in it.
        num_processes: processes.
        timeout_s: seconds that the agent's code may take between two answers of the policy.
        tokenizer: folder or hub name of the tokenizer that agents load on demand; None if they cannot.
        options: how the processes run.
        log_path: file for what the agent prints; None for this process's standard error.

    Raises:
        ConfigError: a number is not positive.

    Attributes:
        num_replaced: processes that died or hung, or in which too many functions hung, so far.
    """

    def __init__(
        self,
        target: RewardTarget,
        *,
        num_processes: int = 2,
        timeout_s: float = 60.0,
        tokenizer: str | None = None,
        options: WorkerOptions = DEFAULT_WORKER,
        log_path: Path | None = None,
    ) -> None:
        for name, value in {"num_processes": num_processes, "timeout_s": timeout_s}.items():
            if value <= 0:
                raise ConfigError(f"the agent's {name} must be positive, got {value}")
        self._target = target
        self._timeout_s = timeout_s
        self._tokenizer = tokenizer
        self._options = options
        self._log_path = log_path
        self._slots = [_Slot() for _ in range(num_processes)]
        self._extra: dict[Hashable, _Slot] = {}
        self._admission = asyncio.Semaphore(max(num_processes, 2))
        self._draining: set[AgentProcess] = set()
        self._retiring: set[asyncio.Task[None]] = set()
        self._num_failed_starts = 0
        self._is_closed = False
        self.num_replaced = 0

    async def start(self) -> None:
        """End what dead runs have left and start all processes. Raises RewardError if the agent cannot be imported."""
        await asyncio.to_thread(leftovers.sweep)
        await asyncio.gather(*(self._process_of(slot) for slot in self._slots))

    async def execute(self, attempt: Attempt) -> dict[str, Any]:
        """Run one episode and return what the agent says of it.

        Raises AgentError when the agent fails, RewardError when its processes cannot be started.
        """
        slot = min(self._slots, key=lambda slot: slot.num_episodes)
        while True:
            try:
                return await self._execute(slot, attempt)
            except AgentError as failure:
                if failure.again is None or self._is_closed:
                    raise
                slot = self._extra.setdefault(failure.again, _Slot(failure.again))

    async def close(self) -> None:
        """End all processes, also those that hang or are starting."""
        self._is_closed = True
        slots = [*self._slots, *self._extra.values()]
        processes = [*self._draining, *(slot.process for slot in slots if slot.process is not None)]
        await asyncio.gather(*(process.shut_down() for process in processes), *self._retiring)

    async def _execute(self, slot: "_Slot", attempt: Attempt) -> dict[str, Any]:
        slot.num_episodes += 1
        try:
            process = await self._process_of(slot)
            return await process.execute(attempt)
        finally:
            slot.num_episodes -= 1
            if slot.key is not None and not slot.num_episodes:
                self._extra.pop(slot.key, None)
                self._in_background(self._retire(slot))

    async def _retire(self, slot: "_Slot") -> None:
        """End the process of an extra slot, which no episode has any more."""
        if slot.process is not None:
            self.num_replaced += not slot.process.alive
            await slot.process.shut_down()
        if slot.is_admitted:
            self._admission.release()

    def _leave(self, process: AgentProcess) -> None:
        """End a process that gets no more episodes: at once if it is dead, else after those that it has."""
        if process.alive:
            text = "%d plain functions of the agent hang; their process is replaced once its other episodes have ended"
            _LOGGER.warning(text, process.num_hanging)
            self._draining.add(process)
        self._in_background(self._end(process))

    async def _end(self, process: AgentProcess) -> None:
        try:
            await process.drain()
        finally:
            self._draining.discard(process)

    def _in_background(self, ending: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(ending)
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    async def _process_of(self, slot: "_Slot") -> AgentProcess:
        """Return the process of a slot; start another one when it has died."""
        async with slot.lock:
            old = slot.process
            if old is not None and old.alive and not old.is_worn:
                return old
            if old is not None:
                self.num_replaced += 1
                slot.process = None
                self._leave(old)
            if slot.key is not None and not slot.is_admitted:
                await self._admission.acquire()
                slot.is_admitted = True
            if self._is_closed:
                raise RewardError("the agent's processes have been shut down")
            process = AgentProcess(self._target, self._options, timeout_s=self._timeout_s, log_path=self._log_path)
            slot.process = process  # `close` may come while it starts
            try:
                await process.start(self._tokenizer)
            except BaseException as error:  # also CancelledError, after which nobody would use it
                slot.process = None
                await process.shut_down()
                if not isinstance(error, RewardError):
                    raise
                self._num_failed_starts += 1
                if self._num_failed_starts >= _MAX_STARTS or not self.num_replaced:
                    raise
                _LOGGER.warning("%s", error)
                raise AgentError(str(error), again=slot) from None
            self._num_failed_starts = 0
            return process


class _Slot:
    """A place for a process. `num_episodes` includes those that wait for the process to start.

    An extra place has the `key` of the episodes that are tried again in it, and needs admission before it is used.
    """

    def __init__(self, key: Hashable | None = None) -> None:
        self.key = key
        self.is_admitted = False
        self.process: AgentProcess | None = None
        self.lock = asyncio.Lock()
        self.num_episodes = 0
