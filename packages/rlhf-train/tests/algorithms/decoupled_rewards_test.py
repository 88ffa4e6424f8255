"""Several rewards, each compared within its group before they are added: values by hand, and the formula in floats."""

import random
import statistics

import numpy as np
import pytest

from rlhf_train.algorithms.group import decoupled_rewards


def test_decoupled_rewards_compare_the_rewards_of_those_that_have_one():
    # The first source scores group a and one of b, the second b. A reward alone in its group is compared with nothing.
    none = float("nan")
    rewards = np.array([[0.0, none], [2.0, none], [5.0, 1.0], [none, 3.0], [none, 5.0]])
    found = decoupled_rewards(rewards, [1.0, 10.0], ["a", "a", "b", "b", "b"], over_batch=False)
    assert np.allclose(found, [-1, 1, -10 * 1.5**0.5, 0, 10 * 1.5**0.5], atol=1e-4)
    # The two rollouts of the first episode weigh as much as the one of the second: mean and deviation 1.5.
    options = {"over_batch": False, "episode_ids": ["e", "e", "f", "g"]}
    found = decoupled_rewards(np.array([[0.0], [0.0], [3.0], [none]]), [1.0], ["a"] * 4, **options)
    assert np.allclose(found, [-1, -1, 1, 0], atol=1e-4)


@pytest.mark.parametrize("seed", range(5))
def test_decoupled_rewards_match_the_formula_written_out(seed):
    rng = random.Random(seed)
    ids = [rng.choice("abcde") for _ in range(30)]
    rewards = [[rng.gauss(0, 1), rng.gauss(5, 100), float(rng.random() < 0.5)] for _ in ids]
    weights = [0.5, 2.0, -1.0]
    sums = []
    for own, row in zip(ids, rewards, strict=True):
        total = 0.0
        for source, weight in enumerate(weights):
            group = [other[source] for name, other in zip(ids, rewards, strict=True) if name == own]
            total += weight * (row[source] - statistics.fmean(group)) / (statistics.pstdev(group) + 1e-6)
        sums.append(total)
    mean, deviation = statistics.fmean(sums), statistics.pstdev(sums)
    expected = [(total - mean) / (deviation + 1e-6) for total in sums]
    assert np.allclose(decoupled_rewards(np.array(rewards), weights, ids), expected, rtol=1e-12, atol=1e-12)


def test_decoupled_rewards_of_groups_that_say_nothing_are_exactly_zero():
    # a: equal rewards, b: one rollout, c: the second source alone says something.
    rewards = np.array([[0.1, 7.0], [0.1, 7.0], [5.0, 9.0], [2.0, 0.0], [2.0, 4.0]])
    result = decoupled_rewards(rewards, [1.0, 1.0], ["a", "a", "b", "c", "c"], over_batch=False)
    assert result.tolist()[:3] == [0.0] * 3
    assert result.tolist()[3:] == pytest.approx([-1.0, 1.0], abs=1e-5)
    assert decoupled_rewards(rewards[:3], [1.0, 1.0], ["a", "a", "b"]).tolist() == [0.0] * 3
    assert decoupled_rewards(np.zeros((0, 2)), [1.0, 1.0], []).tolist() == []
