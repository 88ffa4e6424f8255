"""Rewards of steps, compared with all steps of their group, against numbers worked out by hand."""

import math

import numpy as np
import pytest

from rlhf_train.algorithms.group import relative_token_rewards

STEPS = [np.array([0.9, 0.5]), np.array([0.2]), np.zeros(0), np.array([0.1]), np.array([0.3, 0.4])]
STEP_GROUPS = ["a", "b", "a", "a", "b"]
# Group a has the steps 0.9, 0.5 and 0.1: mean 0.5, deviation sqrt(0.32 / 3). Group b has 0.2, 0.3, 0.4: mean 0.3,
# deviation sqrt(0.02 / 3).
DEVIATIONS = (math.sqrt(0.32 / 3) + 1e-6, math.sqrt(0.02 / 3) + 1e-6)


@pytest.mark.parametrize(
    ("baseline", "options", "expected"),
    [
        ("none", {}, [[0.9, 0.5], [0.2], [], [0.1], [0.3, 0.4]]),
        ("group_mean", {}, [[0.4, 0.0], [-0.1], [], [-0.4], [0.0, 0.1]]),
        ("group_mean_std", {"divide_by_std": False}, [[0.4, 0.0], [-0.1], [], [-0.4], [0.0, 0.1]]),
        (
            "group_mean_std",
            {},
            [
                [0.4 / DEVIATIONS[0], 0.0],
                [-0.1 / DEVIATIONS[1]],
                [],
                [-0.4 / DEVIATIONS[0]],
                [0.0, 0.1 / DEVIATIONS[1]],
            ],
        ),
        # The other rollouts' steps: 0.1 for the first, 0.9 and 0.5 for the fourth, 0.3 and 0.4 for the second.
        ("leave_one_out", {}, [[0.8, 0.4], [-0.15], [], [-0.6], [0.1, 0.2]]),
    ],
)
def test_rewards_of_steps_are_compared_with_all_steps_of_the_group(baseline, options, expected):
    relative = relative_token_rewards(STEPS, STEP_GROUPS, baseline, **options)
    assert [own.dtype for own in relative] == [np.float64] * 5
    for own, wanted in zip(relative, expected, strict=True):
        assert own.tolist() == pytest.approx(wanted, rel=1e-12, abs=1e-12)


def test_rewards_of_steps_without_another_to_compare_with_are_zero_and_none_stay_none():
    assert [own.tolist() for own in relative_token_rewards([np.array([0.9])], ["a"], "leave_one_out")] == [[0.0]]
    assert [own.tolist() for own in relative_token_rewards([np.array([0.9])], ["a"], "group_mean_std")] == [[0.0]]
    assert [own.tolist() for own in relative_token_rewards([np.zeros(0)] * 2, ["a", "a"], "group_mean")] == [[], []]
    assert relative_token_rewards([], [], "group_mean") == []
