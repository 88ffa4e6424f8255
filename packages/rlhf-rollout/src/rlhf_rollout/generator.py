"""Prompts in, scored groups of rollouts out: bounded in flight, whole groups only, rewards while others generate."""

import asyncio
import dataclasses
import itertools
import time
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from rlhf_data.errors import ConfigError, EngineError, RewardError
from rlhf_data.records import (
    FinishReason,
    Prompt,
    Rollout,
    RolloutGroup,
    Span,
    SpanSource,
    Verdict,
    VerdictKind,
)
from rlhf_rollout.protocols import Completion, RewardFunction, RolloutEngine, SamplingParams

Decode = Callable[[np.ndarray], str]

_NUM_ATTEMPTS = 2


@dataclass(frozen=True, slots=True)
class GroupResult:
    """What became of one prompt.

    Attributes:
        group_id: names the group, failed or not.
        prompt: what was asked.
        group: all `num_samples` rollouts; None when generation failed.
        error: why it failed, None otherwise.
        generate_s: seconds from the start of its generation to its end.
        reward_s: seconds until its rewards were there.
    """

    group_id: str
    prompt: Prompt
    group: RolloutGroup | None
    error: str | None = None
    generate_s: float = 0.0
    reward_s: float = 0.0


@dataclass(slots=True)
class GenerationCounts:
    """A running account: `num_requested == num_generated + num_failed` rollouts once all results are out.

    Attributes:
        num_groups: groups returned, whole.
        num_failed_groups: groups returned as failed.
        num_requested: rollouts asked for.
        num_generated: rollouts in whole groups.
        num_failed: rollouts of failed groups.
        num_retries: groups that an engine failed and that were tried again.
        num_response_tokens: tokens written in whole groups.
        verdicts: rollouts by the kind of their verdict; empty without a reward.
        generate_s: seconds from the start to the end of the last generation.
        reward_wait_s: seconds from then to the last reward: what rewards cost beyond what generation hid.
    """

    num_groups: int = 0
    num_failed_groups: int = 0
    num_requested: int = 0
    num_generated: int = 0
    num_failed: int = 0
    num_retries: int = 0
    num_response_tokens: int = 0
    verdicts: Counter[VerdictKind] = field(default_factory=Counter)
    generate_s: float = 0.0
    reward_wait_s: float = 0.0

    def add(self, result: GroupResult, num_samples: int) -> None:
        """Account for one result."""
        if result.group is None:
            self.num_failed_groups += 1
            self.num_failed += num_samples
            return
        self.num_groups += 1
        self.num_generated += len(result.group.rollouts)
        for rollout in result.group.rollouts:
            self.num_response_tokens += rollout.num_response_tokens
            if rollout.verdict is not None:
                self.verdicts[rollout.verdict.kind] += 1


async def generate_groups(
    prompts: Iterable[Prompt],
    engines: Sequence[RolloutEngine],
    sampling: SamplingParams,
    reward: RewardFunction | None,
    *,
    max_in_flight: int,
    group_id_prefix: str,
    decode: Decode,
    counts: GenerationCounts | None = None,
) -> AsyncIterator[GroupResult]:
    """Yield one result a prompt, in the order in which they finish.

    A prompt goes to the engine with the fewest groups running. A group is whole or failed: when an engine raises,
    aborts or returns too few completions, the prompt is tried once more, on another engine if there is one, and then
    reported as failed with the reason. A failing reward is a verdict of its rollouts.

    Args:
        prompts: read as they are needed; may be endless.
        engines: at least one; one that has just failed is used again only when all have.
        sampling: for every prompt. Its seed, if any, is mixed with the group id, so that groups differ.
        reward: None leaves the rollouts without verdicts.
        max_in_flight: groups that generate at once; as many again may wait for their rewards.
        group_id_prefix: unique in a run, such as "step-3"; groups are `<prefix>/<number>`, rollouts `<group>/<number>`.
        decode: the text of a response from its token ids, a stop token included.
        counts: updated as results come.

    Raises:
        ConfigError: no engine, or `max_in_flight` below 1.
        RewardError: the reward function cannot run at all.
    """
    if not engines or max_in_flight < 1:
        raise ConfigError(f"{len(engines)} engines and max_in_flight {max_in_flight}: both must be at least 1")
    run = _Run(engines, sampling, reward, decode, counts or GenerationCounts(), asyncio.Semaphore(max_in_flight))
    numbered = enumerate(prompts)
    tasks: set[asyncio.Task[GroupResult]] = set()
    try:
        while True:
            for index, prompt in itertools.islice(numbered, 2 * max_in_flight - len(tasks)):
                run.counts.num_requested += sampling.num_samples
                tasks.add(asyncio.create_task(run.group(f"{group_id_prefix}/{index}", prompt)))
            if not tasks:
                return
            done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for result in [task.result() for task in done]:
                run.counts.add(result, sampling.num_samples)
                yield result
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Run:
    """What the tasks of one `generate_groups` share."""

    def __init__(
        self,
        engines: Sequence[RolloutEngine],
        sampling: SamplingParams,
        reward: RewardFunction | None,
        decode: Decode,
        counts: GenerationCounts,
        slots: asyncio.Semaphore,
    ) -> None:
        self.engines = engines
        self.sampling = sampling
        self.reward = reward
        self.decode = decode
        self.counts = counts
        self.slots = slots
        self.started = time.monotonic()
        self.num_running = [0] * len(engines)
        self.num_failures = [0] * len(engines)  # in a row

    async def group(self, group_id: str, prompt: Prompt) -> GroupResult:
        """Generate and score one group."""
        async with self.slots:
            started = time.monotonic()
            completions, error = await self._completions(group_id, prompt)
            generated = time.monotonic()
            self.counts.generate_s = generated - self.started
        if completions is None:
            return GroupResult(group_id, prompt, None, error, generated - started)
        rollouts = tuple(
            self._rollout(group_id, index, prompt, completion) for index, completion in enumerate(completions)
        )
        if self.reward is not None:
            verdicts = await self._verdicts(self.reward, prompt, rollouts)
            rollouts = tuple(
                dataclasses.replace(rollout, verdict=verdict)
                for rollout, verdict in zip(rollouts, verdicts, strict=True)
            )
        scored = time.monotonic()
        self.counts.reward_wait_s = max(0.0, scored - self.started - self.counts.generate_s)
        group = RolloutGroup(group_id, prompt, rollouts)
        return GroupResult(group_id, prompt, group, None, generated - started, scored - generated)

    async def _completions(self, group_id: str, prompt: Prompt) -> tuple[list[Completion] | None, str | None]:
        sampling = self.sampling
        if sampling.seed is not None:
            sampling = dataclasses.replace(sampling, seed=zlib.crc32(f"{sampling.seed}:{group_id}".encode()) >> 1)
        errors, failed = [], None
        for attempt in range(_NUM_ATTEMPTS):
            self.counts.num_retries += attempt
            index = self._pick(failed)
            self.num_running[index] += 1
            try:
                completions = await self.engines[index].generate(prompt.token_ids, sampling)
                _check_whole(completions, sampling)
            except Exception as error:  # an engine is another process, maybe another machine: it may raise anything
                self.num_failures[index] += 1
                errors.append(f"engine {index}: {type(error).__name__}: {error}")
                failed = index
            else:
                self.num_failures[index] = 0
                return completions, None
            finally:
                self.num_running[index] -= 1
        return None, "; ".join(errors)

    def _pick(self, failed: int | None) -> int:
        """Return the engine to use: not the one that failed, none with failures if possible, the least loaded."""
        indices = [index for index in range(len(self.engines)) if index != failed] or [failed]
        return min(indices, key=lambda index: (self.num_failures[index], self.num_running[index], index))

    def _rollout(self, group_id: str, index: int, prompt: Prompt, completion: Completion) -> Rollout:
        policy = Span(SpanSource.POLICY, completion.token_ids, completion.logprobs, completion.policy_version)
        spans = (Span(SpanSource.PROMPT, prompt.token_ids), policy)
        text = self.decode(policy.token_ids)
        return Rollout(f"{group_id}/{index}", group_id, spans, completion.finish_reason, text)

    async def _verdicts(self, reward: RewardFunction, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Verdict]:
        try:
            verdicts = await reward.score(prompt, rollouts)
        except RewardError:
            raise
        except Exception as error:  # any implementation of the Protocol, a user's too
            return [Verdict(VerdictKind.CRASH, detail=f"{type(error).__name__}: {error}")] * len(rollouts)
        if len(verdicts) != len(rollouts):
            detail = f"{len(verdicts)} verdicts for {len(rollouts)} rollouts"
            return [Verdict(VerdictKind.CRASH, detail=detail)] * len(rollouts)
        return list(verdicts)


def _check_whole(completions: Sequence[Completion], sampling: SamplingParams) -> None:
    if len(completions) != sampling.num_samples:
        raise EngineError(f"{len(completions)} completions instead of {sampling.num_samples}")
    aborted = sum(completion.finish_reason is FinishReason.ABORT for completion in completions)
    if aborted:
        raise EngineError(f"{aborted} of {sampling.num_samples} completions were aborted")
