"""Reward shaping before advantages are computed: running normalization, clipping, penalties for length.

Pure functions of numpy arrays. N is the number of rollouts.
"""

from collections.abc import Mapping

import numpy as np

from rlhf_data.errors import ConfigError, DataError

# A deviation below this share of the mean is the rounding of equal values, not a spread.
_ROUNDING = 1e-12


def overlong_penalty(lengths: np.ndarray, *, max_tokens: int, buffer: int, factor: float) -> np.ndarray:
    """Return what to add to the rewards of long responses.

        p(l) = 0                                              l <= max_tokens - buffer
        p(l) = factor ((max_tokens - buffer) - l) / buffer    up to max_tokens, where it is -factor
        p(l) = -factor                                        beyond

    Args:
        lengths: [N] int, response tokens.
        max_tokens: the length limit of a response, in tokens; the prompt does not count.
        buffer: tokens before the limit over which the penalty grows; 0 for no penalty.
        factor: the penalty at the limit, in reward units, >= 0.

    Returns:
        [N] float64, in [-factor, 0].

    Raises:
        ConfigError: a buffer outside [0, max_tokens], or a negative factor.

    Source: Yu et al. 2025 (DAPO), arXiv:2503.14476, eq. 13, where factor is 1.
    """
    if not 0 <= buffer <= max_tokens:
        message = f"an overlong buffer of {buffer} tokens and responses of at most {max_tokens}"
        raise ConfigError(message, hint=f"use a buffer between 1 and {max_tokens}, or 0 for none")
    if not factor >= 0:
        raise ConfigError(f"the overlong penalty factor is {factor}; it must not be negative")
    lengths = np.asarray(lengths, np.float64)
    if not buffer:
        return np.zeros_like(lengths)
    return -factor * np.clip((lengths - (max_tokens - buffer)) / buffer, 0.0, 1.0)


def stop_properly(rewards: np.ndarray, truncated: np.ndarray, *, coef: float) -> np.ndarray:
    """Lower the rewards of rollouts that the length limit ended.

        R' = R - (1 - coef) |R|     0 <= coef <= 1
        R' = min(R, coef)           coef < 0

    With `coef` from 0 to 1 a truncated rollout keeps the share `coef` of a positive reward. A negative reward gets
    lower; multiplying it by `coef` would raise it. With `coef` below 0 a truncated rollout has at most the reward
    `coef`.

    Args:
        rewards: [N] float.
        truncated: [N] bool.
        coef: at most 1; 1 changes nothing.

    Returns:
        [N] float64; unchanged where `truncated` is False.

    Raises:
        ConfigError: `coef` above 1, or not a number.

    Source: the "stop properly" penalty of the ProRL v2 recipe (NVIDIA 2025), corrected for negative rewards.
    """
    if not coef <= 1:
        hint = "0 to 1 is the share of its reward that a truncated rollout keeps, below 0 the most that it gets"
        raise ConfigError(f"the coefficient of the stop-properly penalty is {coef}; it must be at most 1", hint=hint)
    rewards = np.asarray(rewards, np.float64)
    lowered = rewards - (1 - coef) * np.abs(rewards) if coef >= 0 else np.minimum(rewards, coef)
    return np.where(np.asarray(truncated, bool), lowered, rewards)


def clip_rewards(rewards: np.ndarray, low: float, high: float) -> tuple[np.ndarray, int]:
    """Return [N] float64 rewards within [low, high] and how many were outside. Raises ConfigError unless low < high."""
    if not low < high:
        raise ConfigError(f"the reward range {low:g} to {high:g} is empty", hint="give the smaller number first")
    rewards = np.asarray(rewards, np.float64)
    clipped = np.clip(rewards, low, high)
    return clipped, int((clipped != rewards).sum())


class RunningMoments:
    """Mean and standard deviation of all values so far, independent of the batches in which they arrived.

        n = n_a + n_b,  d = mean_b - mean_a
        mean = mean_a + d n_b / n
        M    = M_a + M_b + d^2 n_a n_b / n          deviation = sqrt(M / (n - 1))

    Source: Chan, Golub and LeVeque 1979, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances".
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self._squares = 0.0  # M: the sum of squared distances from the mean

    @property
    def deviation(self) -> float:
        """Standard deviation of the sample; 0.0 for fewer than two values and for equal values."""
        if self.count < 2:
            return 0.0
        deviation = float(np.sqrt(self._squares / (self.count - 1)))
        return deviation if deviation > _ROUNDING * abs(self.mean) else 0.0

    def update(self, values: np.ndarray) -> None:
        """Add [N] values. Raises DataError for values that are not finite, since they would spoil all later results."""
        values = np.asarray(values, np.float64)
        if not np.isfinite(values).all():
            raise DataError(f"{int((~np.isfinite(values)).sum())} of {values.size} values are not finite")
        if not values.size:
            return
        mean = float(values.mean())
        count = self.count + values.size
        distance = mean - self.mean
        self._squares += float(((values - mean) ** 2).sum()) + distance**2 * self.count * values.size / count
        self.mean += distance * values.size / count
        self.count = count

    def state(self) -> dict[str, float]:
        """Return what `restore` needs."""
        return {"count": self.count, "mean": self.mean, "squares": self._squares}

    def restore(self, state: Mapping[str, float]) -> None:
        """Continue with the values that another object has seen."""
        self.count = int(state["count"])
        self.mean = state["mean"]
        self._squares = state["squares"]

    def normalize(self, values: np.ndarray) -> np.ndarray:
        """Return (values - mean) / deviation as [N] float64; a deviation of 0 counts as 1."""
        return (np.asarray(values, np.float64) - self.mean) / (self.deviation or 1.0)
