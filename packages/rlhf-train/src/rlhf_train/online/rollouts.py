"""The generating side: which prompts are asked, how they become scored rollout groups, and which groups are kept."""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_data.errors import EngineError
from rlhf_data.progress import duration
from rlhf_data.records import Prompt, RolloutGroup
from rlhf_data.sampler import EpochSampler
from rlhf_models.loading import load_tokenizer
from rlhf_rollout.agents import make_workflow
from rlhf_rollout.generator import GenerationCounts, GroupResult, PromptSupply, generate_groups
from rlhf_rollout.protocols import RewardFunction, SamplingParams
from rlhf_rollout.router import EngineRouter
from rlhf_rollout.supervisor import EngineSupervisor, RestartableEngine
from rlhf_train.online.job import OnlineJob
from rlhf_train.online.rewards import is_worth_training
from rlhf_train.online.stream import SampleStream
from rlhf_train.run.observer import Observer
from rlhf_train.run.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Drawn:
    """The result of one call of `Rollouts.fill`.

    Attributes:
        kept: groups that were put into the stream.
        dropped: complete groups that dynamic sampling leaves out of training.
        counts: totals over all groups, including those that failed.
    """

    kept: tuple[RolloutGroup, ...]
    dropped: tuple[RolloutGroup, ...]
    counts: GenerationCounts

    @property
    def groups(self) -> tuple[RolloutGroup, ...]:
        """All groups that an engine completed."""
        return (*self.kept, *self.dropped)


class Rollouts:
    """Has prompts answered by the engines and scored by the reward, and fills the stream with the groups.

    Generation and rewards run concurrently in an asyncio event loop that belongs to this object. Its methods block, so
    that the controller stays plain sequential code. With dynamic sampling, each group that is not worth training is
    replaced by the group of another prompt.

    Args:
        job: the run.
        engines: the generation engines, in the order of the plan.
        send_weights: see `Learner.send_weights`.
        reward: scores the rollouts. `close` closes it.
        stream: receives the complete groups.
        timeline: counts the seconds of generation, rewards and evaluation.
        observer: is warned about groups that failed.
        agent_log: file for what an agent prints; None for standard error.

    Raises:
        RewardError: the agent cannot be imported.
    """

    def __init__(
        self,
        job: OnlineJob,
        engines: Sequence[RestartableEngine],
        send_weights: Callable[[Mapping[int, Any]], tuple[int, Mapping[int, str]]],
        reward: RewardFunction,
        stream: SampleStream,
        timeline: Timeline,
        observer: Observer,
        agent_log: Path | None = None,
    ) -> None:
        self._job = job
        self._reward = reward
        self._stream = stream
        self._timeline = timeline
        self._observer = observer
        self._sampler = EpochSampler(len(job.prompts), job.batch.rollout_batch_size, seed=job.seed)
        tokenizer_path = job.engine.tokenizer or job.engine.model
        router = EngineRouter()
        self._workflow = make_workflow(
            job.agent,
            router,
            load_tokenizer(tokenizer_path),
            tokenizer_path=tokenizer_path,
            gives_reward=not job.reward.sources and not job.algorithm.uses_teacher,
            log_path=agent_log,
        )
        self._send_weights = send_weights
        self._is_reward_idle = False  # the agent gives all rewards; warned of once
        self._size_bytes = 0  # of the weights
        self._counts = GenerationCounts()  # of the generation under way
        self._supervisor = EngineSupervisor(engines, router, self._send, observer.warning)
        # One loop for the whole run: reward clients keep connections that belong to the loop they were opened in.
        self._loop = asyncio.Runner()
        self._loop.run(self._workflow.start())

    def fill(self, step: int) -> Drawn:
        """Generate until the stream is full, or until the step's limit of prompts is reached.

        The limit is the room in the stream, times `max_batches` with dynamic sampling. Raises EngineError when every
        group failed, RewardError when the reward cannot run.
        """
        dynamic = self._job.dynamic_sampling
        target = self._stream.room
        supply = _AdmittedPrompts(
            self._stream,
            draw=self._next_prompt,
            target=target,
            max_drawn=target * (dynamic.max_batches if dynamic else 1),
            keep=self.is_kept,
        )

        def settle(result: GroupResult) -> None:
            supply.settle(result)
            self._observer.progress(supply.num_kept, target)

        groups, counts = self._generate(
            supply, self._job.sampling, phase="generate", group_id_prefix=f"step{step}", settle=settle
        )
        # Most rewards are computed while other groups still generate, so they cost no time of their own. Only the
        # seconds after the last generation are the reward's.
        self._timeline.move("generate", "reward", counts.reward_wait_s)
        kept = tuple(group for group in groups if self.is_kept(group))
        dropped = tuple(group for group in groups if not self.is_kept(group))
        return Drawn(kept, dropped, counts)

    def is_kept(self, group: RolloutGroup) -> bool:
        """Return whether a group is trained: all are, unless dynamic sampling leaves them out."""
        dynamic = self._job.dynamic_sampling
        return dynamic is None or is_worth_training(group, dynamic)

    def answer_held_out(self, step: int) -> list[RolloutGroup]:
        """Return the scored groups of the held-out prompts.

        Every call uses the same sampling seeds. Differences between two evaluations then come from the policy and not
        from the draw. Raises like `fill`.
        """
        finished = itertools.count(1)
        groups, _ = self._generate(
            self._job.eval_prompts,
            self._job.eval_sampling,
            phase="evaluate",
            group_id_prefix=f"eval{step}",
            seed_key="eval",
            settle=lambda result: self._observer.progress(next(finished), len(self._job.eval_prompts)),
        )
        return groups

    def pending(self) -> str:
        """Return what rollout groups in flight wait for, in words; "" without one. For `Watch`."""
        waiting = self._counts.waiting.copy()
        if not waiting:
            return ""
        oldest, (what, since) = min(waiting.items(), key=lambda item: item[1][1])
        text = f"{len(waiting)} rollout groups in flight; the oldest, {oldest}, waits for {what}"
        return f"{text} since {duration(time.monotonic() - since)}; {self._workflow.router.describe()}"

    @property
    def policy_version(self) -> int | None:
        """Version of the weights that the engines have; None before the first weight sync."""
        return self._supervisor.policy_version

    def synchronize(self, policy_version: int) -> int:
        """Bring the engines to the trainers' weights, which have this version; return the weights' size in bytes.

        Engines that are dead are restarted first if no other one lives. Raises EngineError when no engine can be used.
        """
        self._loop.run(self._supervisor.synchronize(policy_version))
        return self._size_bytes

    def sleep(self) -> None:
        """Have all engines release their device memory."""
        self._loop.run(self._supervisor.call_all("sleep"))

    def wake_up(self) -> None:
        """Have all engines take their device memory back."""
        self._loop.run(self._supervisor.call_all("wake_up"))

    def state(self) -> dict[str, Any]:
        """Return the place in the order of prompts, for `restore`."""
        return self._sampler.state_dict()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue with the next prompt of another process.

        Raises CheckpointError for another number of prompts or another seed.
        """
        self._sampler.load_state_dict(state)

    def close(self) -> None:
        """End the agent, the reward and the event loop."""
        self._loop.run(self._workflow.close())
        self._loop.run(self._reward.close())
        self._loop.close()

    def _next_prompt(self) -> Prompt:
        return self._job.prompts[self._sampler.take(1)[0]]

    def _generate(
        self, prompts: Iterable[Prompt], sampling: SamplingParams, *, phase: str, group_id_prefix: str, **options: Any
    ) -> tuple[list[RolloutGroup], GenerationCounts]:
        """Run `generate_groups` to its end and return the complete groups, in the order of their prompts, and totals.

        `phase` is the timeline's name for the time this takes, `options` are further arguments of `generate_groups`.
        """
        counts = self._counts = GenerationCounts()

        async def collect() -> list[GroupResult]:
            results = generate_groups(
                prompts,
                self._workflow,
                sampling,
                self._reward,
                max_in_flight=self._job.max_in_flight,
                group_id_prefix=group_id_prefix,
                counts=counts,
                **options,
            )
            watching = asyncio.create_task(self._supervisor.watch())
            try:
                return [result async for result in results]
            finally:
                watching.cancel()
                await asyncio.wait([watching])

        with self._timeline.phase(phase):
            outcome = self._loop.run(collect())
        if self._supervisor.error is not None:
            raise self._supervisor.error
        if failures := [result.failure for result in outcome if result.group is None]:
            text = f"{group_id_prefix}: {len(failures)} of {len(outcome)} rollout groups failed in an engine"
            self._observer.warning(f"{text}; the last: {failures[-1]}")
        if self._job.agent and self._job.reward.sources and not counts.num_scored_groups and not self._is_reward_idle:
            self._is_reward_idle = True
            self._observer.warning(
                "the agent gives rewards of its own, so the reward that the flags name has scored nothing"
                "; let the agent return none where that reward is to score"
            )
        # Groups arrive in the order in which they finish, which varies from run to run. Sorting them by number makes
        # two runs with one seed train on the same batches in the same order.
        outcome.sort(key=lambda result: int(result.group_id.rpartition("/")[2]))
        groups = [result.group for result in outcome if result.group is not None]
        if not groups:
            raise EngineError(f"every rollout group failed; the last: {outcome[-1].failure}")
        return groups, counts

    def _send(self, engines: Mapping[int, Any]) -> Mapping[int, str]:
        self._size_bytes, failures = self._send_weights(engines)
        return failures


class _AdmittedPrompts(PromptSupply):
    """A supply of prompts that asks the stream for admission, prompt by prompt, and reports each result to it."""

    def __init__(self, stream: SampleStream, **options: Any) -> None:
        """`options` are the arguments of `PromptSupply`."""
        super().__init__(**options)
        self._stream = stream

    def __next__(self) -> Prompt:
        if not self._stream.room:
            raise StopIteration  # not the end: `generate_groups` asks again after the next result
        prompt = super().__next__()
        # Admit only after a prompt was drawn: `super` may refuse one, and the stream would wait for its group forever.
        self._stream.start()
        return prompt

    def settle(self, result: GroupResult) -> bool:
        """Put a finished group into the stream, or give up its place; return whether it is in the stream."""
        kept = super().settle(result)
        if kept and result.group is not None:
            self._stream.put(result.group)
        else:
            self._stream.leave_out()
        return kept
