"""The plan of a step: which rollouts form each mini-batch, rank shard and micro-batch, as lists of indices. Torch-free.

The plan is made once per step, from the rollouts' lengths. The rollouts of an update, and the counts that its loss is
divided by, depend only on the seed and the mini-batch size. The number of ranks and the micro-batch size do not change
them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlhf_data.packing import split_balanced


@dataclass(frozen=True, slots=True)
class Denominators:
    """The counts that a loss is divided by, over all micro-batches and ranks of one update.

    Attributes:
        num_tokens: trained tokens.
        num_sequences: rollouts with at least one trained token.
        max_tokens: longest response allowed; the divisor of seq_mean_token_sum_norm.
    """

    num_tokens: int
    num_sequences: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """One rank's part of one update.

    Attributes:
        micro_batches: rows of the rank's shard, one tuple per forward-backward pass. All ranks have the same number. A
            rank with fewer rows gets empty tuples, for which it runs a pass with zero loss: collectives need every
            rank.
        denominators: of the whole update, the same on all ranks, counted before any token is dropped.
    """

    micro_batches: tuple[tuple[int, ...], ...]
    denominators: Denominators


@dataclass(frozen=True, slots=True)
class RankPlan:
    """The work of one data-parallel rank in one step.

    Attributes:
        rows: the rollouts of the rank's shard, as indices into the step's rollouts.
        forward_batches: rows of the shard, one tuple per forward pass without gradient; the same number on every rank.
        mini_batches: the rank's part of each update, in order.
        max_pass_tokens: trained tokens of the largest pass that the step's rollouts could make, the same for any number
            of ranks: models on all ranks decide by it how they compute log-probs, so that those are comparable.
    """

    rows: tuple[int, ...]
    forward_batches: tuple[tuple[int, ...], ...]
    mini_batches: tuple[MiniBatch, ...]
    max_pass_tokens: int = 0


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
        num_tokens: tokens of each rollout, prompt included. Ranks get about equal sums of them.
        num_response_tokens: trained tokens of each rollout.
        num_ranks: data-parallel ranks.
        num_mini_batches: updates per epoch; their sizes differ by at most one.
        micro_train_batch_size: rows per forward-backward pass.
        micro_rollout_batch_size: rows per forward pass without gradient.
        max_response_tokens: becomes `Denominators.max_tokens`.
        seed: decides which rollouts form a mini-batch.

    Raises:
        ValueError: no rollouts, or fewer rollouts than mini-batches.
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
        # Ranks must run the same number of passes, or a collective would wait forever.
        num_micro = max(-(-len(share) // micro_train_batch_size) for share in shares)
        for rank, share in enumerate(shares):
            first = len(rows[rank])
            rows[rank] += [int(members[i]) for i in share]
            local = range(first, len(rows[rank]))  # from the rollout's index in the step to its row in the shard
            mini_batches[rank].append(MiniBatch(_chunks(local, micro_train_batch_size, num_micro), denominators))
    longest = sorted(num_response_tokens, reverse=True)
    max_pass_tokens = sum(longest[: max(micro_train_batch_size, micro_rollout_batch_size)])
    num_forward = max(-(-len(shard) // micro_rollout_batch_size) for shard in rows)
    return tuple(
        RankPlan(
            tuple(shard),
            _chunks(range(len(shard)), micro_rollout_batch_size, num_forward),
            tuple(parts),
            max_pass_tokens,
        )
        for shard, parts in zip(rows, mini_batches, strict=True)
    )


def _shares(weights: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Split items into one share per rank with about equal weights.

    Each share is sorted from long to short, so that the rows of a micro-batch have similar lengths and need little
    padding.
    """
    if len(weights) < num_ranks:
        return [[item] if item < len(weights) else [] for item in range(num_ranks)]
    parts = split_balanced(weights, num_ranks)
    return [sorted(part, key=lambda item: (-weights[item], item)) for part in parts]


def _chunks(rows: Sequence[int], size: int, count: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(rows[i * size : (i + 1) * size]) for i in range(count))
