"""Reward by a user's Python function: scores rollouts in worker processes, and a trial before anything starts."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhf_data.errors import ConfigError, RewardError, with_hint
from rlhf_data.records import Prompt, Rollout, Verdict, VerdictKind
from rlhf_rollout.rewards.pool import WorkerPool
from rlhf_rollout.rewards.process import CallCrashError, CallTimeoutError, InvalidResultError, WorkerProcess
from rlhf_rollout.rewards.user_function import RewardTarget, Scored, parse_reward, verdict_of

_MIN_SHARE_S = 1.0


class FunctionReward:
    """A `RewardFunction` over a user's function, off the event loop; what fails is a verdict.

    The rollouts of a prompt are scored in one call. When that call fails, they are called one by one, so that only the
    culprit is charged; after a timeout each has its share of the time limit (at least 1 s), so that a function that
    always hangs costs no more than about twice the limit a prompt. Usable from any event loop, and from several.

    Args:
        reward: `FILE.py` (its `reward_func`), `FILE.py:function`, `module` or `module:function`.
        timeout_s: the time limit of a call, counted from when a worker has it.
        num_workers: calls at once, each in a process of its own.
        startup_timeout_s: the time limit of the imports of a worker.
        log_path: file for what the function prints; None for this process's standard error.

    Raises:
        ConfigError: see `parse_reward`; a number that is not positive.
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
        if timeout_s <= 0:
            raise ConfigError(f"the reward's time limit must be positive, got {timeout_s}")
        self._timeout_s = timeout_s
        self._pool = WorkerPool(
            parse_reward(reward),
            num_workers=num_workers,
            startup_timeout_s=startup_timeout_s,
            log_path=None if log_path is None else Path(log_path),
        )

    @property
    def num_replaced(self) -> int:
        """Workers that hung or died so far."""
        return self._pool.num_replaced

    async def score(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Verdict]:
        """Return one verdict a rollout, in order. Raises RewardError when no worker can start."""
        responses = [rollout.text for rollout in rollouts]
        if not responses:
            return []
        outcome = await self._pool.call(*reward_arguments(prompt, responses), timeout_s=self._timeout_s)
        if isinstance(outcome, Scored):
            return [verdict_of(outcome, index) for index in range(len(responses))]
        outcomes = [outcome]
        if len(responses) > 1:
            timeout_s = self._timeout_s
            if outcome.kind is VerdictKind.TIMEOUT:
                timeout_s = max(timeout_s / len(responses), min(timeout_s, _MIN_SHARE_S))
            calls = [
                self._pool.call(*reward_arguments(prompt, [response]), timeout_s=timeout_s) for response in responses
            ]
            outcomes = await asyncio.gather(*calls)
        return [
            verdict_of(outcome, 0) if isinstance(outcome, Scored) else Verdict(outcome.kind, detail=outcome.detail)
            for outcome in outcomes
        ]

    async def close(self) -> None:
        """End the workers, a hung one included."""
        await asyncio.to_thread(self._pool.shutdown)


@dataclass(frozen=True, slots=True)
class RewardCheck:
    """What a trial of a reward function or server showed.

    Attributes:
        startup_s: seconds until it was imported; 0.0 for a server.
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
        reward: as for `FunctionReward`.
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
    try:
        if not prompts:
            return RewardCheck(startup_s)
        started = time.monotonic()
        scored = worker.call(*trial_arguments(prompts), timeout_s=timeout_s)
        call_s = time.monotonic() - started
    except CallTimeoutError:
        return RewardCheck(startup_s, timeout_s, f"no answer within {timeout_s:g} s")
    except InvalidResultError as error:
        raise RewardError(f"{_name(target)}: {error}") from None
    except CallCrashError as error:
        return RewardCheck(startup_s, time.monotonic() - started, str(error))
    finally:
        worker.close()
    check_finite(_name(target), scored)
    return RewardCheck(startup_s, call_s)


def reward_arguments(prompt: Prompt, responses: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Return the queries, prompts and labels that a reward function gets for responses to one prompt."""
    queries = [prompt.text + response for response in responses]
    return queries, [prompt.text] * len(queries), [prompt.label or ""] * len(queries)


def trial_arguments(prompts: Sequence[Prompt]) -> tuple[list[str], list[str], list[str]]:
    """Return the queries, prompts and labels of a trial: each of the first four with its label and with nothing."""
    samples = [reward_arguments(prompt, [prompt.label or "", ""]) for prompt in prompts[:4]]
    queries, texts, labels = ([text for sample in samples for text in sample[part]] for part in range(3))
    return queries, texts, labels


def check_finite(name: str, scored: Scored) -> None:
    """Raise RewardError when a trial of the function or server `name` has a number that is not finite."""
    for index in range(len(scored.rewards)):
        verdict = verdict_of(scored, index)
        if verdict.kind is VerdictKind.CRASH and scored.verdicts[index] != VerdictKind.CRASH:
            raise RewardError(
                with_hint(
                    f"{name}: {verdict.detail} in the trial call (sample {index})",
                    "return a finite number for every response, an empty one included",
                )
            )


def _name(target: RewardTarget) -> str:
    return f"{target.module}:{target.function}"
