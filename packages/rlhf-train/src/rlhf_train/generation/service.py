"""Generation as a service: prompts become scored rollout groups on an event loop, as far as the stream admits them."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rlhf_data.errors import EngineError
from rlhf_data.records import Prompt, RolloutGroup
from rlhf_data.sampler import EpochSampler
from rlhf_rollout.agents.base import Workflow
from rlhf_rollout.generator import GenerationCounts, GroupMaker, GroupResult, generate_groups, with_extra
from rlhf_rollout.protocols import RewardFunction
from rlhf_rollout.records_io import parse_group
from rlhf_train.generation.baseline import GREEDY_REWARD
from rlhf_train.generation.difficulty import DifficultyPool, verdict_kinds
from rlhf_train.generation.mixing import MixSpec, SourceMix
from rlhf_train.generation.reuse import SolvedAnswers
from rlhf_train.generation.run_spec import GenerationSpec
from rlhf_train.generation.scoring import is_worth_training
from rlhf_train.generation.stream import SampleStream, Ticket
from rlhf_train.run.checkpoint import check_rows
from rlhf_train.tracing.trace import Trace

_DOING = {"an engine": "generated", "its reward": "scored"}  # a group, by what it waits for
_EVALUATION_SHARE = 4  # one of so many groups in flight is an evaluation's while it runs beside rollouts


@dataclass(frozen=True, slots=True)
class Drawn:
    """A batch, and what else happened since the one before.

    Attributes:
        kept: the groups of the batch.
        stale: groups that are left out of it; see `SampleStream.take`.
        dropped: complete groups that dynamic sampling leaves out of training.
        num_requested: episodes requested.
        num_failed: episodes of groups that an engine or agent failed.
        failure: why the last of the failed groups failed; "" without one.
        num_retries: requests that were sent again after an engine failed.
        cached_share: share of all prompt tokens that was in the engines' caches; None if no engine says.
        drafts: drafts of engines that their models checked, their tokens, and the accepted ones of these.
        reward_wait_s: seconds from the last generation to the last reward, while nothing was generated.
        has_scored: whether the reward has scored a group of this process's run, if there was any; agents may give
            rewards of their own.
        overlap: metrics of a run in which generation goes on while the learner works.
        pool: metrics of prompts, or their sources, that are drawn by pass rates, and of answers that are reused.
        batch: the groups to train on: those of `kept`, some with an older answer in the place of a wrong one.
        notices: what a person may want to know of these prompts.
    """

    kept: tuple[RolloutGroup, ...]
    stale: tuple[RolloutGroup, ...]
    dropped: tuple[RolloutGroup, ...]
    num_requested: int
    num_failed: int
    failure: str = ""
    num_retries: int = 0
    cached_share: float | None = None
    drafts: tuple[int, int, int] = (0, 0, 0)
    reward_wait_s: float = 0.0
    has_scored: bool = True
    overlap: Mapping[str, float] = field(default_factory=dict)
    pool: Mapping[str, float] = field(default_factory=dict)
    notices: Sequence[str] = ()
    batch: tuple[RolloutGroup, ...] = ()

    @property
    def groups(self) -> tuple[RolloutGroup, ...]:
        """All groups that an engine completed and that were not counted before."""
        return (*self.kept, *self.stale, *self.dropped)


@dataclass(eq=False, repr=False)
class GenerationService:
    """Keeps admitting prompts, generating and scoring their groups, and putting them into the stream.

    With staleness allowed, it works while the learner does. Without, it admits prompts only during `next_batch`.
    With dynamic sampling, each group that is not worth training makes room for another prompt. Use it from one event
    loop.

    Attributes:
        job: the run.
        workflow: turns prompts into episodes.
        reward: scores them.
        stream: admits prompts and holds complete groups.
        progress: is told the number of complete groups that wait for the next batch, and the size of a batch.
        settled: is told the id of each group that needs no more generation, and the group if it will be trained.
        greedy_baseline: give the verdicts of each group the reward of a greedy response (`baseline.GREEDY_REWARD`).
            That response is not trained, and no count has it.
        num_outstanding: episodes that were in flight or waited for a later batch when the last batch was taken.
    """

    job: GenerationSpec
    workflow: Workflow
    reward: RewardFunction
    stream: SampleStream
    progress: Callable[[int, int], None]
    settled: Callable[[str, RolloutGroup | None], None] = lambda group_id, group: None
    greedy_baseline: bool = False
    num_outstanding: int = 0

    def __post_init__(self) -> None:
        job = self.job
        num_prompts = len(job.prompts)
        self._pool: DifficultyPool | SourceMix | None = None
        if isinstance(job.difficulty, MixSpec):
            self._pool = SourceMix([prompt.source for prompt in job.prompts], job.difficulty, seed=job.seed)
        elif job.difficulty is not None:
            self._pool = DifficultyPool(num_prompts, job.difficulty, seed=job.seed)
        self._sampler = self._pool or EpochSampler(num_prompts, job.batch.rollout_batch_size, seed=job.seed)
        self._solved = SolvedAnswers(job.reuse) if job.reuse else None
        self._runs_ahead = job.max_staleness > 0
        self._limit = job.max_in_flight  # groups that generate at once
        self._num_generating = 0
        self._interrupted: list[Ticket] = []  # prompts that another process had in flight, the next one last
        self._change = asyncio.Event()  # something has happened that admission or the next batch may wait for
        self._tasks: set[asyncio.Task[None]] = set()
        self._error: BaseException | None = None  # of a task
        self._is_started = False
        self._is_open = False  # prompts may be admitted
        self._num_allowed = 0  # prompts that may still be admitted before the next batch is done
        self._counts = GenerationCounts()  # of the run; its seconds are those since the last batch
        self._trace = Trace(is_on=False)
        self._in_training: list[str] = []  # groups of the last batch, by id
        # Since the last batch:
        self._num_requested = self._num_failed = 0  # groups
        self._failure = ""
        self._dropped: list[RolloutGroup] = []

    def show_in(self, trace: Trace) -> None:
        """Have a file show what happens to each group from its admission to its training."""
        self._trace = trace
        self._counts.on_wait = lambda group_id, what: trace.group(group_id, _DOING[what], **{"waits for": what})

    # -- generation ----------------------------------------------------------------------------------------------------

    async def next_batch(self) -> Drawn:
        """Wait for the next batch and return it.

        A batch is short when the limit of prompts per batch is reached, or at the end of a run. Raises EngineError when
        there is no group at all.
        """
        self._is_open = True
        self._start()
        if not self._runs_ahead:
            self._start_clock()  # what came before was an evaluation
        self._change.set()
        try:
            while not self.stream.is_ready(can_grow=self.stream.num_in_flight > 0 or self._has_room):
                await self._changed()
        except BaseException:
            await self.close()  # engines that shall sleep must not have requests in flight
            raise
        self._is_open = self._runs_ahead
        return self._take()

    def release(self, policy_version: int) -> None:
        """Record that the learner is done with the last batch, if it has one, and that the engines have its weights."""
        if self.stream.is_being_trained:
            self.stream.done(policy_version)
            for group_id in self._in_training:
                self._trace.group(group_id, None)
            self._allow()
            self._change.set()

    async def answer_held_out(self, step: int, settle: Callable[[GroupResult], None]) -> list[GroupResult]:
        """Return the results of the held-out prompts, in their order.

        Every call uses the same sampling seeds. Differences between two evaluations then come from the policy and not
        from the draw.
        """

        def end(result: GroupResult) -> None:
            self._trace.group(result.group_id, None)
            settle(result)

        job = self.job
        limit = job.max_in_flight
        share = max(limit // _EVALUATION_SHARE, 1) if self._runs_ahead else limit
        # The limit is one of groups to train on, which may have more or fewer episodes.
        num_episodes = share * job.sampling.num_samples
        groups = generate_groups(
            job.eval_prompts,
            self.workflow,
            job.eval_sampling,
            self.reward,
            max_in_flight=max(num_episodes // job.eval_sampling.num_samples, 1),
            group_id_prefix=f"eval{step}",
            seed_key="eval",
            settle=end,
            counts=GenerationCounts(waiting=self._counts.waiting, on_wait=self._counts.on_wait),
        )
        self._limit = limit - share
        try:
            results = [result async for result in groups]
        finally:
            self._limit = limit
            self._change.set()
        # Groups arrive in the order in which they finish, which varies from run to run.
        return sorted(results, key=lambda result: int(result.group_id.rpartition("/")[2]))

    async def close(self) -> None:
        """Cancel everything in flight, and wait for its end."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def waiting(self) -> Mapping[str, tuple[str, float]]:
        """What each group in flight waits for; see `GenerationCounts`. Other threads may read it."""
        return self._counts.waiting.copy()

    # -- state ---------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the place in the order of prompts, the stream, and what was counted since the last batch."""
        return {
            "order": self._sampler.state_dict(),
            "prompts": self.job.prompts_digest,
            "stream": self.stream.state(),
            "unfinished": self.workflow.router.unfinished.state(ticket.group_id for ticket in self.stream.in_flight()),
            "num_outstanding": self.num_outstanding,
            "num_requested": self._num_requested,
            "num_failed": self._num_failed,
            "failure": self._failure,
            "dropped": list(self._dropped),
            "solved": self._solved.state() if self._solved is not None else None,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where another process was. Raises CheckpointError for other prompts or another seed."""
        self._sampler.load_state_dict(state["order"])
        check_rows(state.get("prompts", ""), self.job.prompts_digest)
        tickets = [
            Ticket(*rest, None if group is None else _group(group)) for *rest, group in state["stream"]["tickets"]
        ]
        self.stream.restore(state["stream"], tickets)
        self.workflow.router.unfinished.restore(state.get("unfinished", {}))
        self.num_outstanding = state["num_outstanding"]
        self._num_requested = state["num_requested"]
        self._num_failed = state["num_failed"]
        self._failure = state["failure"]
        self._dropped = [_group(group) for group in state["dropped"]]
        if self._solved is not None and state.get("solved"):
            self._solved.restore(state["solved"])

    # -- internals -----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Begin to admit prompts, and generate the groups that another process had in flight."""
        if self._is_started:
            return
        self._is_started = True
        self._start_clock()
        self._allow()
        self._interrupted = self.stream.in_flight()[::-1]
        self._spawn(self._admit())

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._error = self._error or task.exception()
        self._change.set()

    async def _changed(self) -> None:
        """Wait for the next change. Raises the error of a task that could not go on."""
        if self._error is not None:
            raise self._error
        self._change.clear()
        await self._change.wait()
        if self._error is not None:
            raise self._error

    def _allow(self) -> None:
        """Limit the prompts that are admitted until the next batch is done: they may all fail or be left out."""
        dynamic = self.job.dynamic_sampling
        self._num_allowed = self.stream.room * (dynamic.max_batches if dynamic else 1)

    @property
    def _has_room(self) -> bool:
        return self._num_allowed > 0 and self.stream.room > 0

    async def _admit(self) -> None:
        """Admit prompts, each when there is room for it and its group can generate at once."""
        while True:
            while self._num_generating < self._limit and (ticket := self._next_ticket()) is not None:
                self._num_generating += 1
                self._spawn(self._make(ticket))
            await self._changed()

    def _next_ticket(self) -> Ticket | None:
        if self._interrupted:
            return self._interrupted.pop()
        if not self._is_open or not self._has_room:
            return None
        self._num_allowed -= 1
        self._num_requested += 1
        return self.stream.admit(int(self._sampler.take(1)[0]))

    def _generated(self) -> None:
        self._num_generating -= 1
        self._change.set()

    async def _make(self, ticket: Ticket) -> None:
        """Generate and score the group of an admitted prompt."""
        maker = GroupMaker(self.workflow, self.job.sampling, self.reward, self._counts, started=0.0)
        prompt = self.job.prompts[ticket.item]
        made = maker.make(ticket.group_id, prompt, ticket.group_id, generated=self._generated)
        result = await (self._beside_greedy(made, ticket.group_id, prompt) if self.greedy_baseline else made)
        dynamic = self.job.dynamic_sampling  # without it, all groups are trained
        trained = self._solved.filled(result.group) if self._solved and result.group else result.group
        is_kept = trained is not None and (dynamic is None or is_worth_training(trained, dynamic))
        kept = result.group if is_kept else None
        if kept is not None:
            self.stream.put(ticket, kept)
            self._trace.group(ticket.group_id, "queued", **{"waits for": "a batch"})
        else:
            self.stream.leave_out(ticket)
            self._trace.group(ticket.group_id, None, end="failed" if result.group is None else "filtered")
        if result.group is None:
            self._num_failed += 1
            self._failure = result.failure or ""
        else:
            self._counts.num_groups += 1
            if self._pool is not None:
                self._pool.observe(ticket.number, ticket.item, verdict_kinds(result.group))
            if kept is None:
                self._dropped.append(result.group)
        self.settled(ticket.group_id, trained if is_kept else None)
        self.progress(min(self.stream.num_queued, self.stream.batch_size), self.stream.batch_size)

    async def _beside_greedy(
        self, made: Coroutine[Any, Any, GroupResult], group_id: str, prompt: Prompt
    ) -> GroupResult:
        """Return a group whose verdicts hold the reward of the greedy response, which is made and scored meanwhile."""
        sampling = replace(self.job.sampling, num_samples=1, temperature=0.0)
        maker = GroupMaker(self.workflow, sampling, self.reward, GenerationCounts(), started=0.0)
        result, greedy = await asyncio.gather(made, maker.make(f"{group_id}/greedy", prompt, group_id))
        rollouts = greedy.group.rollouts if greedy.group is not None else ()
        rewards = [rollout.verdict.reward for rollout in rollouts if rollout.verdict is not None]
        if result.group is None or not rewards or None in rewards:
            reason = f"the greedy response has no reward: {greedy.failure or 'its scorer has failed or abstained'}"
            return replace(result, group=None, failure=result.failure or reason)
        reward = sum(rewards) / len(rewards)
        return replace(result, group=with_extra(result.group, {GREEDY_REWARD: reward}))

    def _take(self) -> Drawn:
        num_samples = self.job.sampling.num_samples
        fresh, stale = self.stream.take()
        self._in_training = [group.group_id for group in (*fresh, *stale)]
        for group_id in self._in_training:
            self._trace.group(group_id, "trained")
        self.num_outstanding = (self.stream.num_queued + self.stream.num_in_flight) * num_samples
        counts = self._counts
        router = self.workflow.router
        num_prompt_tokens, num_cached = router.prompt_tokens - self._prompt_tokens
        pool, notices = self._pool.settle() if self._pool is not None else ({}, [])
        batch, reuse = self._solved.settle(fresh, self._dropped) if self._solved is not None else (fresh, {})
        drawn = Drawn(
            kept=tuple(fresh),
            stale=tuple(stale),
            dropped=tuple(self._dropped),
            num_requested=self._num_requested * num_samples,
            num_failed=self._num_failed * num_samples,
            failure=self._failure,
            num_retries=router.num_retries - self._num_retries,
            cached_share=float(num_cached / num_prompt_tokens) if num_prompt_tokens else None,
            drafts=tuple((router.drafts - self._drafts).tolist()),
            reward_wait_s=0.0 if self._runs_ahead else counts.reward_wait_s,
            has_scored=counts.num_scored_groups > 0 or counts.num_groups == 0,
            overlap=self._overlap() if self._runs_ahead else {},
            pool=pool | reuse,
            batch=tuple(batch),
            notices=notices,
        )
        if not drawn.groups:
            raise EngineError(f"every rollout group failed; the last: {self._failure}")
        self._start_period()
        return drawn

    def _overlap(self) -> dict[str, float]:
        """Return what waits and runs, and the share of the time since the last batch that engines were idle."""
        router = self.workflow.router
        engines_s = (asyncio.get_running_loop().time() - self._since) * max(len(router.engines), 1)
        idle = 1 - (router.busy_s - self._busy_s) / engines_s if engines_s > 0 else 0.0
        return {
            "async/waiting_groups": float(self.stream.num_queued),
            "async/groups_in_flight": float(self.stream.num_in_flight),
            "async/generation_idle": min(max(idle, 0.0), 1.0),
        }

    def _start_period(self) -> None:
        """Count from here on for the next batch."""
        self._counts.generate_s = 0.0
        self._counts.score_s = 0.0
        self._num_requested = 0  # groups
        self._num_failed = 0  # groups
        self._failure = ""
        self._dropped = []
        self._start_clock()

    def _start_clock(self) -> None:
        """Note what the router has counted so far."""
        router = self.workflow.router
        self._num_retries = router.num_retries
        self._prompt_tokens = router.prompt_tokens.copy()
        self._drafts = router.drafts.copy()
        self._busy_s = router.busy_s
        self._since = asyncio.get_running_loop().time()


def _group(saved: Any) -> RolloutGroup:
    """Return a group of a state. Older checkpoints have the records of each."""
    return saved if isinstance(saved, RolloutGroup) else parse_group(saved, "the checkpoint")
