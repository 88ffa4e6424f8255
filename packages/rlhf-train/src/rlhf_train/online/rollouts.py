"""The generating side: which prompts are asked, and which of their groups go into the stream."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_data.records import Prompt, RolloutGroup
from rlhf_data.sampler import EpochSampler
from rlhf_rollout.generator import GenerationCounts, GroupResult, PromptSupply
from rlhf_train.online.generation import Generation
from rlhf_train.online.job import OnlineJob
from rlhf_train.online.rewards import is_worth_training
from rlhf_train.online.stream import SampleStream


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a call of `Rollouts.fill` has made.

    Attributes:
        kept: groups that are in the stream now.
        dropped: groups that are not worth training.
        counts: the account of all groups, failed ones included.
    """

    kept: tuple[RolloutGroup, ...]
    dropped: tuple[RolloutGroup, ...]
    counts: GenerationCounts

    @property
    def groups(self) -> tuple[RolloutGroup, ...]:
        """All groups that an engine completed."""
        return (*self.kept, *self.dropped)


class Rollouts:
    """Draws prompts while the stream has room, and has them answered and scored.

    With dynamic sampling, each group that is not worth training makes room for one prompt more.

    Args:
        job: the run.
        generation: engines and rewards.
        stream: where complete groups go.

    Attributes:
        policy_version: the version of the engines' weights; None before the first sync.
    """

    def __init__(self, job: OnlineJob, generation: Generation, stream: SampleStream) -> None:
        self._job = job
        self._generation = generation
        self._stream = stream
        self._sampler = EpochSampler(len(job.prompts), job.batch.rollout_batch_size, seed=job.seed)
        self.policy_version: int | None = None

    @property
    def engines(self) -> Sequence[Any]:
        """The engines, in the order of the plan."""
        return self._generation.engines

    def fill(self, step: int) -> Drawn:
        """Generate until the stream is full, or as many prompts were drawn as a step may draw.

        Raises EngineError when every group failed, RewardError when the reward cannot run.
        """
        dynamic = self._job.dynamic_sampling
        supply = _AdmittedPrompts(
            self._stream,
            self._next_prompt,
            target=self._stream.room,
            max_drawn=self._stream.room * (dynamic.max_batches if dynamic else 1),
            keep=self.is_kept,
        )
        groups, counts = self._generation.run(supply, self._job.sampling, f"step{step}")
        kept = tuple(group for group in groups if self.is_kept(group))
        return Drawn(kept, tuple(group for group in groups if not self.is_kept(group)), counts)

    def is_kept(self, group: RolloutGroup) -> bool:
        """Say whether a group is worth training."""
        dynamic = self._job.dynamic_sampling
        return dynamic is None or is_worth_training(group, dynamic)

    def answer_held_out(self, step: int) -> list[RolloutGroup]:
        """Return the groups of the held-out prompts.

        Each call draws with the same seeds: what differs between evaluations is the policy and not the draw.
        """
        job = self._job
        prompts, sampling = job.eval_prompts, job.eval_sampling
        groups, _ = self._generation.run(prompts, sampling, f"eval{step}", seed_key="eval", phase="evaluate")
        return groups

    def sleep(self) -> None:
        """Have the engines give their memory back."""
        self._generation.await_all(engine.sleep() for engine in self.engines)

    def wake_up(self) -> None:
        """Have the engines take their memory again."""
        self._generation.await_all(engine.wake_up() for engine in self.engines)

    def close(self) -> None:
        """End the rewards and what runs in this process."""
        self._generation.close()

    def _next_prompt(self) -> Prompt:
        return self._job.prompts[self._sampler.take(1)[0]]


class _AdmittedPrompts(PromptSupply):
    """Prompts that a stream admits one by one; the stream is told at once what became of each."""

    def __init__(
        self,
        stream: SampleStream,
        draw: Callable[[], Prompt],
        target: int,
        max_drawn: int,
        keep: Callable[[RolloutGroup], bool],
    ) -> None:
        super().__init__(draw, target, max_drawn, keep)
        self._stream = stream

    def __next__(self) -> Prompt:
        if not self._stream.room:
            raise StopIteration  # for now: the next result may make room
        prompt = super().__next__()
        self._stream.start()
        return prompt

    def settle(self, result: GroupResult) -> bool:
        """Account for the result of a prompt handed out; return whether its group is in the stream now."""
        kept = super().settle(result)
        if kept and result.group is not None:
            self._stream.put(result.group)
        else:
            self._stream.leave_out()
        return kept
