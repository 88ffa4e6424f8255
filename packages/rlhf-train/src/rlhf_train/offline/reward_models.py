"""Reward models in training: loading one, and the mean and deviation of its scores."""

import math
from collections.abc import Mapping
from typing import Any

from rlhf_models.loading import load_critic
from rlhf_models.reward import RewardModel


def score_moments(metrics: Mapping[str, float]) -> tuple[float, float]:
    """Return the mean and the standard deviation of the scores in an evaluation's `metrics`."""
    mean = metrics["eval/score"]
    return mean, math.sqrt(max(metrics["eval/squared_score"] - mean**2, 0.0))


def load_trainable_reward_model(path: str, **options: Any) -> RewardModel:
    """Return a reward model to train, with the value head of the folder, or a zero head if it has none.

    `options` are those of `load_critic`.
    """
    critic = load_critic(path, **options)
    model = RewardModel(critic.model)
    model.value_head = critic.value_head
    return model
