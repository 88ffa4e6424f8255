"""Turns prompts into scored rollout groups: a bounded number at once, complete groups, scoring while others run."""

import asyncio
import dataclasses
import itertools
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rlhf_data.errors import ConfigError, EngineError
from rlhf_data.records import Episode, Prompt, Rollout, RolloutGroup, VerdictKind
from rlhf_rollout.agents.base import Workflow
from rlhf_rollout.protocols import RewardFunction, SamplingParams
from rlhf_rollout.rewards.mix import expect_group, score_each


@dataclass(frozen=True, slots=True)
class GroupResult:
    """The outcome of one prompt.

    Attributes:
        group_id: id of the group, also of a failed one.
        prompt: the prompt.
        group: all episodes; None when generation failed.
        failure: why generation failed; None when it did not.
    """

    group_id: str
    prompt: Prompt
    group: RolloutGroup | None
    failure: str | None = None


@dataclass(slots=True)
class GenerationCounts:
    """Counts of one call of `generate_groups`; at its end `num_requested == num_generated + num_failed`.

    Attributes:
        num_groups: complete groups returned.
        num_failed_groups: failed groups returned.
        num_requested: episodes requested.
        num_generated: episodes in complete groups.
        num_failed: episodes of failed groups.
        num_retries: requests that were sent again after an engine failed, since the start of the call.
        num_response_tokens: response tokens in complete groups.
        cached_share: share of all prompt tokens that was in the engines' caches; None if no engine says.
        drafts: drafts of engines that their models checked, their tokens, and the accepted ones of these.
        verdicts: number of rollouts per kind of verdict; empty without a reward.
        num_scored_groups: groups of which the reward has scored a rollout; a workflow may give verdicts of its own.
        generate_s: seconds from the start of the call to the end of the last generation.
        score_s: seconds from the start of the call to the last reward.
        waiting: what each group in flight waits for, "an engine" or "its reward", and since when by the clock of the
            event loop.
        on_wait: called with a group's id and what it waits for, when that begins.
    """

    num_groups: int = 0
    num_failed_groups: int = 0
    num_requested: int = 0
    num_generated: int = 0
    num_failed: int = 0
    num_retries: int = 0
    num_response_tokens: int = 0
    cached_share: float | None = None
    drafts: tuple[int, int, int] = (0, 0, 0)
    verdicts: Counter[VerdictKind] = field(default_factory=Counter)
    num_scored_groups: int = 0
    generate_s: float = 0.0
    score_s: float = 0.0
    waiting: dict[str, tuple[str, float]] = field(default_factory=dict)
    on_wait: Callable[[str, str], None] = lambda group_id, what: None

    def wait(self, group_id: str, what: str) -> None:
        """Note what a group waits for from now on."""
        self.waiting[group_id] = what, asyncio.get_running_loop().time()
        self.on_wait(group_id, what)

    @property
    def reward_wait_s(self) -> float:
        """Seconds from the last generation to the last reward: the part of scoring that did not overlap generation."""
        return max(0.0, self.score_s - self.generate_s)

    def add(self, result: GroupResult, num_samples: int) -> None:
        """Count one result."""
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

    A group is complete or failed: when the workflow raises, or returns another number of episodes than requested, the
    result of the prompt is a failure with its reason. A failing reward gives its rollouts failed verdicts. Closing the
    iterator cancels the groups in flight.

    Args:
        prompts: read as needed, so they may be endless.
        workflow: turns each prompt into `sampling.num_samples` episodes.
        sampling: for every prompt. Its seed, if any, is mixed with `seed_key`, so that groups differ.
        reward: None leaves the rollouts without verdicts.
        max_in_flight: groups that generate at once. The same number may wait for their rewards in addition.
        group_id_prefix: unique in a run, such as "step-3"; group ids are `<prefix>/<number>`.
        seed_key: mixed into the sampling seed together with the group's number; None for `group_id_prefix`. Calls with
            the same key use the same seeds, so that two policies can be compared.
        counts: updated with every result.
        settle: called with every result before it is yielded.
        skip: numbers of the groups that an earlier run finished. The other groups keep their numbers and seeds.

    Raises:
        ConfigError: no engine is attached, or `max_in_flight` is below 1.
        RewardError: the reward function cannot run at all.
    """
    num_engines = len(workflow.router.engines)
    if not num_engines or max_in_flight < 1:
        raise ConfigError(f"{num_engines} engines and max_in_flight {max_in_flight}: both must be at least 1")
    maker = GroupMaker(workflow, sampling, reward, counts or GenerationCounts(), pool=group_id_prefix)
    slots = asyncio.Semaphore(max_in_flight)
    numbered = filter(lambda pair: pair[0] not in skip, enumerate(prompts))
    seed_key = group_id_prefix if seed_key is None else seed_key
    num_retries = workflow.router.num_retries
    prompt_tokens = workflow.router.prompt_tokens.copy()
    drafts = workflow.router.drafts.copy()
    tasks: set[asyncio.Task[GroupResult]] = set()
    done: list[asyncio.Task[GroupResult]] = []
    # `asyncio.wait` would look at every group in flight each time that one is complete.
    completed: asyncio.Queue[asyncio.Task[GroupResult]] = asyncio.Queue()
    try:
        while True:
            # The slots let half of these tasks generate; the others may wait for their rewards.
            for index, prompt in itertools.islice(numbered, 2 * max_in_flight - len(tasks)):
                maker.counts.num_requested += sampling.num_samples
                number = f"{index:05d}"
                group = _in_slot(slots, maker, f"{group_id_prefix}/{number}", prompt, f"{seed_key}/{number}")
                task = asyncio.create_task(group)
                task.add_done_callback(completed.put_nowait)
                tasks.add(task)
            if not tasks:
                return
            done = [await completed.get()]
            while not completed.empty():
                done.append(completed.get_nowait())
            tasks.difference_update(done)
            maker.counts.num_retries = workflow.router.num_retries - num_retries
            num_prompt_tokens, num_cached = workflow.router.prompt_tokens - prompt_tokens
            maker.counts.cached_share = float(num_cached / num_prompt_tokens) if num_prompt_tokens else None
            maker.counts.drafts = tuple((workflow.router.drafts - drafts).tolist())
            for result in [task.result() for task in done]:
                maker.counts.add(result, sampling.num_samples)
                if settle is not None:
                    settle(result)
                yield result
    finally:
        for task in tasks:
            task.cancel()
        # Collects the errors of all tasks: asyncio would report those behind the first one as never retrieved.
        await asyncio.gather(*done, *tasks, return_exceptions=True)


async def _in_slot(slots: asyncio.Semaphore, maker: "GroupMaker", *group: Any) -> GroupResult:
    await slots.acquire()
    return await maker.make(*group, generated=slots.release)


@dataclass(slots=True)
class GroupMaker:
    """Makes rollout groups, each from one prompt.

    Attributes:
        workflow, sampling, reward: see `generate_groups`.
        counts: what groups wait for, and the seconds of generation and rewards, are noted here.
        started: where those seconds begin, by the clock of the event loop.
        pool: see `expect_group`.
    """

    workflow: Workflow
    sampling: SamplingParams
    reward: RewardFunction | None
    counts: GenerationCounts
    started: float = field(default_factory=lambda: asyncio.get_running_loop().time())
    pool: str = ""

    async def make(
        self, group_id: str, prompt: Prompt, seed_key: str, *, generated: Callable[[], None] = lambda: None
    ) -> GroupResult:
        """Generate and score one group. `generated` is called between the two, also when generation fails."""
        expect_group(self.reward, group_id, self.pool)
        try:
            return await self._make(group_id, prompt, seed_key, generated)
        finally:
            expect_group(self.reward, group_id, None)
            self.workflow.router.unfinished.forget(group_id)

    async def _make(self, group_id: str, prompt: Prompt, seed_key: str, generated: Callable[[], None]) -> GroupResult:
        now = asyncio.get_running_loop().time
        sampling = self.sampling
        if sampling.seed is not None:
            # CRC-32 because Python's own hash of a text differs between processes.
            sampling = dataclasses.replace(sampling, seed=zlib.crc32(f"{sampling.seed}:{seed_key}".encode()) >> 1)
        self.counts.wait(group_id, "an engine")
        try:
            episodes = await self.workflow.run(prompt, sampling, group_id)
            if len(episodes) != sampling.num_samples:
                raise EngineError(f"the workflow made {len(episodes)} episodes instead of {sampling.num_samples}")
        except EngineError as error:
            return GroupResult(group_id, prompt, None, str(error))
        except Exception as error:  # a user's workflow may raise anything: this group fails, not the run
            return GroupResult(group_id, prompt, None, f"{type(error).__name__}: {error}")
        finally:
            self.counts.generate_s = now() - self.started
            del self.counts.waiting[group_id]
            generated()
        if self.reward is not None and any(episode.verdict is None for episode in episodes):
            self.counts.wait(group_id, "its reward")
            self.counts.num_scored_groups += 1
            try:
                episodes = await _score(self.reward, prompt, episodes)
            finally:
                del self.counts.waiting[group_id]
        self.counts.score_s = now() - self.started
        return GroupResult(group_id, prompt, RolloutGroup(group_id, prompt, episodes))


def with_extra(group: RolloutGroup, numbers: Mapping[str, float]) -> RolloutGroup:
    """Return a group whose verdicts have further numbers to log."""

    def more(rollout: Rollout) -> Rollout:
        if rollout.verdict is None:
            return rollout
        verdict = dataclasses.replace(rollout.verdict, extra={**rollout.verdict.extra, **numbers})
        return dataclasses.replace(rollout, verdict=verdict)

    episodes = [dataclasses.replace(episode, rollouts=tuple(map(more, episode.rollouts))) for episode in group.episodes]
    return dataclasses.replace(group, episodes=tuple(episodes))


async def _score(reward: RewardFunction, prompt: Prompt, episodes: tuple[Episode, ...]) -> tuple[Episode, ...]:
    """Return the episodes with verdicts. One call scores all rollouts to which the workflow has given none."""
    bare = [rollout for episode in episodes for rollout in episode.rollouts if rollout.verdict is None]
    verdicts = iter(await score_each(reward, prompt, bare))
    scored = []
    for episode in episodes:
        rollouts = tuple(
            rollout if rollout.verdict else dataclasses.replace(rollout, verdict=next(verdicts))
            for rollout in episode.rollouts
        )
        scored.append(dataclasses.replace(episode, rollouts=rollouts))
    return tuple(scored)
