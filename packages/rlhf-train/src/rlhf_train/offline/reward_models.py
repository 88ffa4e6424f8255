"""The mean and deviation of a reward model's scores in training."""

import math
from collections.abc import Mapping


def score_moments(metrics: Mapping[str, float]) -> tuple[float, float]:
    """Return the mean and the standard deviation of the scores in an evaluation's `metrics`."""
    mean = metrics["eval/score"]
    return mean, math.sqrt(max(metrics["eval/squared_score"] - mean**2, 0.0))
