"""Baselines of episodes: several rollouts count as one episode, and turns are compared with the same turn of others."""

import random
import statistics
import tracemalloc
from functools import partial

import numpy as np
import pytest

from rlhf_train.algorithms.group import (
    leave_one_out,
    relative_rewards,
    relative_token_rewards,
    relative_turn_rewards,
)

BASELINES = ["none", "group_mean", "group_mean_std", "leave_one_out"]


def test_rollouts_of_one_episode_count_as_one_in_the_baseline():
    # Three episodes with rewards 1, 4 and 7; the first one has three rollouts, and all of them have its reward.
    rewards, group_ids, episode_ids = np.array([1.0, 1.0, 1.0, 4.0, 7.0]), ["g"] * 5, ["a", "a", "a", "b", "c"]
    centred = relative_rewards(rewards, group_ids, "group_mean", episode_ids=episode_ids)
    np.testing.assert_allclose(centred, [-3, -3, -3, 0, 3], atol=1e-12)
    normalized = relative_rewards(rewards, group_ids, "group_mean_std", episode_ids=episode_ids)
    np.testing.assert_allclose(normalized, np.array([-3, -3, -3, 0, 3]) / (6**0.5 + 1e-6), atol=1e-12)
    others = relative_rewards(rewards, group_ids, "leave_one_out", episode_ids=episode_ids)
    np.testing.assert_allclose(others, [1 - 5.5] * 3 + [0.0, 7 - 2.5], atol=1e-12)


def test_leave_one_out_compares_with_the_mean_rewards_of_the_other_episodes():
    # Episode a has rollouts of rewards 1 and 3, so that it counts as 2 for b; b counts as 5 for both of a's.
    assert leave_one_out(np.array([1.0, 3.0, 5.0]), ["g"] * 3, ["a", "a", "b"]).tolist() == [-4.0, -2.0, 3.0]
    assert leave_one_out(np.array([1.0, 3.0]), ["g"] * 2, ["a", "a"]).tolist() == [0.0, 0.0]


def test_rewards_of_steps_count_an_episode_once():
    # Episode a has two rollouts, with steps 1 and 5, 3: half of 1 + 5 + 3 over half of 3 steps. Episode b has 7.
    steps = [np.array([1.0]), np.array([5.0, 3.0]), np.array([7.0])]
    ids = {"group_ids": ["g"] * 3, "episode_ids": ["a", "a", "b"]}
    mean = (4.5 + 7) / 2.5
    for baseline, other_a, other_b in (("group_mean", mean, mean), ("leave_one_out", 7.0, 3.0)):
        found = relative_token_rewards(steps, baseline=baseline, **ids)
        expected = [1 - other_a, 5 - other_a, 3 - other_a, 7 - other_b]
        np.testing.assert_allclose(np.concatenate(found), expected, atol=1e-12, err_msg=baseline)
        assert [len(own) for own in found] == [1, 2, 1]
    std = ((0.5 * ((1 - mean) ** 2 + (5 - mean) ** 2 + (3 - mean) ** 2) + (7 - mean) ** 2) / 2.5) ** 0.5 + 1e-6
    found = relative_token_rewards(steps, baseline="group_mean_std", **ids)
    np.testing.assert_allclose(np.concatenate(found), (np.array([1, 5, 3, 7]) - mean) / std, atol=1e-12)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("baseline", BASELINES)
def test_relative_turn_rewards_match_the_formula_written_out(baseline, seed):
    rng = random.Random(seed)
    turn_gamma = rng.choice([0.0, 0.5, 1.0])
    group_ids, episode_ids, rewards, places = [], [], [], []
    for episode in range(12):
        group, number = rng.choice("ab"), 0
        for _ in range(rng.choice([1, 1, 2])):  # rollouts, whose turns are numbered on
            own = [rng.gauss(0, 1) for _ in range(rng.randrange(4))]
            group_ids.append(group)
            episode_ids.append(str(episode))
            rewards.append(own)
            places.append([(group, number + turn) for turn in range(len(own))])
            number += len(own)
    to_go = [[sum(turn_gamma**j * r for j, r in enumerate(own[k:])) for k in range(len(own))] for own in rewards]
    found = relative_turn_rewards(
        [np.array(own) for own in rewards], group_ids, baseline, turn_gamma=turn_gamma, episode_ids=episode_ids
    )
    assert [len(own) for own in found] == [len(own) for own in rewards]
    flat = [(place, value) for row in zip(places, to_go, strict=True) for place, value in zip(*row, strict=True)]
    for own, row, values in zip(found, places, to_go, strict=True):
        for turn, (place, value) in enumerate(zip(row, values, strict=True)):
            rivals = [other for at, other in flat if at == place]
            mean, count = statistics.fmean(rivals), len(rivals)
            wanted = {
                "none": value,
                "group_mean": value - mean,
                "group_mean_std": (value - mean) / (statistics.pstdev(rivals) + 1e-6) if count > 1 else 0.0,
                "leave_one_out": value - (count * mean - value) / (count - 1) if count > 1 else 0.0,
            }[baseline]
            advantage = sum(turn_gamma**j * reward for j, reward in enumerate(own[turn:]))
            assert advantage == pytest.approx(wanted, rel=1e-9, abs=1e-9)


def test_turns_without_another_to_compare_with_are_zero():
    compared = partial(relative_turn_rewards, turn_gamma=1.0)
    assert [own.tolist() for own in compared([np.array([3.0, 4.0])], ["a"], "group_mean_std")] == [[0, 0]]
    assert compared([], [], "group_mean") == []
    [one, none] = compared([np.array([3.0]), np.zeros(0)], ["a", "a"], "leave_one_out")
    assert (one.tolist(), none.tolist()) == ([0.0], [])
    with pytest.raises(ValueError, match="did you mean `group_mean`"):
        compared([np.array([3.0])], ["a"], "group_men")


def test_states_are_compared_whatever_their_length_and_type_within_their_group_and_need_little_memory():
    long = bytes(100_000)
    states = [[long, 1], [long, "1"], [long, "1"], [long + b"1"]]  # the last one in another group
    rewards = [np.array([0.0, 1.0]), np.array([0.0, 3.0]), np.array([0.0, 5.0]), np.array([9.0])]
    tracemalloc.start()
    found = relative_turn_rewards(
        rewards, ["a", "a", "a", "b"], "group_mean", turn_gamma=0.0, states=states, of_episodes=np.array([7, 0, 0, 2])
    )
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [own.tolist() for own in found] == [[7, 7], [0, -1], [0, 1], [2]]
    assert peak < 1e6  # bytes; strings of the states have 2.8 MB
