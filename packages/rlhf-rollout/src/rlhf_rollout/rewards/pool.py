"""Worker processes that are called with a time limit, off the event loop; one that hangs or dies is replaced."""

import asyncio
import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rlhf_data.errors import ConfigError, RewardError
from rlhf_data.records import VerdictKind
from rlhf_rollout.rewards.process import CallCrashError, CallTimeoutError, WorkerProcess
from rlhf_rollout.rewards.user_function import RewardTarget, Scored

_START_ATTEMPTS = 3
_START_PAUSE_S = 0.5
_CLOSED = "the reward function's workers have been shut down"


@dataclass(frozen=True, slots=True)
class CallFailure:
    """A call without a result.

    Attributes:
        kind: `timeout` or `crash`.
        detail: one line for people.
    """

    kind: VerdictKind
    detail: str


class WorkerPool:
    """Workers around one function; each is started when it is first needed.

    Args:
        target: the function.
        num_workers: calls at once; further ones wait.
        startup_timeout_s: the time limit of a worker's imports.
        log_path: file for what the function prints; None for this process's standard error.
    """

    def __init__(
        self,
        target: RewardTarget,
        *,
        num_workers: int,
        startup_timeout_s: float,
        log_path: Path | None = None,
    ) -> None:
        if num_workers < 1 or startup_timeout_s <= 0:
            raise ConfigError(
                f"num_workers ({num_workers}) and startup_timeout_s ({startup_timeout_s}) must be positive"
            )
        self._target = target
        self._startup_timeout_s = startup_timeout_s
        self._log_path = log_path
        self._executor = ThreadPoolExecutor(num_workers, thread_name_prefix="reward")
        # One slot a thread; None is a worker that is yet to be started. Last in, first out: started ones first.
        self._slots: queue.LifoQueue[WorkerProcess | None] = queue.LifoQueue()
        for _ in range(num_workers):
            self._slots.put(None)
        self._lock = threading.Lock()
        self._workers: set[WorkerProcess] = set()
        self._num_started = 0
        self._num_replaced = 0
        self._closed = False

    @property
    def num_replaced(self) -> int:
        """Workers that hung or died so far."""
        return self._num_replaced

    async def call(
        self, queries: list[str], prompts: list[str], labels: list[str], *, timeout_s: float
    ) -> Scored | CallFailure:
        """Return what the function says of some samples, or why it says nothing within `timeout_s` of having them.

        Raises:
            RewardError: the function cannot be imported, workers fail to start three times in a row, or the pool is
                shut down.
        """
        if self._closed:
            raise RewardError(_CLOSED)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, self._call, queries, prompts, labels, timeout_s)

    def shutdown(self) -> None:
        """End all workers, and with them the calls that they are in."""
        with self._lock:
            self._closed = True
            workers = list(self._workers)
        for worker in workers:
            worker.kill()  # ends the call that a thread may be waiting in
        self._executor.shutdown(wait=True, cancel_futures=True)
        for worker in workers:
            worker.close()

    def _call(
        self, queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str], timeout_s: float
    ) -> Scored | CallFailure:
        worker = self._slots.get()
        try:
            if worker is not None and not worker.alive:  # it died between two calls: no one is to be charged
                worker = self._retire(worker)
            if worker is None:
                worker = self._start()
            return worker.call(queries, prompts, labels, timeout_s=timeout_s)
        except CallTimeoutError:
            return CallFailure(VerdictKind.TIMEOUT, f"no answer within {timeout_s:g} s")
        except CallCrashError as error:
            return CallFailure(VerdictKind.CRASH, " ".join(str(error).split()))
        finally:
            self._slots.put(worker if worker is None or worker.alive else self._retire(worker))

    def _retire(self, worker: WorkerProcess) -> None:
        worker.close()
        with self._lock:
            self._workers.discard(worker)
            self._num_replaced += 1

    def _start(self) -> WorkerProcess:
        # The first start tells whether the function can be imported at all; a later one fails by accident.
        attempts = _START_ATTEMPTS if self._num_started else 1
        for attempt in range(1, attempts + 1):
            if self._closed:
                break
            try:
                worker = WorkerProcess(self._target, startup_timeout_s=self._startup_timeout_s, log_path=self._log_path)
            except RewardError:
                if attempt == attempts:
                    raise
                time.sleep(_START_PAUSE_S)
                continue
            with self._lock:
                self._num_started += 1
                if not self._closed:
                    self._workers.add(worker)
                    return worker
            worker.close()
        raise RewardError(_CLOSED)
