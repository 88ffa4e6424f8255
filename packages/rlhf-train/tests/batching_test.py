"""The batch plan: nothing twice, nothing lost, and the same updates for every split."""

import itertools

import numpy as np
import pytest

from rlhf_data.errors import DataError
from rlhf_train.batching import pass_fill, plan_batches

LENGTHS = [30, 12, 25, 18, 40, 22, 9, 33, 27, 16]
RESPONSES = [10, 0, 5, 8, 20, 2, 9, 13, 7, 6]


def plan(num_ranks: int, micro: int, seed: int = 1, tokens: int | None = None):
    return plan_batches(
        LENGTHS,
        RESPONSES,
        num_ranks=num_ranks,
        num_mini_batches=2,
        micro_train_batch_size=micro,
        micro_rollout_batch_size=3,
        max_response_tokens=20,
        seed=seed,
        micro_batch_tokens=tokens,
    )


def members(plans) -> list[set[int]]:
    """The rollouts of each update, over all ranks."""
    return [
        {rank.rows[row] for rank in plans for rows in rank.mini_batches[step].micro_batches for row in rows}
        for step in range(len(plans[0].mini_batches))
    ]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("micro", [1, 2, 7])
def test_plan_batches_split_does_not_change_the_optimizer_steps(num_ranks, micro):
    plans = plan(num_ranks, micro)
    assert members(plans) == members(plan(1, 10))
    assert [batch.denominators for batch in plans[0].mini_batches] == [
        b.denominators for b in plan(1, 10)[0].mini_batches
    ]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_plan_batches_covers_every_rollout_once_and_keeps_ranks_in_step(num_ranks):
    plans = plan(num_ranks, 2)
    assert sorted(row for rank in plans for row in rank.rows) == list(range(len(LENGTHS)))
    for rank in plans:
        assert sorted(row for rows in rank.forward_batches for row in rows) == list(range(len(rank.rows)))
    for step in range(2):
        assert len({len(rank.mini_batches[step].micro_batches) for rank in plans}) == 1
    assert len({len(rank.forward_batches) for rank in plans}) == 1


@pytest.mark.parametrize(
    ("num_ranks", "micro", "expected"),
    [
        (1, 2, 232 / (6 * 80)),  # two updates of five rollouts, in three passes each
        (2, 2, 232 / (8 * 80)),  # two passes of each rank in each update, and one of them has one rollout
        (1, 5, None),
    ],
)
def test_pass_fill_is_the_share_of_full_passes(num_ranks, micro, expected):
    fill = pass_fill(plan(num_ranks, micro), LENGTHS, 80)
    assert fill == (expected if expected is None else pytest.approx(expected))


@pytest.mark.parametrize(("micro", "expected"), [(1, 20 + 13 + 10), (4, 20 + 13 + 10 + 9), (10, 80)])
def test_plan_batches_largest_pass_is_that_of_the_longest_responses_for_any_number_of_ranks(micro, expected):
    # Forward passes have 3 rows, updates `micro`.
    assert {rank.max_pass_tokens for num_ranks in (1, 2, 3) for rank in plan(num_ranks, micro)} == {expected}


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_plan_batches_by_tokens_makes_few_passes_within_the_limit(num_ranks):
    plans = plan(num_ranks, 1, tokens=60)
    assert members(plans) == members(plan(1, 10))
    assert {rank.max_pass_tokens for rank in plans} == {60}  # of 80 trained tokens
    for rank in plans:
        for passes in (rank.forward_batches, *(batch.micro_batches for batch in rank.mini_batches)):
            tokens = [sum(LENGTHS[rank.rows[row]] for row in rows) for rows in passes]
            assert max(tokens) <= 60
            if num_ranks == 1:
                assert len(passes) == -(-sum(tokens) // 60)  # these lengths fit into as few passes as there can be
    for step in range(2):
        assert len({len(rank.mini_batches[step].micro_batches) for rank in plans}) == 1
    with pytest.raises(DataError, match="more than the budget of 39"):
        plan(num_ranks, 1, tokens=39)


def test_plan_batches_ranks_get_equal_costs_and_the_same_updates():
    lengths, costs = [40, 30, 20, 10], [100, 1, 98, 2]

    def split(*weights):
        return plan_batches(
            lengths, [5, 4, 3, 2], *weights, num_ranks=2, num_mini_batches=1, micro_train_batch_size=4,
            micro_rollout_batch_size=4, max_response_tokens=9, seed=1, micro_batch_tokens=70,
        )  # fmt: skip

    assert {tuple(sorted(rank.rows)) for rank in split()} == {(0, 3), (1, 2)}
    by_cost = split(costs)
    assert {tuple(sorted(rank.rows)) for rank in by_cost} == {(0, 1), (2, 3)}
    assert all(lengths[rank.rows[0]] >= lengths[rank.rows[1]] for rank in by_cost)  # rows of similar lengths together
    assert members(by_cost) == members(split())
    assert [rank.mini_batches[0].denominators for rank in by_cost] == [r.mini_batches[0].denominators for r in split()]
    assert split(lengths) == split() == split([1000 * length for length in lengths])


def test_plan_batches_denominators_count_tokens_and_nonempty_rollouts():
    totals = [batch.denominators for batch in plan(1, 10)[0].mini_batches]
    assert sum(d.num_tokens for d in totals) == sum(RESPONSES)
    assert sum(d.num_sequences for d in totals) == 9  # one response is empty
    assert {d.max_tokens for d in totals} == {20}


def test_plan_batches_seed_decides_the_order():
    assert members(plan(1, 10, seed=1)) == members(plan(1, 10, seed=1))
    assert members(plan(1, 10, seed=1)) != members(plan(1, 10, seed=2))


def test_plan_batches_more_ranks_than_rollouts_leaves_empty_micro_batches():
    plans = plan_batches(
        [5], [3], num_ranks=2, num_mini_batches=1, micro_train_batch_size=1, micro_rollout_batch_size=1,
        max_response_tokens=3, seed=0,
    )  # fmt: skip
    assert [rank.mini_batches[0].micro_batches for rank in plans] == [((0,),), ((),)]


def test_plan_batches_too_few_rollouts_is_refused():
    with pytest.raises(ValueError, match="1 rollouts cannot fill 2"):
        plan_batches(
            [5], [3], num_ranks=1, num_mini_batches=2, micro_train_batch_size=1, micro_rollout_batch_size=1,
            max_response_tokens=3, seed=0,
        )  # fmt: skip


# Ten rollouts of four prompts. A prompt of 5 tokens is in all their lengths, and no two prompts are equal.
PROMPT_OF = [0, 1, 2, 3, 0, 1, 2, 0, 1, 0]
PROMPTS = [np.arange(number, number + 5) for number in range(4)]


def shared_plan(num_ranks: int, micro: int, *, num_mini_batches: int = 1, tokens: int | None = None, seed: int = 1):
    return plan_batches(
        LENGTHS,
        RESPONSES,
        num_ranks=num_ranks,
        num_mini_batches=num_mini_batches,
        micro_train_batch_size=micro,
        micro_rollout_batch_size=10,
        max_response_tokens=20,
        seed=seed,
        micro_batch_tokens=tokens,
        prompts=[PROMPTS[number] for number in PROMPT_OF],
    )


def prompts_of(rank, rows) -> list[int]:
    return [PROMPT_OF[rank.rows[row]] for row in rows]


def changes(numbers: list[int]) -> int:
    return sum(one != other for one, other in itertools.pairwise(numbers))


@pytest.mark.parametrize("seed", range(5))
def test_rollouts_of_a_prompt_are_neighbours_in_the_order_of_a_rank(seed):
    (rank,) = shared_plan(1, 10, seed=seed)
    assert sorted(rank.rows) == list(range(10))
    assert changes(prompts_of(rank, range(10))) == 3
    assert changes(prompts_of(rank, rank.forward_batches[0])) == 3


@pytest.mark.parametrize("seed", range(5))
def test_mini_batches_cut_at_most_one_prompt_at_their_border(seed):
    (rank,) = shared_plan(1, 10, num_mini_batches=2, seed=seed)
    first, second = (set(prompts_of(rank, batch.micro_batches[0])) for batch in rank.mini_batches)
    assert [len(batch.micro_batches[0]) for batch in rank.mini_batches] == [5, 5]
    assert len(first & second) <= 1
    orders = {tuple(prompts_of(*shared_plan(1, 10, num_mini_batches=2, seed=seed), range(10))) for seed in range(9)}
    assert len(orders) > 2  # the seed draws prompts


def test_ranks_get_whole_prompts_where_their_numbers_allow_it():
    plans = shared_plan(2, 5)
    assert sorted(row for rank in plans for row in rank.rows) == list(range(10))
    numbers = [set(prompts_of(rank, range(len(rank.rows)))) for rank in plans]
    assert not numbers[0] & numbers[1]
    # More ranks than prompts: each rank still gets rollouts.
    assert all(rank.rows for rank in shared_plan(5, 5))


def test_passes_by_tokens_count_a_prompt_once():
    # 93 + 67 + 52 + 18 tokens, of which 3 + 2 + 1 copies of prompts of 5 tokens are not stored.
    for tokens, expected in ((202, 1), (201, 2)):
        (rank,) = shared_plan(1, 1, tokens=tokens)
        (batch,) = rank.mini_batches
        assert len(batch.micro_batches) == len(rank.forward_batches) == expected
        assert sorted(row for rows in batch.micro_batches for row in rows) == list(range(10))
        for rows in batch.micro_batches:
            numbers = prompts_of(rank, rows)
            copies = len(numbers) - len(set(numbers))
            assert sum(LENGTHS[rank.rows[row]] for row in rows) - 5 * copies <= tokens


def test_a_prompt_with_more_rollouts_than_a_pass_holds_is_divided():
    (rank,) = shared_plan(1, 1, tokens=60)
    for rows in rank.mini_batches[0].micro_batches:
        numbers = prompts_of(rank, rows)
        assert sum(LENGTHS[rank.rows[row]] for row in rows) - 5 * (len(numbers) - len(set(numbers))) <= 60
    with pytest.raises(DataError, match="more than the budget of 39"):
        shared_plan(1, 1, tokens=39)


def test_a_prompt_whose_rollouts_just_fill_a_pass_is_not_divided():
    (rank,) = plan_batches(
        [10, 10], [5, 5], num_ranks=1, num_mini_batches=1, micro_train_batch_size=1, micro_rollout_batch_size=1,
        max_response_tokens=5, seed=0, micro_batch_tokens=15, prompts=[PROMPTS[0]] * 2,
    )  # fmt: skip
    assert len(rank.forward_batches) == len(rank.mini_batches[0].micro_batches) == 1


@pytest.mark.parametrize(("second", "with_first"), [(8.0, 4), (10.0, 3)])
def test_copies_of_a_prompt_are_no_work(second, with_first):
    # Two rollouts of the first prompt cost 6 each, and 5 of their 20 tokens are a copy: 12 x 15 / 20 = 9 in all. Ranks
    # take prompts of 9, 8, 3 and 2, so that each has 11; or of 10, 9, 3 and 2, so that each has 12.
    plans = plan_batches(
        [10] * 5, [5] * 5, [6.0, 6.0, second, 3.0, 2.0], num_ranks=2, num_mini_batches=1, micro_train_batch_size=2,
        micro_rollout_batch_size=2, max_response_tokens=5, seed=0, prompts=[PROMPTS[i] for i in (0, 0, 1, 2, 3)],
    )  # fmt: skip
    assert {0, 1, with_first} in [set(rank.rows) for rank in plans]
