"""From the rewards that rollouts were given to those that an algorithm learns from. Torch-free."""

from collections.abc import Sequence

import numpy as np

from rlhf_data.records import FinishReason, Rollout, RolloutGroup
from rlhf_rollout.rewards.shaping import RunningMoments, clip_rewards, overlong_penalty, stop_properly
from rlhf_train.online.job import DynamicSampling, RewardSpec
from rlhf_train.online.summaries import scored


class RewardShaper:
    """Normalises, clips and shapes the rewards of each step as `spec` says, in this order. The overlong penalty is full
    at `max_tokens` tokens of a response."""

    def __init__(self, spec: RewardSpec, *, max_tokens: int) -> None:
        self._spec = spec
        self._max_tokens = max_tokens
        self._moments = RunningMoments() if spec.running_norm else None

    def observe(self, rollouts: Sequence[Rollout]) -> None:
        """Take the raw rewards of rollouts that have one into account."""
        if self._moments is not None:
            self._moments.update(_raw(rollouts))

    def shape(self, rollouts: Sequence[Rollout]) -> tuple[np.ndarray, dict[str, float]]:
        """Return the rewards [B] float64 of rollouts that have one, and metrics of what was done to them."""
        spec = self._spec
        rewards = _raw(rollouts)
        metrics: dict[str, float] = {}
        if self._moments is not None:
            rewards = self._moments.normalize(rewards)
        if spec.clip_range is not None:
            rewards, num_clipped = clip_rewards(rewards, *spec.clip_range)
            metrics["train/reward_clipped"] = num_clipped / max(len(rewards), 1)
        shaped = rewards
        if spec.overlong_buffer:
            lengths = np.array([rollout.num_response_tokens for rollout in rollouts])
            penalty = {"buffer": spec.overlong_buffer, "factor": spec.overlong_penalty_factor}
            shaped = shaped + overlong_penalty(lengths, max_tokens=self._max_tokens, **penalty)
        if spec.stop_properly_coef is not None:
            truncated = np.array([rollout.finish_reason is FinishReason.LENGTH for rollout in rollouts], bool)
            shaped = stop_properly(shaped, truncated, coef=spec.stop_properly_coef)
        if shaped is not rewards:
            metrics["train/length_penalty"] = float(np.mean(rewards - shaped)) if len(rewards) else 0.0
        if metrics or self._moments is not None:
            metrics["train/shaped_reward"] = float(np.mean(shaped)) if len(shaped) else 0.0
        return shaped, metrics


def _raw(rollouts: Sequence[Rollout]) -> np.ndarray:
    return np.array([rollout.verdict.reward for rollout in rollouts], np.float64)  # type: ignore[union-attr]


def is_worth_training(group: RolloutGroup, spec: DynamicSampling) -> bool:
    """Say whether the scores of a group differ and, where bounds are given, their mean lies strictly between.

    Rollouts without a score are left out of account.

    Source: Yu et al. 2025, arXiv:2503.14476, sec. 3.2 (DAPO), eq. 11.
    """
    scores = [rollout.verdict.score for rollout in scored([group])]
    if len(scores) < 2 or max(scores) == min(scores):
        return False
    if spec.reward_range is None:
        return True
    low, high = spec.reward_range
    return low < sum(scores) / len(scores) < high
