"""Rewards from a user's Python function: scoring in worker processes, and a trial call before a run starts."""

import asyncio
import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rlhf_data.errors import ConfigError, RewardError
from rlhf_data.records import Prompt, Rollout, Verdict, VerdictKind
from rlhf_rollout.rewards.outcomes import Failure, judge
from rlhf_rollout.rewards.process import Samples, WorkerProcess
from rlhf_rollout.rewards.user_function import Scored, parse_reward, verdict_of

_MIN_SHARE_S = 1.0
_START_ATTEMPTS = 3
_START_PAUSE_S = 0.5
_CLOSED = "the reward function's workers have been shut down"


class FunctionReward:
    """A `RewardFunction` that calls a user's function in worker processes. Failures become verdicts.

    The rollouts of a prompt are scored in one call. If it fails, each rollout is scored in a call of its own, so that
    only the rollouts at fault get a failed verdict. After a timeout these calls share the time limit (each has at least
    1 s): a function that always hangs costs about twice the limit per prompt. May be used from several event loops.

    Args:
        reward: `FILE.py` (its `reward_func`), `FILE.py:function`, `module` or `module:function`.
        timeout_s: time limit of a call in seconds, from the moment that a worker has it.
        num_workers: concurrent calls, each in its own process; further calls wait.
        startup_timeout_s: time limit of a worker's imports in seconds.
        log_path: file for what the function prints; None for this process's standard error.

    Attributes:
        num_replaced: how many workers hung or died so far.

    Raises:
        ConfigError: the reward is refused by `parse_reward`, or a number is not positive.
    """

    def __init__(
        self,
        reward: str,
        *,
        timeout_s: float = 30.0,
        num_workers: int = 2,
        startup_timeout_s: float = 120.0,
        log_path: str | Path | None = None,
    ) -> None:
        numbers = {"timeout_s": timeout_s, "num_workers": num_workers, "startup_timeout_s": startup_timeout_s}
        for name, value in numbers.items():
            if value <= 0:
                raise ConfigError(f"the reward's {name} must be positive, got {value}")
        self._target = parse_reward(reward)
        self._timeout_s = timeout_s
        self._startup_timeout_s = startup_timeout_s
        self._log_path = None if log_path is None else Path(log_path)
        self._executor = ThreadPoolExecutor(num_workers, thread_name_prefix="reward")
        # One slot per thread; None stands for a worker that is not started yet. Last in, first out, so that running
        # workers are used before new ones start.
        self._slots: queue.LifoQueue[WorkerProcess | None] = queue.LifoQueue()
        for _ in range(num_workers):
            self._slots.put(None)
        self._lock = threading.Lock()
        self._workers: set[WorkerProcess] = set()
        self._has_started = False
        self._closed = False
        self.num_replaced = 0

    async def score(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Verdict]:
        """Return one verdict per rollout, in order.

        Raises RewardError when the function cannot be imported, when workers fail to start three times in a row, and
        after `close`.
        """

        async def ask(responses: Sequence[str], failure: Failure | None) -> Scored | Failure:
            if self._closed:
                raise RewardError(_CLOSED)
            timeout_s = self._timeout_s
            if failure is not None and failure.kind is VerdictKind.TIMEOUT:
                timeout_s = max(timeout_s / len(rollouts), min(timeout_s, _MIN_SHARE_S))
            loop = asyncio.get_running_loop()
            samples = reward_arguments(prompt, responses)
            return await loop.run_in_executor(self._executor, self._call, samples, timeout_s)

        return await judge([rollout.text for rollout in rollouts], ask)

    async def close(self) -> None:
        """End the workers, hung ones included."""
        await asyncio.to_thread(self._shutdown)

    def _shutdown(self) -> None:
        with self._lock:
            self._closed = True
            workers = list(self._workers)
        for worker in workers:
            worker.kill()  # ends the call that a thread may be waiting in
        self._executor.shutdown(wait=True, cancel_futures=True)
        for worker in workers:
            worker.close()

    def _call(self, samples: Samples, timeout_s: float) -> Scored | Failure:
        worker = self._slots.get()
        try:
            if worker is not None and not worker.alive:  # it died between two calls, so no sample is at fault
                worker = self._retire(worker)
            if worker is None:
                worker = self._start()
            return worker.call(samples, timeout_s)
        finally:
            self._slots.put(worker if worker is None or worker.alive else self._retire(worker))

    def _retire(self, worker: WorkerProcess) -> None:
        worker.close()
        with self._lock:
            self._workers.discard(worker)
            self.num_replaced += 1

    def _start(self) -> WorkerProcess:
        # If the first start fails, the function cannot be imported. Later failures are accidents, so they are retried.
        attempts = _START_ATTEMPTS if self._has_started else 1
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
                self._has_started = True
                if not self._closed:
                    self._workers.add(worker)
                    return worker
            worker.close()
        raise RewardError(_CLOSED)


def check_reward_function(
    reward: str, prompts: Sequence[Prompt] = (), *, timeout_s: float = 30.0, startup_timeout_s: float = 120.0
) -> str | None:
    """Import a reward function and call it once in a worker process, before anything expensive starts.

    The call holds each of the first four `prompts` twice: with its label and with an empty text as the response.
    `reward` and the time limits are those of `FunctionReward`.

    Returns:
        The reason when the call raised or hung, which a run would count as failed verdicts; None when it gave rewards.

    Raises:
        ConfigError: the reward is refused by `parse_reward`.
        RewardError: the function cannot be imported, or it returns no dictionary with `rewards`, another number of
            rewards than queries, or a reward that is not finite.
    """
    target = parse_reward(reward)
    worker = WorkerProcess(target, startup_timeout_s=startup_timeout_s)
    try:
        if not prompts:
            return None
        outcome = worker.call(trial_arguments(prompts), timeout_s)
    finally:
        worker.close()
    name = f"{target.module}:{target.function}"
    if isinstance(outcome, Scored):
        check_finite(name, outcome)
        return None
    if outcome.is_invalid:
        raise RewardError(f"{name}: {outcome.detail}")
    return outcome.detail


def reward_arguments(prompt: Prompt, responses: Sequence[str]) -> Samples:
    """Return the queries, prompts and labels that a reward function receives for responses to one prompt."""
    queries = [prompt.text + response for response in responses]
    return queries, [prompt.text] * len(queries), [prompt.label or ""] * len(queries)


def trial_arguments(prompts: Sequence[Prompt]) -> Samples:
    """Return the queries, prompts and labels of a trial: the first four prompts, with their labels and with no text."""
    trial: Samples = ([], [], [])
    for prompt in prompts[:4]:
        for texts, more in zip(trial, reward_arguments(prompt, [prompt.label or "", ""]), strict=True):
            texts += more
    return trial


def check_finite(name: str, scored: Scored) -> None:
    """Raise RewardError when a trial of the function or server `name` gave a number that is not finite."""
    for index in range(len(scored.rewards)):
        verdict = verdict_of(scored, index)
        if verdict.kind is VerdictKind.CRASH and scored.verdicts[index] != VerdictKind.CRASH:
            message = f"{name}: {verdict.detail} in the trial call (sample {index})"
            raise RewardError(message, hint="return a finite number for every response, an empty one included")
