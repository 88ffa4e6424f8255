"""Prompts in, scored rollout groups out: bounded in flight, whole groups only, rewards while others generate."""

import asyncio
import dataclasses
import itertools
import time
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field

from rlhf_data.errors import ConfigError, EngineError
from rlhf_data.records import Episode, Prompt, RolloutGroup, VerdictKind
from rlhf_rollout.agents.base import Workflow
from rlhf_rollout.protocols import RewardFunction, SamplingParams
from rlhf_rollout.rewards.mix import score_each


@dataclass(frozen=True, slots=True)
class GroupResult:
    """What became of one prompt.

    Attributes:
        group_id: names the group, failed or not.
        prompt: what was asked.
        group: all episodes; None when generation failed.
        failure: why it failed, None otherwise.
    """

    group_id: str
    prompt: Prompt
    group: RolloutGroup | None
    failure: str | None = None


@dataclass(slots=True)
class GenerationCounts:
    """A running account: `num_requested == num_generated + num_failed` episodes once all results are out.

    Attributes:
        num_groups: groups returned, whole.
        num_failed_groups: groups returned as failed.
        num_requested: episodes asked for.
        num_generated: episodes in whole groups.
        num_failed: episodes of failed groups.
        num_retries: requests that an engine failed and that were sent again, since the start of the call.
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
        self.num_generated += len(result.group.episodes)
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
    workflow: Workflow,
    sampling: SamplingParams,
    reward: RewardFunction | None,
    *,
    max_in_flight: int,
    group_id_prefix: str,
    seed_key: str | None = None,
    counts: GenerationCounts | None = None,
    settle: Callable[[GroupResult], object] | None = None,
    skip: Container[int] = (),
) -> AsyncIterator[GroupResult]:
    """Yield one result per prompt, in the order in which they finish.

    A group is whole or failed: when the workflow raises or returns another number of episodes than were asked for, the
    prompt is reported as failed with the reason. A failing reward is a verdict of its rollouts. Closing the iterator
    cancels what is under way.

    Args:
        prompts: read as they are needed, may be endless. An iterator that has none is asked again after every result
            until nothing is under way, so it may have more by then: see `PromptSupply`.
        workflow: turns each prompt into `sampling.num_samples` episodes.
        sampling: for every prompt. Its seed, if any, is mixed with `seed_key`, so that groups differ.
        reward: None leaves the rollouts without verdicts.
        max_in_flight: groups that generate at once; as many again may wait for their rewards.
        group_id_prefix: unique in a run, such as "step-3"; groups are `<prefix>/<number>`.
        seed_key: what the sampling seed is mixed with besides a group's number; the prefix when None. Calls with one
            key draw alike from one policy, so that a difference between them is the policies'.
        counts: updated as results come.
        settle: told of every result before `prompts` are asked for more and before it is yielded.
        skip: numbers of groups that an earlier run has made; the others get the numbers and seeds they had in it.

    Raises:
        ConfigError: no engine, or `max_in_flight` below 1.
        RewardError: the reward function cannot run at all.
    """
    num_engines = len(workflow.router.engines)
    if not num_engines or max_in_flight < 1:
        raise ConfigError(f"{num_engines} engines and max_in_flight {max_in_flight}: both must be at least 1")
    run = _Run(workflow, sampling, reward, counts or GenerationCounts(), asyncio.Semaphore(max_in_flight))
    numbered = filter(lambda pair: pair[0] not in skip, enumerate(prompts))
    seed_key = group_id_prefix if seed_key is None else seed_key
    num_retries = workflow.router.num_retries
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
            run.counts.num_retries = workflow.router.num_retries - num_retries
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
    """What the tasks of one `generate_groups` share."""

    workflow: Workflow
    sampling: SamplingParams
    reward: RewardFunction | None
    counts: GenerationCounts
    slots: asyncio.Semaphore
    started: float = field(default_factory=time.monotonic)

    async def group(self, group_id: str, prompt: Prompt, seed_key: str) -> GroupResult:
        """Generate and score one group."""
        sampling = self.sampling
        if sampling.seed is not None:
            sampling = dataclasses.replace(sampling, seed=zlib.crc32(f"{sampling.seed}:{seed_key}".encode()) >> 1)
        async with self.slots:
            try:
                episodes = await self.workflow.run(prompt, sampling, group_id)
                if len(episodes) != sampling.num_samples:
                    raise EngineError(f"the workflow made {len(episodes)} episodes instead of {sampling.num_samples}")
            except EngineError as error:
                return GroupResult(group_id, prompt, None, str(error))
            except Exception as error:  # a workflow may be a user's: its fault costs this group and not the run
                return GroupResult(group_id, prompt, None, f"{type(error).__name__}: {error}")
            finally:
                self.counts.generate_s = time.monotonic() - self.started
        if self.reward is not None:
            episodes = await _score(self.reward, prompt, episodes)
        self.counts.score_s = time.monotonic() - self.started
        return GroupResult(group_id, prompt, RolloutGroup(group_id, prompt, episodes))


async def _score(reward: RewardFunction, prompt: Prompt, episodes: tuple[Episode, ...]) -> tuple[Episode, ...]:
    """Return the episodes with the verdicts of one call for all of their rollouts."""
    verdicts = iter(await score_each(reward, prompt, [rollout for episode in episodes for rollout in episode.rollouts]))
    scored = []
    for episode in episodes:
        rollouts = tuple(dataclasses.replace(rollout, verdict=next(verdicts)) for rollout in episode.rollouts)
        scored.append(dataclasses.replace(episode, rollouts=rollouts))
    return tuple(scored)
