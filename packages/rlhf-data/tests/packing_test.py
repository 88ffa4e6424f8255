"""Packing and splitting: hand-derived bins, losslessness, balance, and what cannot be packed."""

import numpy as np
import pytest

from rlhf_data.errors import ConfigError, DataError
from rlhf_data.packing import pack, split_balanced


def test_pack_needs_as_many_bins_as_best_fit_and_spreads_items_evenly():
    # Budget 10, best fit by length: 7 + 3, 6 + 4, 2. Spread over three: 7; 6, then 2; 4, then 3.
    assert pack([6, 2, 7, 3, 4], 10) == [[0, 1], [2], [3, 4]]


def test_pack_keeps_the_best_fit_where_an_even_spread_exceeds_the_budget():
    # Best fit: 5 + 5, 4 + 3 + 3. Spread: 5, then 4; 5, then 3, then 3.
    assert pack([4, 5, 3, 5, 3], 10) == [[0, 2, 4], [1, 3]]


def test_pack_best_fit_puts_each_item_into_the_fullest_bin_that_takes_it():
    # 6 -> A (4 left); 5 -> B (5 left); 4 fits both and goes to A, the fuller; 3 -> B; 2 -> B. Spread B would have 11.
    assert pack([6, 5, 4, 3, 2], 10) == [[0, 2], [1, 3, 4]]


def test_pack_ties_are_broken_by_index():
    assert pack([5, 5, 5, 5], 10) == [[0, 2], [1, 3]]


@pytest.mark.parametrize("seed", range(5))
def test_pack_many_short_items_gives_bins_of_nearly_equal_tokens(seed):
    lengths = np.random.default_rng(seed).integers(50, 350, size=512)
    sums = [int(lengths[items].sum()) for items in pack(lengths, 8192)]
    assert max(sums) - min(sums) < 100


@pytest.mark.parametrize("seed", range(5))
def test_pack_spreads_items_evenly_also_where_hardly_a_token_is_left(seed):
    # The spread alone exceeds the budget by 2 to 5 tokens; the best fit has a bin of 24 items and one of 125.
    lengths = np.random.default_rng(seed).integers(20, 350, size=512)
    budget = -(-int(lengths.sum()) // 12) + 4
    bins = pack(lengths, budget)
    assert len(bins) == 12 and max(int(lengths[items].sum()) for items in bins) <= budget
    assert max(map(len, bins)) - min(map(len, bins)) < 10


@pytest.mark.parametrize("seed", range(5))
def test_pack_random_lengths_is_lossless_within_budget_and_near_optimal(seed):
    lengths = np.random.default_rng(seed).integers(1, 513, size=400)
    bins = pack(lengths, 512)
    assert sorted(index for items in bins for index in items) == list(range(400))
    assert max(int(lengths[items].sum()) for items in bins) <= 512
    assert len(bins) <= 11 / 9 * -(-int(lengths.sum()) // 512) + 1
    assert bins == pack(lengths, 512)


def test_pack_no_items_gives_no_bins():
    assert pack([], 8) == []


def test_pack_item_at_the_budget_fits_and_above_it_is_refused():
    assert pack([8], 8) == [[0]]
    with pytest.raises(
        DataError, match=r"sequence 1 has 9 tokens, more than the budget of 8\n\nhint: raise .* least 9"
    ):
        pack([3, 9], 8)


@pytest.mark.parametrize("length", [0, -1])
def test_pack_item_without_tokens_is_refused(length):
    with pytest.raises(DataError, match=f"sequence 1 has {length} tokens"):
        pack([3, length], 8)
    with pytest.raises(DataError, match="one-dimensional"):
        pack([[3]], 8)


def test_split_balanced_gives_the_longest_to_the_lightest():
    # 9 -> A; 8 -> B; 2 -> B (10); 1 -> A (10).
    assert split_balanced([1, 2, 8, 9], 2) == [[0, 3], [1, 2]]


def test_split_balanced_full_share_takes_no_more():
    # 9 -> A; 1 -> B; 1 -> B, which is full; the last goes to A, however much it has.
    assert split_balanced([9, 1, 1, 1], 2) == [[0, 3], [1, 2]]


def test_split_balanced_leaves_no_share_short_when_one_item_outweighs_the_rest():
    # Ten items for four shares: two of three and two of two, though 100 alone is more than all the others.
    assert sorted(map(len, split_balanced([100] + [1] * 9, 4))) == [2, 2, 3, 3]


@pytest.mark.parametrize(("num_items", "num_parts"), [(8, 4), (9, 4), (11, 4), (4, 4), (64, 8), (7, 1)])
def test_split_balanced_every_index_once_and_sizes_within_one(num_items, num_parts):
    lengths = np.random.default_rng(num_items).integers(1, 100, size=num_items)
    parts = split_balanced(lengths, num_parts)
    assert sorted(index for part in parts for index in part) == list(range(num_items))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert parts == split_balanced(lengths, num_parts)


def test_split_balanced_fewer_items_than_ranks_is_refused():
    with pytest.raises(ConfigError, match="2 sequences cannot be split over 3 ranks\n\nhint: "):
        split_balanced([1, 1], 3)
