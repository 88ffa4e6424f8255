"""Prompts in, scored groups of rollouts out: bounded in flight, whole groups only, rewards while others generate."""

import asyncio
import dataclasses
import itertools
import time
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from rlhf_data.errors import ConfigError, EngineError
from rlhf_data.records import Episode, FinishReason, Prompt, Rollout, RolloutGroup, Span, SpanSource, VerdictKind
from rlhf_rollout.protocols import Completion, RewardFunction, RolloutEngine, SamplingParams
from rlhf_rollout.rewards.mix import score_each

Decode = Callable[[np.ndarray], str]

_NUM_ATTEMPTS = 2


@dataclass(frozen=True, slots=True)
class GroupResult:
    """What became of one prompt.

    Attributes:
        group_id: names the group, failed or not.
        prompt: what was asked.
        group: all `num_samples` rollouts; None when generation failed.
        failure: why it failed, None otherwise.
    """

    group_id: str
    prompt: Prompt
    group: RolloutGroup | None
    failure: str | None = None


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
        generate_s: seconds from the start of the call to the end of its last generation.
        score_s: seconds from the start of the call to its last reward.
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
    score_s: float = 0.0

    @property
    def reward_wait_s(self) -> float:
        """Seconds from the last generation to the last reward: what rewards cost beyond what generation hid."""
        return max(0.0, self.score_s - self.generate_s)

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


class PromptSupply:
    """Prompts for as many groups as are to be kept: each group that is not kept makes room for one prompt more.

    Hands out a prompt while kept + under way < target, up to `max_drawn`. So the last prompt drawn is the first one
    with which there can be `target` groups: which prompts are drawn, and which groups are kept, depends on what the
    groups are and not on the order in which they finish. For `generate_groups`, with `settle` as its `settle`.

    Args:
        draw: the next prompt; StopIteration when there is none.
        target: groups to keep.
        max_drawn: prompts to draw at most.
        keep: whether a group is kept; a failed one never is.

    Attributes:
        num_drawn, num_kept, num_rejected, num_failed: prompts and what became of them; drawn less the others are under
            way.

    Raises:
        ConfigError: `target` below 1 or above `max_drawn`.
    """

    def __init__(
        self, draw: Callable[[], Prompt], target: int, max_drawn: int, keep: Callable[[RolloutGroup], bool]
    ) -> None:
        if not 1 <= target <= max_drawn:
            raise ConfigError(f"{target} groups to keep of at most {max_drawn} drawn: 1 <= target <= max_drawn")
        self._draw = draw
        self._target = target
        self._max_drawn = max_drawn
        self._keep = keep
        self.num_drawn = self.num_kept = self.num_rejected = self.num_failed = 0

    def __iter__(self) -> Iterator[Prompt]:
        return self

    def __next__(self) -> Prompt:
        num_lost = self.num_rejected + self.num_failed
        if self.num_drawn - num_lost >= self._target or self.num_drawn >= self._max_drawn:
            raise StopIteration  # for now: the next result may make room
        prompt = self._draw()
        self.num_drawn += 1
        return prompt

    def settle(self, result: GroupResult) -> bool:
        """Account for the result of a prompt handed out; return whether it is kept."""
        kept = result.group is not None and self._keep(result.group)
        self.num_kept += kept
        self.num_failed += result.group is None
        self.num_rejected += result.group is not None and not kept
        return kept


async def generate_groups(
    prompts: Iterable[Prompt],
    engines: Sequence[RolloutEngine],
    sampling: SamplingParams,
    reward: RewardFunction | None,
    *,
    max_in_flight: int,
    group_id_prefix: str,
    decode: Decode,
    seed_key: str | None = None,
    counts: GenerationCounts | None = None,
    settle: Callable[[GroupResult], object] | None = None,
    skip: Container[int] = (),
) -> AsyncIterator[GroupResult]:
    """Yield one result a prompt, in the order in which they finish.

    A prompt goes to the engine with the fewest groups running. A group is whole or failed: when an engine raises,
    aborts or returns too few completions, the prompt is tried once more, on another engine if there is one, and then
    reported as failed with the reason. A failing reward is a verdict of its rollouts.

    Args:
        prompts: read as they are needed, may be endless. An iterator that has none is asked again after every result
            until nothing is under way, so it may have more by then: see `PromptSupply`.
        engines: at least one; one that has just failed is used again only when all have.
        sampling: for every prompt. Its seed, if any, is mixed with `seed_key`, so that groups differ.
        reward: None leaves the rollouts without verdicts.
        max_in_flight: groups that generate at once; as many again may wait for their rewards.
        group_id_prefix: unique in a run, such as "step-3"; groups are `<prefix>/<number>`, rollouts `<group>/<number>`.
        decode: the text of a response from its token ids, a stop token included.
        seed_key: what the sampling seed is mixed with besides a group's number; the prefix when None. Calls with one
            key draw alike from one policy, so that a difference between them is the policies'.
        counts: updated as results come.
        settle: told of every result before `prompts` are asked for more and before it is yielded.
        skip: numbers of groups that an earlier run has made; the others get the numbers and seeds they had in it.

    Raises:
        ConfigError: no engine, or `max_in_flight` below 1.
        RewardError: the reward function cannot run at all.
    """
    if not engines or max_in_flight < 1:
        raise ConfigError(f"{len(engines)} engines and max_in_flight {max_in_flight}: both must be at least 1")
    run = _Run(engines, sampling, reward, decode, counts or GenerationCounts(), asyncio.Semaphore(max_in_flight))
    numbered = filter(lambda pair: pair[0] not in skip, enumerate(prompts))
    seed_key = group_id_prefix if seed_key is None else seed_key
    tasks: set[asyncio.Task[GroupResult]] = set()
    done: set[asyncio.Task[GroupResult]] = set()
    try:
        while True:
            for index, prompt in itertools.islice(numbered, 2 * max_in_flight - len(tasks)):
                run.counts.num_requested += sampling.num_samples
                number = f"{index:05d}"
                group = run.group(f"{group_id_prefix}/{number}", prompt, f"{seed_key}/{number}")
                tasks.add(asyncio.create_task(group))
            if not tasks:
                return
            done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for result in [task.result() for task in done]:
                run.counts.add(result, sampling.num_samples)
                if settle is not None:
                    settle(result)
                yield result
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*done, *tasks, return_exceptions=True)  # several may have failed: the first is raised


@dataclass(slots=True)
class _Run:
    """What the tasks of one `generate_groups` share; of each engine how many groups run, and failures in a row."""

    engines: Sequence[RolloutEngine]
    sampling: SamplingParams
    reward: RewardFunction | None
    decode: Decode
    counts: GenerationCounts
    slots: asyncio.Semaphore
    started: float = field(default_factory=time.monotonic)
    num_running: Counter[int] = field(default_factory=Counter)
    num_failures: Counter[int] = field(default_factory=Counter)

    async def group(self, group_id: str, prompt: Prompt, seed_key: str) -> GroupResult:
        """Generate and score one group."""
        async with self.slots:
            written, error = await self._generate(prompt, seed_key)
            self.counts.generate_s = time.monotonic() - self.started
        if error:
            return GroupResult(group_id, prompt, None, error)
        rollouts = tuple(
            Rollout(
                f"{group_id}/{index}",
                group_id,
                (Span(SpanSource.PROMPT, prompt.token_ids), span),
                reason,
                self.decode(span.token_ids),
            )
            for index, (span, reason) in enumerate(written)
        )
        if self.reward is not None:
            verdicts = await score_each(self.reward, prompt, rollouts)
            rollouts = tuple(
                dataclasses.replace(rollout, verdict=verdict)
                for rollout, verdict in zip(rollouts, verdicts, strict=True)
            )
        self.counts.score_s = time.monotonic() - self.started
        episodes = tuple(Episode(rollout.rollout_id, group_id, (rollout,)) for rollout in rollouts)
        return GroupResult(group_id, prompt, RolloutGroup(group_id, prompt, episodes))

    async def _generate(self, prompt: Prompt, seed_key: str) -> tuple[list[tuple[Span, FinishReason]], str]:
        """Return the policy's spans and why each ended, or none and the reason of the failure."""
        sampling = self.sampling
        if sampling.seed is not None:
            sampling = dataclasses.replace(sampling, seed=zlib.crc32(f"{sampling.seed}:{seed_key}".encode()) >> 1)
        errors, failed = [], None
        for attempt in range(_NUM_ATTEMPTS):
            self.counts.num_retries += attempt
            index = self._pick(failed)
            self.num_running[index] += 1
            try:
                completions = await self.engines[index].generate(prompt.token_ids, sampling)
                written = _policy_spans(completions, sampling)
            except Exception as error:  # an engine is another process, maybe another machine: it may raise anything
                self.num_failures[index] += 1
                errors.append(f"engine {index}: {type(error).__name__}: {error}")
                failed = index
            else:
                self.num_failures[index] = 0
                return written, ""
            finally:
                self.num_running[index] -= 1
        return [], "; ".join(errors)

    def _pick(self, failed: int | None) -> int:
        """Return the engine to use: not the one that failed, none with failures if possible, the least loaded."""
        indices = [index for index in range(len(self.engines)) if index != failed] or [failed]
        return min(indices, key=lambda index: (self.num_failures[index], self.num_running[index], index))


def _policy_spans(completions: Sequence[Completion], sampling: SamplingParams) -> list[tuple[Span, FinishReason]]:
    if len(completions) != sampling.num_samples:
        raise EngineError(f"{len(completions)} completions instead of {sampling.num_samples}")
    aborted = sum(completion.finish_reason is FinishReason.ABORT for completion in completions)
    if aborted:
        raise EngineError(f"{aborted} of {sampling.num_samples} completions were aborted")
    return [(Span(SpanSource.POLICY, c.token_ids, c.logprobs, c.policy_version), c.finish_reason) for c in completions]
