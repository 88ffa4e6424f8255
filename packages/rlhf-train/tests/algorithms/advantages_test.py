"""Token rewards, generalised advantages, whitening and group comparison, against numbers worked out by hand."""

import numpy as np
import pytest
import torch

from rlhf_data.errors import DataError
from rlhf_train.algorithms.gae import (
    distilled_advantages,
    generalized_advantages,
    moments,
    rewards_at_tokens,
    rewards_to_go,
    token_rewards,
    turn_starts,
    whiten,
)
from rlhf_train.algorithms.group import (
    best_and_worst,
    best_gain,
    group_normalized,
    leave_one_out,
    relative_rewards,
)

F64 = torch.float64


def test_rewards_without_turns_are_whole_at_the_last_trained_token():
    mask = torch.tensor([[False, True, True, False], [False, True, False, False], [False, False, False, False]])
    placed = rewards_at_tokens(torch.tensor([5.0, 7.0, 9.0], dtype=F64), torch.zeros(3, 4, dtype=F64), mask)
    # The third rollout trains nothing, so that its reward has no place.
    assert placed.tolist() == [[0, 0, 5, 0], [0, 7, 0, 0], [0, 0, 0, 0]] and placed.dtype == F64


def test_rewards_by_turn_are_at_the_turns_last_tokens_and_the_rest_at_the_end():
    # Two turns of two tokens with one of the environment between: they earned 2 and -0.5, in all 1.5.
    mask = torch.tensor([[False, True, True, False, True, True, False]] * 3)
    turns = torch.zeros(3, 7, dtype=F64)
    turns[:, 2], turns[:, 5] = 2.0, -0.5
    # The second rollout's reward is 1 less by comparison with its group; the first turn's end of the third drops out.
    mask[2, 2] = False
    placed = rewards_at_tokens(torch.tensor([1.5, 0.5, 1.5], dtype=F64), turns, mask)
    assert placed.tolist() == [[0, 0, 2, 0, 0, -0.5, 0], [0, 0, 2, 0, 0, -1.5, 0], [0, 0, 0, 0, 0, 1.5, 0]]


def test_token_rewards_charge_the_kl_at_trained_tokens():
    mask = torch.tensor([[False, True, True, False], [False, False, False, False]])
    rewards = torch.tensor([[0, 0.25, 5.0, 0], [0, 0, 0, 0]], dtype=F64)
    charged = token_rewards(rewards, torch.full((2, 4), 2.0, dtype=F64), mask, kl_coef=0.1)
    torch.testing.assert_close(charged, torch.tensor([[0, 0.05, 4.8, 0], [0, 0, 0, 0]], dtype=F64))


def test_teachers_term_counts_for_its_own_token_and_not_for_those_before():
    # Log-probs of policy and teacher: the teacher finds the second token likelier, and the third one less likely.
    mask = torch.tensor([[False, True, True, False, True]])
    policy = torch.tensor([[0.0, -1.0, -2.0, 0.0, -0.5]], dtype=F64)
    teacher = torch.tensor([[0.0, -1.0, -0.5, 7.0, -3.0]], dtype=F64)
    advantages = torch.tensor([[0.0, 2.0, 2.0, 0.0, 2.0]], dtype=F64)
    both = distilled_advantages(advantages, policy - teacher, mask, teacher_coef=0.5)
    assert both.tolist() == [[0.0, 2.0, 2.75, 0.0, 0.75]]
    alone = distilled_advantages(torch.zeros_like(advantages), policy - teacher, mask, teacher_coef=1.0)
    assert alone.tolist() == [[0.0, 0.0, 1.5, 0.0, -2.5]]


def test_teachers_term_follows_the_gradient_of_the_reverse_kl():
    # Over all tokens of a vocabulary, E[A grad log p] with A = log q - log p is minus the gradient of KL(p || q).
    logits, teacher = torch.tensor([0.3, -1.0, 0.7, 0.1], dtype=F64, requires_grad=True), torch.randn(4, dtype=F64)
    logprobs, target = logits.log_softmax(0), teacher.log_softmax(0)
    mask = torch.ones(1, 4, dtype=torch.bool)
    reverse_kl = (logprobs - target).detach()[None]
    advantages = distilled_advantages(torch.zeros(1, 4, dtype=F64), reverse_kl, mask, teacher_coef=1.0)
    [ours] = torch.autograd.grad((logprobs.exp().detach() * advantages[0] * logprobs).sum(), logits, retain_graph=True)
    [exact] = torch.autograd.grad((logprobs.exp() * (logprobs - target)).sum(), logits)
    torch.testing.assert_close(ours, -exact)


def test_rewards_of_another_shape_are_refused():
    mask = torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match="shapes differ"):
        rewards_at_tokens(torch.zeros(2), torch.zeros(2, 4), mask)
    with pytest.raises(ValueError, match="shapes differ"):
        token_rewards(torch.zeros(2), torch.zeros(2, 3), mask, kl_coef=0.1)
    with pytest.raises(ValueError, match="shapes differ"):
        distilled_advantages(torch.zeros(2, 4), torch.zeros(2, 3), mask, teacher_coef=0.1)


def test_rewards_to_go_are_sums_of_what_follows():
    # Row 0 has its reward at the end, which every token gets. Row 1 earns 1 at token 0 and 4 at token 3, the first of a
    # turn; token 2 is the environment's.
    rewards = torch.tensor([[0.0, 0.0, 0.0, 2.0], [1.0, 0.0, 9.0, 4.0]])
    mask = torch.tensor([[True, True, True, True], [True, True, False, True]])
    whole = rewards_to_go(rewards.masked_fill(~mask, 0.0), mask, gamma=1.0)
    assert whole.tolist() == [[2.0, 2.0, 2.0, 2.0], [5.0, 4.0, 0.0, 4.0]]
    halved = rewards_to_go(rewards.masked_fill(~mask, 0.0), mask, gamma=0.5)
    assert halved.tolist() == [[0.25, 0.5, 1.0, 2.0], [2.0, 2.0, 0.0, 4.0]]
    starts = torch.tensor([[True, False, False, False], [True, False, False, True]])
    apart = rewards_to_go(rewards.masked_fill(~mask, 0.0), mask, gamma=1.0, starts=starts, turn_gamma=0.0)
    assert apart.tolist() == [[2.0, 2.0, 2.0, 2.0], [1.0, 0.0, 0.0, 4.0]]


def test_generalized_advantages_skip_environment_tokens_as_if_they_were_not_there():
    rewards, values = torch.tensor([[0.1, 0.2, 1.0]]), torch.tensor([[0.5, 0.4, 0.6]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    dense, _ = generalized_advantages(rewards, values, mask, gamma=0.9, lambd=0.5)
    spread = torch.tensor([[0, 1, 0, 0, 1, 0, 1, 0]], dtype=torch.bool)
    wide_rewards, wide_values = torch.full((1, 8), 99.0), torch.full((1, 8), -99.0)
    wide_rewards[spread], wide_values[spread] = rewards[0], values[0]
    sparse, returns = generalized_advantages(wide_rewards, wide_values, spread, gamma=0.9, lambd=0.5)
    assert torch.allclose(sparse[spread], dense[0])
    assert (sparse[~spread] == 0).all() and (returns[~spread] == 0).all()


def test_generalized_advantages_of_a_cut_rollout_go_on_with_the_last_value():
    # r = [0, 0, 1], V = [0.5, 0.4, 0.6], then V = 2 after the last token; gamma 0.9, lambda 0.5:
    # delta3 = 1 + 0.9*2 - 0.6 = 2.2         A3 = 2.2
    # delta2 = 0.9*0.6 - 0.4 = 0.14          A2 = 0.14 + 0.45*2.2 = 1.13
    # delta1 = 0.9*0.4 - 0.5 = -0.14         A1 = -0.14 + 0.45*1.13 = 0.3685
    # The second rollout ended by itself; in the third the last token is the environment's, and is skipped.
    rewards = torch.tensor([[0.0, 0.0, 1.0]]).repeat(3, 1)
    values = torch.tensor([[0.5, 0.4, 0.6]]).repeat(3, 1)
    mask = torch.ones(3, 3, dtype=torch.bool)
    rewards[2], mask[2] = torch.tensor([0.0, 1.0, 99.0]), torch.tensor([True, True, False])
    advantages, returns = generalized_advantages(
        rewards, values, mask, gamma=0.9, lambd=0.5, last_values=torch.tensor([2.0, 0.0, 2.0])
    )
    assert torch.allclose(advantages[:2], torch.tensor([[0.3685, 1.13, 2.2], [0.004, 0.32, 0.4]]))
    assert torch.allclose(returns[0], torch.tensor([0.8685, 1.53, 2.8]))
    # delta2 = 1 + 1.8 - 0.4 = 2.4           A1 = (0.36 - 0.5) + 0.45*2.4 = 0.94
    assert torch.allclose(advantages[2], torch.tensor([0.94, 2.4, 0.0]))


def test_generalized_advantages_of_one_token_and_of_none():
    one, _ = generalized_advantages(
        torch.tensor([[1.0]]), torch.tensor([[0.25]]), torch.ones(1, 1, dtype=torch.bool), gamma=0.5, lambd=0.5
    )
    assert one.item() == 0.75
    none, _ = generalized_advantages(torch.ones(1, 2), torch.ones(1, 2), torch.zeros(1, 2).bool(), gamma=1, lambd=1)
    assert none.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0)])
def test_generalized_advantages_of_no_rollouts_or_no_places_are_empty(shape):
    empty = torch.zeros(shape)
    results = generalized_advantages(empty, empty, empty.bool(), gamma=0.9, lambd=0.9, last_values=torch.ones(shape[0]))
    assert [result.shape for result in results] == [shape, shape]


def test_generalized_advantages_of_other_shapes_are_refused():
    two, three = torch.zeros(1, 2), torch.zeros(1, 3)
    with pytest.raises(ValueError, match="shapes differ"):
        generalized_advantages(two, three, two.bool(), gamma=0.9, lambd=0.9)


def test_whiten_over_ranks_equals_whiten_of_the_whole():
    torch.manual_seed(0)
    values, mask = torch.randn(4, 5) * 3 + 1, torch.rand(4, 5) < 0.6
    total = moments(values, mask)
    halves = moments(values[:1], mask[:1]) + moments(values[1:], mask[1:])
    assert torch.allclose(total, halves)
    whitened = whiten(values, mask, total)
    assert whitened[mask].mean().item() == pytest.approx(0.0, abs=1e-6)
    assert whitened[mask].std(correction=0).item() == pytest.approx(1.0, abs=1e-5)
    assert (whitened[~mask] == 0).all()


def test_whiten_gives_advantages_far_below_1_the_deviation_1():
    values, mask = torch.tensor([[0.01, 0.03]]), torch.ones(1, 2, dtype=torch.bool)
    assert whiten(values, mask, moments(values, mask))[0].tolist() == pytest.approx([-1.0, 1.0], rel=1e-5)


def test_whiten_without_deviation_only_centres_and_equal_values_become_zero():
    values, mask = torch.tensor([[1.0, 3.0]]), torch.ones(1, 2, dtype=torch.bool)
    centred = whiten(values, mask, moments(values, mask), divide_by_std=False)
    assert centred.tolist() == [[-1.0, 1.0]]
    same = torch.full((1, 2), 0.7)
    assert whiten(same, mask, moments(same, mask)).abs().max().item() < 1e-3


def test_group_normalized_matches_hand_values_by_id_not_by_position():
    # a: [0, 1, 2], mean 1, population deviation sqrt(2/3); b: [4, 8], mean 6, deviation 2. Interleaved on purpose.
    advantages = group_normalized(np.array([0.0, 4.0, 1.0, 8.0, 2.0]), ["a", "b", "a", "b", "a"])
    scale = np.sqrt(2 / 3)
    assert np.allclose(advantages, [-1 / scale, -1, 0, 1, 1 / scale], atol=2e-6)


def test_group_normalized_equal_rewards_and_single_samples_are_exactly_zero():
    assert group_normalized(np.array([0.1, 0.1, 0.1, 5.0]), ["a", "a", "a", "b"]).tolist() == [0.0] * 4


def test_group_normalized_differences_of_noise_stay_small_and_equal_ones_zero():
    # Deviation 5e-10: without the constant these would be -1 and 1. With it they are +-5e-10 / 1.0005e-6 = 0.0004998.
    noise = group_normalized(np.array([0.5, 0.5 + 1e-9]), ["a", "a"])
    assert np.abs(noise).max() < 0.01
    assert noise.tolist() == pytest.approx([-0.0004998, 0.0004998], rel=1e-3)
    assert group_normalized(np.array([0.5, 0.5]), ["a", "a"]).tolist() == [0.0, 0.0]
    assert np.isfinite(group_normalized(np.array([0.0, 1e-300, 7.0]), ["a", "a", "b"])).all()


def test_group_normalized_missing_ids_are_refused():
    with pytest.raises(ValueError, match="2 rewards, 1 group ids"):
        group_normalized(np.zeros(2), ["a"])


def test_leave_one_out_matches_hand_values_by_id_not_by_position():
    # a: 0, 1, 5: less the means of the others (3, 2.5, 0.5); b: 4, 8: less each other.
    advantages = leave_one_out(np.array([0.0, 4.0, 1.0, 8.0, 5.0]), ["a", "b", "a", "b", "a"])
    assert np.allclose(advantages, [-3.0, -4.0, -1.5, 4.0, 4.5])


def test_leave_one_out_equal_rewards_and_single_samples_are_exactly_zero():
    assert leave_one_out(np.array([0.1, 0.1, 0.1, 5.0]), ["a", "a", "a", "b"]).tolist() == [0.0] * 4


@pytest.mark.parametrize(
    ("baseline", "expected"),
    [
        ("none", [1.0, 3.0]),
        ("group_mean", [-1.0, 1.0]),
        ("group_mean_std", [-1 / 1.000001, 1 / 1.000001]),  # the deviation of 1 and 3 is 1
        ("leave_one_out", [-2.0, 2.0]),
        ("group_mean_batch_std", [-1 / 1.000001, 1 / 1.000001]),
        ("group_mean_ratio", [-1 / 2.000001, 1 / 2.000001]),
        ("group_max", [0.0, 2.0]),
        ("best_and_worst", [-2.0, 2.0]),
    ],
)
def test_relative_rewards_match_hand_values(baseline, expected):
    assert relative_rewards(np.array([1.0, 3.0]), ["a", "a"], baseline).tolist() == pytest.approx(expected, rel=1e-12)


def test_baselines_of_several_groups_match_hand_values():
    # Groups a: 0, 4, 1; b: 6, 6; c: 5 alone; d: -1, -3. All: mean 2.25, mean square 15.5, variance 10.4375.
    rewards, ids = np.array([0.0, 6.0, 4.0, 5.0, 1.0, 6.0, -1.0, -3.0]), [*"abacabdd"]
    mean = 5 / 3
    centred = np.array([-mean, 0, 4 - mean, 0, 1 - mean, 0, 1, -1])
    expected = {
        "group_mean_batch_std": centred / (10.4375**0.5 + 1e-6),
        "group_max": [0, 0, 3, 0, 0, 0, 2, 0],
        "best_and_worst": [-3, 0, 3, 0, 0, 0, 2, -2],
    }
    for baseline, values in expected.items():
        found = relative_rewards(rewards, ids, baseline)
        np.testing.assert_allclose(found, values, rtol=1e-12, atol=1e-12, err_msg=baseline)
        moved = relative_rewards(rewards[::-1], ids[::-1], baseline)[::-1]
        np.testing.assert_allclose(moved, found, rtol=1e-12, atol=1e-12)
    by_ratio = relative_rewards(np.array([*rewards[:6], 0.0, 0.0]), ids, "group_mean_ratio")
    np.testing.assert_allclose(by_ratio, [*centred[:6] / (mean + 1e-6), 0.0, 0.0], rtol=1e-12, atol=1e-12)
    with pytest.raises(DataError, match=r"a reward is -3, which is below 0\n\nhint: use rewards >= 0"):
        relative_rewards(rewards, ids, "group_mean_ratio")
    by_length = relative_rewards(rewards[[0, 2, 4]], ["a"] * 3, "group_mean_by_length", weights=np.array([2, 1, 5]))
    np.testing.assert_allclose(by_length, np.array([0, 4, 1]) - 9 / 8, rtol=1e-12)
    undivided = relative_rewards(rewards, ids, "group_mean_batch_std", divide_by_std=False)
    np.testing.assert_allclose(undivided, centred, rtol=1e-12, atol=1e-12)


def test_best_and_worst_count_the_rollouts_of_an_episode_as_one():
    # Episode x has the mean reward 3, y 5 and z 1: y gains 2, for both of its rollouts.
    rewards, ids, episodes = np.array([2.0, 4.0, 4.0, 6.0, 1.0]), ["g"] * 5, ["x", "x", "y", "y", "z"]
    assert best_gain(rewards, ids, episodes).tolist() == [0.0, 0.0, 2.0, 2.0, 0.0]
    assert best_and_worst(rewards, ids, episodes).tolist() == [0.0, 0.0, 5.0, 5.0, -5.0]
    # The first of equal ones.
    assert best_and_worst(np.array([1.0, 0.0, 1.0, 0.0]), ["g"] * 4).tolist() == [4.0, -4.0, 0.0, 0.0]


def test_relative_rewards_divide_only_where_the_baseline_says_so():
    rewards, ids = np.array([1.0, 5.0]), ["a", "a"]
    assert relative_rewards(rewards, ids, "group_mean").tolist() == [-2.0, 2.0]
    assert relative_rewards(rewards, ids, "group_mean_std").tolist() == pytest.approx([-1.0, 1.0], abs=1e-6)
    assert relative_rewards(rewards, ids, "group_mean_std", divide_by_std=False).tolist() == [-2.0, 2.0]


def test_relative_rewards_unknown_baseline_suggests_the_nearest():
    with pytest.raises(ValueError, match="did you mean `group_mean`"):
        relative_rewards(np.zeros(1), ["a"], "group_men")


@pytest.mark.parametrize("value", [123456789.1, -7e8 / 3, 0.1 + 1e6])
def test_group_normalized_large_equal_rewards_are_zero_though_their_mean_is_rounded(value):
    rewards = np.array([value] * 7)
    assert rewards.sum() / 7 != value  # what is left of the rounding is no deviation
    assert group_normalized(rewards, ["a"] * 7).tolist() == [0.0] * 7


def test_whiten_one_token_is_zero_and_none_stays_empty():
    mask = torch.tensor([[False, True]])
    one = torch.tensor([[9.0, 3.0]])
    for divide_by_std in (True, False):
        assert whiten(one, mask, moments(one, mask), divide_by_std=divide_by_std).tolist() == [[0.0, 0.0]]
    nothing = mask & ~mask
    assert whiten(one, nothing, moments(one, nothing)).tolist() == [[0.0, 0.0]]


def test_turns_start_at_their_first_trained_token():
    versions = torch.tensor([[-1, 0, 0, -1, 0, 0, 0, -1, 0], [-1, -1, -1, -1, 0, -1, -1, -1, -1]])
    mask = versions >= 0
    mask[0, 4] = False  # the first token of the second turn is excluded
    expected = torch.zeros_like(mask)
    expected[0, [1, 5, 8]] = True
    expected[1, 4] = True
    assert torch.equal(turn_starts(versions, mask), expected)


def test_turn_gamma_discounts_from_turn_to_turn_only():
    versions = torch.tensor([[-1, 0, 0, -1, 0, 0]])
    mask = versions >= 0
    rewards = torch.tensor([[0.0, 0.0, 1.0, 0.0, 0.0, 8.0]])
    starts = turn_starts(versions, mask)
    for turn_gamma, first in ((0.0, 1.0), (0.5, 5.0), (1.0, 9.0)):
        advantages, _ = generalized_advantages(
            rewards, torch.zeros(1, 6), mask, gamma=1.0, lambd=1.0, starts=starts, turn_gamma=turn_gamma
        )
        torch.testing.assert_close(advantages, torch.tensor([[0.0, first, first, 0.0, 8.0, 8.0]]))
