"""Prompts to scored rollout groups from the controller: engines, rewards and their clock, behind one blocking call."""

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rlhf_data.errors import EngineError
from rlhf_data.records import Prompt, RolloutGroup
from rlhf_models.loading import load_tokenizer
from rlhf_rollout.agents import SingleTurn
from rlhf_rollout.generator import GenerationCounts, GroupResult, PromptSupply, generate_groups
from rlhf_rollout.protocols import RewardFunction, RolloutEngine, SamplingParams
from rlhf_rollout.ray_actors import RayScorer
from rlhf_rollout.rewards.mix import build_reward
from rlhf_rollout.rewards.model import ModelReward
from rlhf_rollout.router import EngineRouter
from rlhf_train.online.job import OnlineJob
from rlhf_train.run.observer import Observer
from rlhf_train.run.timeline import Timeline


def make_reward(job: OnlineJob, scorers: Sequence[Sequence[Any]], log_path: Path) -> RewardFunction:
    """Return what scores the rollouts of `job`; `scorers` are the processes of each of its reward models."""
    spec = job.reward
    models = [
        ModelReward([RayScorer(handle) for handle in replicas], batch_size=spec.batch_size) for replicas in scorers
    ]
    return build_reward(
        spec.sources,
        timeout_s=spec.timeout_s,
        num_workers=spec.num_workers,
        batch_size=spec.batch_size,
        log_path=log_path,
        models=models,
    )


class Generation:
    """Engines that answer and rewards that score, side by side in an event loop of their own.

    Seconds are counted in the phase of the `timeline` that `run` names, and in "reward" where that is "generate".
    `observer` is told about groups that failed.
    """

    def __init__(
        self,
        job: OnlineJob,
        engines: Sequence[RolloutEngine],
        reward: RewardFunction,
        timeline: Timeline,
        observer: Observer,
    ) -> None:
        self.engines = list(engines)
        self._max_in_flight = job.max_in_flight
        self._reward = reward
        self._timeline = timeline
        self._observer = observer
        self._loop = asyncio.Runner()
        tokenizer = load_tokenizer(job.engine.tokenizer or job.engine.model)
        self._decode = partial(tokenizer.decode, skip_special_tokens=True)

    def run(
        self,
        prompts: Iterable[Prompt],
        sampling: SamplingParams,
        prefix: str,
        *,
        seed_key: str | None = None,
        phase: str = "generate",
    ) -> tuple[list[RolloutGroup], GenerationCounts]:
        """Return the groups that were generated, in the order of their prompts, and the account of all.

        A `PromptSupply` among the `prompts` is told of every result. `prefix` begins the groups' ids, and of `seed_key`
        tells `generate_groups`. Raises EngineError when there is no group at all, RewardError when the reward cannot
        run.
        """
        counts = GenerationCounts()

        async def collect() -> list[GroupResult]:
            stream = generate_groups(
                prompts,
                SingleTurn(EngineRouter(self.engines), self._decode),
                sampling,
                self._reward,
                max_in_flight=self._max_in_flight,
                group_id_prefix=prefix,
                seed_key=seed_key,
                counts=counts,
                settle=prompts.settle if isinstance(prompts, PromptSupply) else None,
            )
            return [result async for result in stream]

        with self._timeline.phase(phase):
            outcome = self._loop.run(collect())
        if phase == "generate":
            # Rewards are given while others generate; only what they take after the last generation is theirs.
            self._timeline.move("generate", "reward", counts.reward_wait_s)
        if failures := [result.failure for result in outcome if result.group is None]:
            text = f"{prefix}: {len(failures)} of {len(outcome)} rollout groups failed in an engine"
            self._observer.warning(f"{text}; the last: {failures[-1]}")
        # Groups come back in the order they finish; a fixed order makes runs with one seed alike.
        outcome.sort(key=lambda result: int(result.group_id.rpartition("/")[2]))
        groups = [result.group for result in outcome if result.group is not None]
        if not groups:
            raise EngineError(f"every rollout group failed; the last: {outcome[-1].failure}")
        return groups, counts

    def await_all(self, awaitables: Iterable[Awaitable[Any]]) -> None:
        """Wait for calls of engines."""

        async def gather() -> None:
            await asyncio.gather(*awaitables)

        self._loop.run(gather())

    def close(self) -> None:
        """End the rewards and the event loop."""
        self._loop.run(self._reward.close())
        self._loop.close()
