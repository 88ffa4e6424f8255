"""Reward models as a run needs them: to train, and with the moments of their scores."""

import math
from collections.abc import Mapping
from typing import Any

from rlhf_models.loading import load_critic
from rlhf_models.reward import RewardModel


def score_moments(metrics: Mapping[str, float]) -> tuple[float, float]:
    """Return mean and deviation of the scores that an evaluation saw."""
    mean = metrics["eval/score"]
    return mean, math.sqrt(max(metrics["eval/squared_score"] - mean**2, 0.0))


def load_trainable_reward_model(path: str, **options: Any) -> RewardModel:
    """Return a reward model to train, with the folder's head or one of zeros; see `load_critic`."""
    critic = load_critic(path, **options)
    model = RewardModel(critic.model)
    model.value_head = critic.value_head
    return model
