"""Length penalties, bounds and running moments: values by hand, equal values, and numbers that make no sense."""

import numpy as np
import pytest

from rlhf_data.errors import ConfigError, DataError
from rlhf_rollout.rewards.shaping import RunningMoments, clip_rewards, overlong_penalty, stop_properly


def test_overlong_penalty_grows_over_the_buffer():
    # Limit 10, buffer 4: free up to 6, then a quarter of 2.0 a token down to -2.0 at 10 and no further.
    penalties = overlong_penalty(np.array([0, 6, 7, 8, 10, 12]), max_tokens=10, buffer=4, factor=2.0)
    assert penalties.tolist() == [0, 0, -0.5, -1, -2, -2]


@pytest.mark.parametrize(("buffer", "factor"), [(0, 1.0), (4, 0.0)])
def test_overlong_penalty_without_buffer_or_factor_is_none(buffer, factor):
    assert not overlong_penalty(np.array([1, 10, 11]), max_tokens=10, buffer=buffer, factor=factor).any()


@pytest.mark.parametrize(
    ("buffer", "factor", "says"),
    [
        (11, 1.0, r"buffer of 11 tokens and responses of at most 10\n\nhint: use a buffer between 1 and 10"),
        (-1, 1.0, "buffer of -1 tokens"),
        (4, -0.5, "factor is -0.5; it must not be negative"),
        (4, float("nan"), "factor is nan"),
    ],
)
def test_overlong_penalty_impossible_buffer_or_factor_is_refused(buffer, factor, says):
    with pytest.raises(ConfigError, match=says):
        overlong_penalty(np.array([1]), max_tokens=10, buffer=buffer, factor=factor)


def test_stop_properly_lowers_truncated_rewards_of_either_sign():
    rewards, truncated = np.array([2.0, -2.0, 0.0, 2.0, -2.0]), np.array([True, True, True, False, False])
    # 2 - 0.75 * 2 = 0.5, a quarter of it; -2 - 0.75 * 2 = -3.5: worse, not better.
    assert stop_properly(rewards, truncated, coef=0.25).tolist() == [0.5, -3.5, 0, 2, -2]


@pytest.mark.parametrize(("coef", "expected"), [(1.0, [2, -2]), (0.0, [0, -4]), (-0.5, [-0.5, -2]), (-3.0, [-3, -3])])
def test_stop_properly_bounds_of_the_coefficient(coef, expected):
    assert stop_properly(np.array([2.0, -2.0]), np.array([True, True]), coef=coef).tolist() == expected


@pytest.mark.parametrize("coef", [1.5, float("nan")])
def test_stop_properly_coefficient_that_would_reward_truncation_is_refused(coef):
    with pytest.raises(ConfigError, match=r"must be at most 1\n\nhint: 0 to 1"):
        stop_properly(np.array([1.0]), np.array([True]), coef=coef)


def test_clip_rewards_counts_what_was_outside():
    clipped, num_clipped = clip_rewards(np.array([-12.0, -10.0, 0.5, 10.0, 11.0]), -10.0, 10.0)
    assert clipped.tolist() == [-10, -10, 0.5, 10, 10]
    assert num_clipped == 2  # a reward on the bound is not changed


@pytest.mark.parametrize(("low", "high"), [(1.0, 1.0), (2.0, 1.0), (float("nan"), 1.0)])
def test_clip_rewards_empty_range_is_refused(low, high):
    with pytest.raises(ConfigError, match=r"is empty\n\nhint: give the smaller number first"):
        clip_rewards(np.array([0.0]), low, high)


def test_running_moments_by_hand():
    moments = RunningMoments()
    moments.update(np.array([1.0, 2.0]))
    moments.update(np.array([6.0]))
    # Mean 9/3 = 3; squared distances 4 + 1 + 9 = 14; deviation sqrt(14 / 2) = sqrt(7).
    assert (moments.count, moments.mean) == (3, pytest.approx(3.0))
    assert moments.deviation == pytest.approx(7**0.5)
    assert moments.normalize(np.array([3.0, 10.0])) == pytest.approx([0.0, 7**0.5])


@pytest.mark.parametrize("sizes", [[1000], [1] * 1000, [0, 999, 0, 1], [300, 700]])
def test_running_moments_do_not_depend_on_the_batches(sizes):
    # A mean of a million deviations: the sum of squares minus the squared sum would lose every digit.
    values = 1e6 + np.random.default_rng(0).normal(size=1000)
    moments = RunningMoments()
    for batch in np.split(values, np.cumsum(sizes)[:-1]):
        moments.update(batch)
    assert moments.count == 1000
    assert moments.mean == pytest.approx(values.mean(), rel=1e-14)
    assert moments.deviation == pytest.approx(values.std(ddof=1), rel=1e-8)


def test_running_moments_without_a_spread_only_shift():
    moments = RunningMoments()
    assert moments.normalize(np.array([2.0])).tolist() == [2.0]  # nothing seen: nothing to shift by
    moments.update(np.array([2.0]))
    assert moments.normalize(np.array([2.0, 5.0])).tolist() == [0.0, 3.0]
    moments.update(np.array([2.0, 2.0]))
    assert moments.normalize(np.array([2.0, 5.0])).tolist() == [0.0, 3.0]


def test_running_moments_of_equal_values_have_no_deviation_for_all_rounding():
    moments = RunningMoments()
    for _ in range(3):
        moments.update(np.full(7, 0.1))  # 0.1 is no binary number: the means of 7 and of 21 of them differ
    assert moments.deviation == 0.0
    assert moments.normalize(np.array([0.1])) == pytest.approx([0.0], abs=1e-15)


def test_running_moments_of_no_values_stay_as_they_were():
    moments = RunningMoments()
    moments.update(np.array([]))
    assert (moments.count, moments.mean, moments.deviation) == (0, 0.0, 0.0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_running_moments_not_finite_value_is_refused_and_leaves_no_trace(value):
    moments = RunningMoments()
    with pytest.raises(DataError, match="1 of 2 values are not finite"):
        moments.update(np.array([1.0, value]))
    moments.update(np.array([1.0, 3.0]))
    assert (moments.count, moments.mean, moments.deviation) == (2, 2.0, pytest.approx(2**0.5))
