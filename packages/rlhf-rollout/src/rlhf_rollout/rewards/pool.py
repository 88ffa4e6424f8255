"""Reward functions run in worker processes, off the event loop, with a time limit; what fails is a verdict."""

import asyncio
import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rlhf_data.errors import ConfigError, RewardError, with_hint
from rlhf_data.records import Prompt, Rollout, Verdict, VerdictKind
from rlhf_rollout.rewards.function import RewardTarget, Scored, parse_reward, verdict_of
from rlhf_rollout.rewards.process import CallCrashError, CallTimeoutError, InvalidResultError, WorkerProcess

_START_ATTEMPTS = 3
_START_PAUSE_S = 0.5


class RewardPool:
    """A `RewardFunction` over a user's function in worker processes.

    A group is scored in one call. When the call fails, its samples are called one by one, so that only the culprit is
    charged. A worker that hangs or dies is killed and replaced; one that cannot start three times in a row ends it
    with RewardError. Methods may be called from any event loop, one pool from several.

    Args:
        reward: `FILE.py` (its `reward_func`), `FILE.py:function`, `module` or `module:function`.
        num_workers: calls at once.
        timeout_s: the time limit of one call.
        startup_timeout_s: the time limit of the imports of a worker.
        log_path: file for what the function prints; None for this process's standard error.

    Raises:
        ConfigError: see `parse_reward`; a number that is not positive.
    """

    def __init__(
        self,
        reward: str,
        *,
        num_workers: int = 2,
        timeout_s: float = 30.0,
        startup_timeout_s: float = 120.0,
        log_path: str | Path | None = None,
    ) -> None:
        if num_workers < 1 or timeout_s <= 0 or startup_timeout_s <= 0:
            raise ConfigError(
                f"num_workers ({num_workers}), timeout_s ({timeout_s}) and startup_timeout_s ({startup_timeout_s}) "
                "must be positive"
            )
        self._target = parse_reward(reward)
        self._timeout_s = timeout_s
        self._startup_timeout_s = startup_timeout_s
        self._log_path = None if log_path is None else Path(log_path)
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

    async def score(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Verdict]:
        """Return one verdict a rollout, in order. Raises RewardError when no worker can start."""
        responses = [rollout.text for rollout in rollouts]
        if not responses:
            return []
        loop = asyncio.get_running_loop()
        outcome = await loop.run_in_executor(self._executor, self._call, prompt, responses)
        if isinstance(outcome, Scored):
            return [verdict_of(outcome, index) for index in range(len(responses))]
        if len(responses) == 1:
            return [outcome]
        calls = [loop.run_in_executor(self._executor, self._call, prompt, [response]) for response in responses]
        outcomes = await asyncio.gather(*calls)
        return [verdict_of(outcome, 0) if isinstance(outcome, Scored) else outcome for outcome in outcomes]

    async def close(self) -> None:
        """End the workers, a hung one included."""
        await asyncio.to_thread(self.shutdown)

    def shutdown(self) -> None:
        """Do what `close` does, from code without an event loop."""
        with self._lock:
            self._closed = True
            workers = list(self._workers)
        for worker in workers:
            worker.kill()  # ends the call that a thread may be waiting in
        self._executor.shutdown(wait=True, cancel_futures=True)
        for worker in workers:
            worker.close()

    def _call(self, prompt: Prompt, responses: list[str]) -> Scored | Verdict:
        """Run one call in the calling thread; a failure is the verdict of every sample of it."""
        worker = self._slots.get()
        try:
            if worker is None:
                worker = self._start()
            return worker.call(*reward_arguments(prompt, responses), timeout_s=self._timeout_s)
        except CallTimeoutError:
            return Verdict(VerdictKind.TIMEOUT, detail=f"no answer within {self._timeout_s:g} s")
        except CallCrashError as error:
            return Verdict(VerdictKind.CRASH, detail=" ".join(str(error).split()))
        finally:
            if worker is not None and not worker.alive:
                with self._lock:
                    self._workers.discard(worker)
                    self._num_replaced += 1
                worker = None
            self._slots.put(worker)

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
        raise RewardError("the reward pool is closed")


@dataclass(frozen=True, slots=True)
class RewardCheck:
    """What a trial of a reward function showed.

    Attributes:
        startup_s: seconds until it was imported.
        call_s: seconds of the call; None when there were no prompts to try.
        problem: the reason why the call gave no result, when it raised or hung; a run counts such calls as verdicts.
    """

    startup_s: float
    call_s: float | None = None
    problem: str | None = None


def check_reward_function(
    reward: str, prompts: Sequence[Prompt] = (), *, timeout_s: float = 30.0, startup_timeout_s: float = 120.0
) -> RewardCheck:
    """Import a reward function and call it once, in a worker of its own, before anything expensive starts.

    Args:
        reward: as for `RewardPool`.
        prompts: some of the run's; each of the first four is tried with its label and with nothing as the response.
        timeout_s: the time limit of the call.
        startup_timeout_s: the time limit of its imports.

    Raises:
        ConfigError: see `parse_reward`.
        RewardError: it cannot be imported; it returns no dictionary with `rewards`, another number of rewards than
            there are queries, or one that is not finite.
    """
    target = parse_reward(reward)
    started = time.monotonic()
    worker = WorkerProcess(target, startup_timeout_s=startup_timeout_s)
    startup_s = time.monotonic() - started
    samples = [reward_arguments(prompt, [prompt.label or "", ""]) for prompt in prompts[:4]]
    try:
        if not samples:
            return RewardCheck(startup_s)
        arguments = [[text for part in parts for text in part] for parts in zip(*samples, strict=True)]
        started = time.monotonic()
        scored = worker.call(*arguments, timeout_s=timeout_s)
        call_s = time.monotonic() - started
    except CallTimeoutError:
        return RewardCheck(startup_s, timeout_s, f"no answer within {timeout_s:g} s")
    except InvalidResultError as error:
        raise RewardError(f"{_name(target)}: {error}") from None
    except CallCrashError as error:
        return RewardCheck(startup_s, time.monotonic() - started, str(error))
    finally:
        worker.close()
    _check_finite(target, scored)
    return RewardCheck(startup_s, call_s)


def reward_arguments(prompt: Prompt, responses: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Return the queries, prompts and labels that a reward function gets for responses to one prompt."""
    queries = [prompt.text + response for response in responses]
    return queries, [prompt.text] * len(queries), [prompt.label or ""] * len(queries)


def _check_finite(target: RewardTarget, scored: Scored) -> None:
    for index in range(len(scored.rewards)):
        verdict = verdict_of(scored, index)
        if verdict.kind is VerdictKind.CRASH and scored.verdicts[index] != VerdictKind.CRASH:
            raise RewardError(
                with_hint(
                    f"{_name(target)}: {verdict.detail} in the trial call (sample {index})",
                    "return a finite number for every response, an empty one included",
                )
            )


def _name(target: RewardTarget) -> str:
    return f"{target.module}:{target.function}"
