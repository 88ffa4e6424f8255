"""Assignment of sequences to batches: bins under a token budget, and shares of equal work per rank.

All functions are deterministic and assign every sequence exactly once.
"""

import bisect
import heapq
from collections.abc import Sequence

import numpy as np

from rlhf_data.errors import ConfigError, DataError


def pack(lengths: Sequence[int] | np.ndarray, budget_tokens: int) -> list[list[int]]:
    """Return bins of indices such that no bin exceeds the budget and every index is in exactly one bin.

    Best-fit decreasing gives the number of bins: the longest item first, each into the fullest bin that has room. This
    is at most 11/9 of the optimum plus one. The items are then spread evenly over that many bins, longest first, each
    into the bin with the fewest tokens, so that passes over the bins take equally long. If a bin then exceeds the
    budget, items are exchanged between bins; if that does not help either, the best-fit bins are kept.

    Args:
        lengths: [N] tokens per item, each at least 1.
        budget_tokens: largest number of tokens per bin.

    Returns:
        The bins in the order of their smallest index, each in ascending order. No items give no bins.

    Raises:
        DataError: an item is longer than the budget, or shorter than one token.

    Source: Johnson 1973, Near-optimal bin packing algorithms, MIT; Graham 1969, as in `split_balanced`.
    """
    lengths = _checked(lengths)
    if not len(lengths):
        return []
    longest = int(lengths.argmax())
    if lengths[longest] > budget_tokens:
        message = f"sequence {longest} has {lengths[longest]} tokens, more than the budget of {budget_tokens}"
        hint = f"raise the token budget to at least {lengths[longest]}, or leave longer sequences out"
        raise DataError(message, hint=hint)
    order = np.argsort(-lengths, kind="stable").tolist()
    tightest = _best_fit(lengths, order, budget_tokens)
    even = _spread(lengths, order, len(tightest))
    bins = even if _fit(lengths, even, budget_tokens) else tightest
    return sorted((sorted(items) for items in bins), key=lambda items: items[0])


def _best_fit(lengths: np.ndarray, order: Sequence[int], budget_tokens: int) -> list[list[int]]:
    bins: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (tokens left, bin), ascending
    for index in order:
        length = int(lengths[index])
        fullest = bisect.bisect_left(free, (length, -1))
        if fullest == len(free):
            bisect.insort(free, (budget_tokens - length, len(bins)))
            bins.append([index])
        else:
            left, number = free.pop(fullest)
            bisect.insort(free, (left - length, number))
            bins[number].append(index)
    return bins


def _spread(lengths: np.ndarray, order: Sequence[int], num_bins: int) -> list[list[int]]:
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    tokens = [(0, number) for number in range(num_bins)]  # a heap
    for index in order:
        count, number = tokens[0]
        heapq.heapreplace(tokens, (count + int(lengths[index]), number))
        bins[number].append(index)
    return bins


def _fit(lengths: np.ndarray, bins: list[list[int]], budget_tokens: int) -> bool:
    """Exchange items of the fullest bin for shorter ones of the emptiest until no bin exceeds the budget.

    Return whether that succeeded. Each exchange leaves the emptiest bin within the budget.
    """
    tokens = [int(lengths[items].sum()) for items in bins]
    while max(tokens) > budget_tokens:
        fullest = tokens.index(max(tokens))
        emptiest = tokens.index(min(tokens))
        # gains[i, j]: tokens that the fullest bin loses if its item i and item j of the emptiest bin change places. An
        # exchange helps if it brings the fullest bin within the budget and keeps the emptiest one within it.
        gains = lengths[bins[fullest]][:, None] - lengths[bins[emptiest]]
        helps = (gains >= tokens[fullest] - budget_tokens) & (gains <= budget_tokens - tokens[emptiest])
        if not helps.any():
            return False
        one, other = np.argwhere(helps)[0]
        gain = int(gains[one, other])
        bins[fullest][one], bins[emptiest][other] = bins[emptiest][other], bins[fullest][one]
        tokens[fullest] -= gain
        tokens[emptiest] += gain
    return True


def split_balanced(weights: Sequence[float] | np.ndarray, num_parts: int) -> list[list[int]]:
    """Return a share of the indices for each rank, with nearly equal sums of weights by a greedy split.

    Items are taken heaviest first. Each goes to the lightest share so far, among the shares that may take another item:
    the numbers of items per share differ by at most one.

    Args:
        weights: [N] tokens or cost per item, each at least 1.
        num_parts: number of ranks.

    Returns:
        `num_parts` lists in ascending order, which together hold every index exactly once.

    Raises:
        ConfigError: fewer items than parts.

    Source: Graham 1969, Bounds on multiprocessing timing anomalies (longest processing time first).
    """
    weights = _checked(weights, np.float64)
    if num_parts < 1 or len(weights) < num_parts:
        message = f"{len(weights)} sequences cannot be split over {num_parts} ranks"
        raise ConfigError(message, hint="use a larger batch or fewer data-parallel ranks")
    smallest, larger = divmod(len(weights), num_parts)
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    sums = [0.0] * num_parts
    for index in np.argsort(-weights, kind="stable").tolist():
        # Only `larger` of the shares may have one item more than the others.
        limit = smallest + (sum(len(part) > smallest for part in parts) < larger)
        open_ranks = (rank for rank in range(num_parts) if len(parts[rank]) < limit)
        rank = min(open_ranks, key=lambda rank: (sums[rank], len(parts[rank]), rank))
        parts[rank].append(index)
        sums[rank] += float(weights[index])
    return [sorted(part) for part in parts]


def _checked(lengths: Sequence[float] | np.ndarray, dtype: type[np.number] = np.int64) -> np.ndarray:
    array = np.asarray(lengths, dtype=dtype)
    if array.ndim != 1:
        raise DataError(f"lengths must be one-dimensional, got shape {array.shape}")
    if len(array) and array.min() < 1:
        raise DataError(f"sequence {int(array.argmin())} has {array.min():g} tokens; the least is 1")
    return array
