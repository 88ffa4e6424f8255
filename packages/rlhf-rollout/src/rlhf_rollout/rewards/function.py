"""Rewards from a user's Python function: scoring in worker processes, and a trial call before a run starts."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from rlhf_data.errors import RewardError, nearest
from rlhf_data.records import FinishReason, Prompt, Rollout, Span, SpanSource, Verdict, VerdictKind
from rlhf_rollout.event_loop import EventLoopThread
from rlhf_rollout.http.batcher import Batcher, GroupBatcher, Sample, by_group
from rlhf_rollout.http.breaker import Breaker
from rlhf_rollout.rewards.outcomes import Failure, judge
from rlhf_rollout.rewards.sources import DEFAULT_CALLS, CallOptions
from rlhf_rollout.rewards.user_function import BUILTIN, Scored, is_builtin, parse_reward, verdict_of
from rlhf_rollout.workers.guarded import WorkerOptions
from rlhf_rollout.workers.pool import WorkerPool
from rlhf_rollout.workers.rpc import Call, CallError, UserCode
from rlhf_rollout.workers.user_code import Target

_LOGGER = logging.getLogger(__name__)
MAX_FAILURES = 8  # costly failures in a row after which a function is held back; at most half for one prompt
MOST_AT_ONCE = 64  # rollouts in a call of a built-in reward
NUM_TRIED = 4  # prompts in the trial of a source whose calls need not be as large as those of the run
_CLOSED = "the reward function's workers have been shut down"


class FunctionReward:
    """A `RewardFunction` that calls a user's function in worker processes. Failures become verdicts.

    A call holds the rollouts of several prompts, because a function may compare what it gets; see `GroupBatcher`. If a
    call fails, each rollout is scored in a call of its own, and those that do not fail once more together, so that only
    the rollouts at fault get a failed verdict. A function that hangs, kills its worker or fails slowly many times in a
    row, for several prompts, is held back by a `Breaker`: rollouts then fail at once, with the last error. May be used
    from several event loops; a call holds rollouts from one.

    Args:
        reward: `FILE.py` (its `reward_func`), `FILE.py:function`, `module` or `module:function`.
        calls: how it is called. `timeout_s` is the time limit for one rollout, from the moment that a worker has it. A
            call for several gets more time by the longest time per rollout that a successful call has taken so far.
            Each worker runs one call at a time; further calls wait. A built-in reward compares nothing, so that a call
            waits for no prompt and holds those that have come while all workers were busy.
        log_path: file for what the function prints, at most 10 MiB; None for this process's standard error, at most
            16 KiB per worker.

    Raises:
        ConfigError: the reward is refused by `parse_reward`.
    """

    def __init__(self, reward: str, calls: CallOptions = DEFAULT_CALLS, *, log_path: str | Path | None = None) -> None:
        num_prompts, num_samples = calls.function_shape
        code = reward_code(parse_reward(reward), calls.worker)
        limits = {"num_processes": calls.num_workers, "timeout_s": calls.timeout_s}
        self._pool = WorkerPool(code, calls.worker, log_path=log_path, **limits)
        self._target = code.target
        self._calls = calls
        self._breaker = Breaker(MAX_FAILURES)
        self._compares = not is_builtin(reward)
        self._batch_size = num_prompts * num_samples
        # By event loop, and by what is scored together.
        self._batchers: dict[tuple[asyncio.AbstractEventLoop, str], Batcher[list[Sample], list[Verdict]]] = {}
        self._pools: dict[str, str] = {}  # by group that is expected
        self._pace_s = 0.0  # the longest time per rollout of a successful call
        self._turns = asyncio.Semaphore(calls.num_workers)
        # The workers' own, because callers may come from several: started when it is first used.
        self._loop: EventLoopThread | None = None
        self._closed = False

    @property
    def num_replaced(self) -> int:
        """How many workers hung or died so far."""
        return self._pool.num_replaced

    async def score(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Verdict]:
        """Return one verdict per rollout, in order.

        Raises RewardError when the function cannot be imported, when workers fail to start three times in a row, and
        after `close`.
        """

        if not rollouts:
            return []
        if self._closed:
            raise RewardError(_CLOSED)
        group_id = rollouts[0].group_id
        key = asyncio.get_running_loop(), self._pools.pop(group_id, "")
        batcher = self._batcher(key)
        if isinstance(batcher, GroupBatcher):
            batcher.forget(group_id)
        try:
            return await batcher.submit([(prompt, rollout) for rollout in rollouts])
        finally:
            self._drop_if_idle(key, batcher)

    def expect(self, group_id: str, pool: str | None) -> None:
        """See `expect_group`."""
        if not self._compares:
            return
        if pool is not None and not self._closed:
            self._pools[group_id] = pool
            self._batcher((asyncio.get_running_loop(), pool)).expect(group_id)
        elif (known := self._pools.pop(group_id, None)) is not None:
            key = asyncio.get_running_loop(), known
            batcher = self._batcher(key)
            batcher.forget(group_id)
            self._drop_if_idle(key, batcher)

    async def close(self) -> None:
        """End the workers, also those that hang or are starting. Groups that wait for a call raise RewardError."""
        self._closed = True
        for (loop, _), batcher in list(self._batchers.items()):
            with contextlib.suppress(RuntimeError):  # a loop that has ended has nobody who waits
                loop.call_soon_threadsafe(batcher.fail, RewardError(_CLOSED))
        loop, self._loop = self._loop, None
        if loop is not None:
            await asyncio.to_thread(self._shut_down, loop)

    def _batcher(self, key: tuple[asyncio.AbstractEventLoop, str]) -> Any:
        if key not in self._batchers:
            if self._compares:
                self._batchers[key] = GroupBatcher(self._judge, max_batch=self._batch_size)
            else:
                most = max(MOST_AT_ONCE // self._calls.num_samples, 1)
                limits = {"max_batch": most, "max_running": self._calls.num_workers, "max_wait_s": 0.0}
                self._batchers[key] = Batcher(by_group(self._judge), **limits)
        return self._batchers[key]

    def _drop_if_idle(self, key: tuple[asyncio.AbstractEventLoop, str], batcher: Any) -> None:
        # Another one may have taken the place of a batcher that was left when all of its calls were under way.
        if batcher.is_idle and self._batchers.get(key) is batcher:
            del self._batchers[key]

    async def _judge(self, samples: list[Sample]) -> list[Verdict]:
        return await judge(samples, self._ask, self._calls.success_threshold, together=self._compares)

    async def _ask(self, samples: Sequence[Sample], _: Failure | None) -> Scored | Failure:
        if self._closed:
            raise RewardError(_CLOSED)
        if self._loop is None:
            self._loop = EventLoopThread("rewards")
        # A caller that gives up leaves the function running, and its worker occupied.
        return await asyncio.shield(asyncio.wrap_future(self._loop.start(self._call(samples))))

    def _shut_down(self, loop: EventLoopThread) -> None:
        loop.run(self._pool.close())
        loop.close()

    async def _call(self, samples: Sequence[Sample]) -> Scored | Failure:
        """Call the function, on the workers' event loop, when a worker is free."""
        async with self._turns:
            if refusal := self._breaker.refusal():
                return refusal
            call = RewardCall(samples)
            limit_s = self._calls.timeout_s + (len(samples) - 1) * self._pace_s
            outcome, is_fatal = await ask(self._pool, call, limit_s)
            seconds = time.monotonic() - call.activity.since
            if isinstance(outcome, Scored):
                self._pace_s = max(self._pace_s, seconds / len(samples))
            prompt_ids = {prompt.prompt_id for prompt, _ in samples}
            failure = outcome if isinstance(outcome, Failure) else None
            prompt_id = prompt_ids.pop() if len(prompt_ids) == 1 else None
            opens = self._breaker.note(failure, seconds, costly=is_fatal, prompt_id=prompt_id)
            if opens and not self._closed:
                name = f"{self._target.module}:{self._target.name}"
                _LOGGER.warning("%s keeps failing, so it is called only now and then: %s", name, outcome.detail)
            return outcome


class RewardCall(Call):
    """A call of a reward function for samples."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        super().__init__()
        self.samples = samples

    def begin(self, ready: Mapping[str, Any]) -> Mapping[str, Any]:
        """See `Call.begin`: the function receives those of the extra arguments that it has parameters for."""
        extras = extra_arguments(self.samples) if ready["extras"] else {}
        return {"arguments": reward_arguments(self.samples), "extras": {name: extras[name] for name in ready["extras"]}}


def reward_code(target: Target, worker: WorkerOptions) -> UserCode:
    """Return what the worker processes of a reward function run."""
    guess = nearest(target.module, BUILTIN)
    return UserCode(
        target=target,
        program="rlhf_rollout.rewards.user_function",
        name="the reward function",
        process="the reward worker",
        is_shared=False,
        settings={"extra_keys": worker.extra_keys},
        import_hint=f"did you mean the built-in reward `{guess}`?" if guess else "",
    )


async def ask(pool: WorkerPool, call: RewardCall, timeout_s: float) -> tuple[Scored | Failure, bool]:
    """Return the outcome of a call, and whether it has cost the worker. Raises RewardError when no worker starts."""
    try:
        return Scored(**await pool.call(call, timeout_s)), False
    except CallError as error:
        if error.is_late:
            return Failure(VerdictKind.TIMEOUT, f"no answer within {timeout_s:g} s"), True
        return Failure(VerdictKind.CRASH, str(error), is_invalid=error.is_invalid), error.is_fatal


def check_reward_function(
    reward: str, prompts: Sequence[Prompt] = (), calls: CallOptions = DEFAULT_CALLS
) -> str | None:
    """Import a reward function and call it once in a worker process, before anything expensive starts.

    The call is as large as those of a run, and holds the prompts in turn. A built-in reward compares nothing: its call
    holds each of the first four prompts twice. Responses are in turn the label of their prompt and an empty text.

    Returns:
        The reason when the call raised or hung, which a run would count as failed verdicts; None when it gave rewards.

    Raises:
        ConfigError: the reward is refused by `parse_reward`.
        RewardError: the function cannot be imported, or it returns no dictionary with `rewards`, another number of
            rewards than queries, or a reward that is not finite.
    """
    target = parse_reward(reward)
    if is_builtin(reward):
        samples = trial_samples(prompts[:NUM_TRIED])
    else:
        num_prompts, num_samples = calls.function_shape
        samples = trial_samples(list(islice(cycle(prompts), num_prompts)), num_samples)

    async def trial() -> Scored | Failure | None:
        pool = WorkerPool(reward_code(target, calls.worker), calls.worker, num_processes=1, timeout_s=calls.timeout_s)
        try:
            await pool.start()
            return (await ask(pool, RewardCall(samples), calls.timeout_s))[0] if samples else None
        finally:
            await pool.close()

    with ThreadPoolExecutor(1) as thread:  # the caller may be in an event loop
        outcome = thread.submit(asyncio.run, trial()).result()
    name = f"{target.module}:{target.name}"
    if outcome is None:
        return None
    if isinstance(outcome, Scored):
        check_finite(name, outcome)
        return None
    if outcome.is_invalid:
        raise RewardError(f"{name}: {outcome.detail}")
    late = f" for a call with {len(samples)} responses" if outcome.kind is VerdictKind.TIMEOUT else ""
    return outcome.detail + late


def reward_arguments(samples: Sequence[Sample]) -> tuple[list[str], list[str], list[str]]:
    """Return the queries, prompts and labels that a reward function receives."""
    queries = [prompt.text + rollout.text for prompt, rollout in samples]
    return queries, [prompt.text for prompt, _ in samples], [prompt.label or "" for prompt, _ in samples]


def extra_arguments(samples: Sequence[tuple[Prompt, Rollout]]) -> dict[str, list[Any]]:
    """Return the lists of `user_function.EXTRAS`, of which the token ids are those of the response alone, and those of
    the prompts' extra cells."""
    rollouts = [rollout for _, rollout in samples]
    return extra_cells([prompt for prompt, _ in samples]) | {
        "responses": [rollout.text for rollout in rollouts],
        "token_ids": [rollout.token_ids[len(rollout.spans[0].token_ids) :].tolist() for rollout in rollouts],
        "finish_reasons": [str(rollout.finish_reason) for rollout in rollouts],
        "group_ids": [rollout.group_id for rollout in rollouts],
    }


def extra_cells(prompts: Sequence[Prompt]) -> dict[str, list[Any]]:
    """Return the lists of the prompts' extra cells by their keys; None where a prompt has no such cell."""
    keys = dict.fromkeys(key for prompt in prompts for key in prompt.extra)
    return {key: [prompt.extra.get(key) for prompt in prompts] for key in keys}


def trial_samples(prompts: Sequence[Prompt], num_samples: int = 2) -> list[Sample]:
    """Return the samples of a trial: `num_samples` per prompt, in turn with its label and with an empty text."""
    samples = []
    for number, prompt in enumerate(prompt for prompt in prompts for _ in range(num_samples)):
        text = "" if number % 2 else prompt.label or ""
        spans = (Span(SpanSource.PROMPT, prompt.token_ids),)
        samples.append((prompt, Rollout("trial", "trial", spans, FinishReason.STOP, text)))
    return samples


def check_finite(name: str, scored: Scored) -> None:
    """Raise RewardError when a trial of the function or server `name` gave a number that is not finite."""
    for index in range(len(scored.rewards)):
        verdict = verdict_of(scored, index)
        if verdict.kind is VerdictKind.CRASH and scored.verdicts[index] != VerdictKind.CRASH:
            message = f"{name}: {verdict.detail} in the trial call (sample {index})"
            hint = "return a finite number for every response, an empty one included"
            if len(scored.rewards) == 1:
                hint += "; this call holds one response, which has no deviation to divide by"
            raise RewardError(message, hint=hint)
