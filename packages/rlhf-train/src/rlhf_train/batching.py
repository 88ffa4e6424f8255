"""Which rollout is trained where and when: mini-batches, ranks and micro-batches as lists of indices. Torch-free.

The plan is made once per step, from lengths alone. What an update sees, and what its loss is divided by, depends on the
seed and the mini-batch size only, never on the number of ranks or the size of micro-batches.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlhf_data.packing import split_balanced


@dataclass(frozen=True, slots=True)
class Denominators:
    """What a loss is divided by: counts over all micro-batches, accumulation steps and ranks of one update.

    Attributes:
        num_tokens: tokens trained.
        num_sequences: rollouts with at least one such token.
        max_tokens: the longest response allowed; the constant of seq_mean_token_sum_norm.
    """

    num_tokens: int
    num_sequences: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """One rank's part of one update.

    Attributes:
        micro_batches: rows of the rank's shard, one tuple per forward-backward pass. Every rank has equally many; one
            that runs out of rows has empty tuples, for which it takes part in the collectives with a loss of zero.
        denominators: of the whole update, equal on all ranks, while no token has been left out.
    """

    micro_batches: tuple[tuple[int, ...], ...]
    denominators: Denominators


@dataclass(frozen=True, slots=True)
class RankPlan:
    """What one data-parallel rank does in one step.

    Attributes:
        rows: the rollouts of its shard, as indices into the step's rollouts.
        forward_batches: rows of the shard, one tuple per forward pass without gradient; equally many on every rank.
        mini_batches: its parts of the updates, in order.
    """

    rows: tuple[int, ...]
    forward_batches: tuple[tuple[int, ...], ...]
    mini_batches: tuple[MiniBatch, ...]


def plan_batches(
    num_tokens: Sequence[int],
    num_response_tokens: Sequence[int],
    *,
    num_ranks: int,
    num_mini_batches: int,
    micro_train_batch_size: int,
    micro_rollout_batch_size: int,
    max_response_tokens: int,
    seed: int,
) -> tuple[RankPlan, ...]:
    """Return one plan per rank; each rollout is in exactly one mini-batch of exactly one rank.

    Args:
        num_tokens: of each rollout, prompt included; what ranks are balanced by.
        num_response_tokens: trained tokens of each rollout.
        num_ranks: data-parallel ranks.
        num_mini_batches: updates per epoch; their sizes differ by one at most.
        micro_train_batch_size: rows of a forward-backward pass.
        micro_rollout_batch_size: rows of a forward pass without gradient.
        max_response_tokens: goes into the denominators.
        seed: of the order in which rollouts are dealt to mini-batches.

    Raises:
        ValueError: no rollouts, or fewer than mini-batches.
    """
    count = len(num_tokens)
    if count < num_mini_batches or not count:
        raise ValueError(f"{count} rollouts cannot fill {num_mini_batches} mini-batches")
    order = np.random.default_rng(seed).permutation(count)
    rows: list[list[int]] = [[] for _ in range(num_ranks)]
    mini_batches: list[list[MiniBatch]] = [[] for _ in range(num_ranks)]
    for members in np.array_split(order, num_mini_batches):
        response = [num_response_tokens[i] for i in members]
        denominators = Denominators(sum(response), sum(n > 0 for n in response), max_response_tokens)
        shares = _shares([num_tokens[i] for i in members], num_ranks)
        num_micro = max(-(-len(share) // micro_train_batch_size) for share in shares)
        for rank, share in enumerate(shares):
            first = len(rows[rank])
            rows[rank] += [int(members[i]) for i in share]
            local = range(first, len(rows[rank]))
            mini_batches[rank].append(MiniBatch(_chunks(local, micro_train_batch_size, num_micro), denominators))
    num_forward = max(-(-len(shard) // micro_rollout_batch_size) for shard in rows)
    return tuple(
        RankPlan(tuple(shard), _chunks(range(len(shard)), micro_rollout_batch_size, num_forward), tuple(parts))
        for shard, parts in zip(rows, mini_batches, strict=True)
    )


def _shares(weights: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Deal items to ranks evenly; each share from long to short, so that neighbours need little padding."""
    if len(weights) < num_ranks:
        return [[item] if item < len(weights) else [] for item in range(num_ranks)]
    parts = split_balanced(weights, num_ranks)
    return [sorted(part, key=lambda item: (-weights[item], item)) for part in parts]


def _chunks(rows: Sequence[int], size: int, count: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(rows[i * size : (i + 1) * size]) for i in range(count))
