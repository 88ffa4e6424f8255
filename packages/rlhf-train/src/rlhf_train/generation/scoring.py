"""The reward of a run: the function that scores rollouts, the shaping of rewards, and which groups are trained on."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_data.records import FinishReason, Prompt, Rollout, RolloutGroup, Verdict, VerdictKind
from rlhf_rollout.protocols import RewardFunction
from rlhf_rollout.rewards.mix import build_reward
from rlhf_rollout.rewards.model import ModelReward, ProcessReward, Scorer
from rlhf_rollout.rewards.shaping import RunningMoments, clip_rewards, overlong_penalty, stop_properly
from rlhf_train.algorithms.own_groups import Group, keeps_group
from rlhf_train.generation.run_spec import DynamicSampling, RewardSpec
from rlhf_train.generation.summaries import scored
from rlhf_train.tracing.trace import Span, Trace, Track, Work, machine


class NoReward:
    """A `RewardFunction` that gives every rollout the reward 0, for a policy that learns from a teacher alone."""

    async def score(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Verdict]:
        """Return one verdict per rollout."""
        return [Verdict(VerdictKind.UNSCORED, 0.0)] * len(rollouts)

    async def close(self) -> None:
        """Do nothing."""


class ShownScorer:
    """A `Scorer` whose batches the file of the timeline shows on `track`, as the process that asks it sees them."""

    def __init__(self, scorer: Scorer, trace: Trace, track: Track) -> None:
        self._scorer, self._trace, self._track = scorer, trace, track

    async def score(self, token_ids: list[Any]) -> list[Any]:
        """See `Scorer`."""
        began_s = self._trace.now()
        args = {"sequences": len(token_ids)}
        try:
            return await self._scorer.score(token_ids)
        except BaseException as error:
            args["failed"] = type(error).__name__
            raise
        finally:
            ended_s = self._trace.now()
            self._trace.work(
                self._track, Work(machine(), ended_s, [Span("scores", began_s, ended_s, 0, args)]), ended_s
            )


def make_reward(
    spec: RewardSpec, scorers: Sequence[Sequence[Scorer]], log_path: Path, trace: Trace | None = None
) -> RewardFunction:
    """Return the function that scores rollouts; without sources it gives each the reward 0.

    Args:
        spec: where rewards come from.
        scorers: the replicas of each reward model, in the order of `spec.models`.
        log_path: file for what reward functions print.
        trace: the file of the timeline; None for none.
    """
    if not spec.sources:
        return NoReward()
    models = []
    for path, replicas in zip(spec.models, scorers, strict=True):
        kind = ProcessReward if path in spec.process_models else partial(ModelReward, by_turn=spec.reward_by_turn)
        if trace is not None and trace.is_on:
            tracks = [Track(f"reward model {Path(path).name}", f"replica {number}") for number in range(len(replicas))]
            replicas = [ShownScorer(replica, trace, track) for replica, track in zip(replicas, tracks, strict=True)]
        models.append(kind(replicas, spec.calls, timeout_s=spec.model_timeout_s))
    return build_reward(spec.sources, spec.calls, log_path=log_path, models=models)


class RewardShaper:
    """Turns the rewards of each step into those that are trained on: normalizes, clips, then shapes them by length.

    Args:
        spec: which of these are on, and their numbers.
        max_tokens: length of an answer in tokens at which the overlong penalty reaches its full size. The penalty of a
            rollout with several turns is that of its longest answer, because the limit is one answer's.
    """

    def __init__(self, spec: RewardSpec, *, max_tokens: int) -> None:
        self._spec = spec
        self._max_tokens = max_tokens
        self._moments = RunningMoments() if spec.running_reward_norm else None

    def state(self) -> dict[str, float] | None:
        """Return the running mean and deviation, for `restore`; None without them."""
        return self._moments.state() if self._moments is not None else None

    def restore(self, state: Mapping[str, float] | None) -> None:
        """Continue with the running mean and deviation of another process."""
        if self._moments is not None and state is not None:
            self._moments.restore(state)

    def observe(self, rollouts: Sequence[Rollout]) -> None:
        """Update the running mean and deviation with the raw rewards of `rollouts`, which all have a reward."""
        if self._moments is not None:
            self._moments.update(_raw(rollouts))

    def shape(self, rollouts: Sequence[Rollout]) -> tuple[np.ndarray, dict[str, float]]:
        """Return the shaped rewards of `rollouts`, [B] float64, and metrics of the shaping.

        Every rollout must have a reward.
        """
        spec = self._spec
        rewards = _raw(rollouts)
        metrics: dict[str, float] = {}
        if self._moments is not None:
            rewards = self._moments.normalize(rewards)
        if spec.reward_clip_range is not None:
            rewards, num_clipped = clip_rewards(rewards, *spec.reward_clip_range)
            metrics["train/reward_clipped"] = num_clipped / max(len(rewards), 1)
        shaped = rewards
        if spec.overlong_buffer:
            lengths = np.array([_longest_answer(rollout) for rollout in rollouts])
            penalty = {"buffer": spec.overlong_buffer, "factor": spec.overlong_penalty_factor}
            shaped = shaped + overlong_penalty(lengths, max_tokens=self._max_tokens, **penalty)
        if spec.stop_properly_penalty_coef is not None:
            truncated = np.array([rollout.finish_reason is FinishReason.LENGTH for rollout in rollouts], bool)
            shaped = stop_properly(shaped, truncated, coef=spec.stop_properly_penalty_coef)
        if shaped is not rewards:
            metrics["train/length_penalty"] = float(np.mean(rewards - shaped)) if len(rewards) else 0.0
        if metrics or self._moments is not None:
            metrics["train/shaped_reward"] = float(np.mean(shaped)) if len(shaped) else 0.0
        return shaped, metrics


def _longest_answer(rollout: Rollout) -> int:
    """Return the number of tokens of a rollout's longest turn; 0 without one."""
    written_by_turn = np.diff(np.cumsum(rollout.loss_mask)[rollout.turn_ends], prepend=0)
    return int(written_by_turn.max(initial=0))


def _raw(rollouts: Sequence[Rollout]) -> np.ndarray:
    return np.array([rollout.verdict.reward for rollout in rollouts], np.float64)  # type: ignore[union-attr]


def is_worth_training(group: RolloutGroup, spec: DynamicSampling) -> bool:
    """Return whether a group passes the filters of `spec`. A group without a score passes none.

    With `scores_differ` its scores must differ and, with `reward_range`, their mean must lie strictly within its
    bounds. With `by_source` the rewards of a source must differ, instead of the scores. A group of equal ones has no
    advantage to learn from. Rollouts without a score are ignored.

    Source: Yu et al. 2025, arXiv:2503.14476, sec. 3.2 (DAPO), eq. 11.
    """
    rollouts = scored([group])
    if not rollouts or (spec.scores_differ and not _scores_differ(rollouts, spec)):
        return False
    return spec.own_filter is None or keeps_group(spec.own_filter, Group.of(group.prompt, rollouts))


def _scores_differ(rollouts: Sequence[Rollout], spec: DynamicSampling) -> bool:
    verdicts = [rollout.verdict for rollout in rollouts]
    scores = [verdict.score for verdict in verdicts]
    compared = [verdict.source_rewards for verdict in verdicts] if spec.by_source else scores
    if len(set(compared)) < 2:
        return False
    if spec.reward_range is None:
        return True
    low, high = spec.reward_range
    return low < sum(scores) / len(scores) < high
