"""The plan of a step: which rollouts form each mini-batch, rank shard and micro-batch, as lists of indices. Torch-free.

The plan is made once per step, from the rollouts' lengths. The rollouts of an update, and the counts that its loss is
divided by, depend only on the seed and the mini-batch size. The number of ranks and the micro-batch size do not change
them.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rlhf_data.bounds import bounded, check_bounds
from rlhf_data.errors import ConfigError
from rlhf_data.packing import pack, split_balanced
from rlhf_data.records import Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizes:
    """Batch sizes. They count over all ranks, except the micro batch sizes, which are per rank.

    Attributes:
        rollout_batch_size: prompts per step.
        n_samples_per_prompt: rollouts per prompt.
        train_batch_size: rollouts per update.
        micro_train_batch_size: rollouts per forward-backward pass on one rank.
        micro_rollout_batch_size: rollouts per forward pass without gradient on one rank.
        micro_batch_tokens: largest number of tokens per pass on one rank. If set, it replaces the two before. None for
            no limit.
        max_epochs: passes over the rollouts of a step.
    """

    rollout_batch_size: int = bounded(ge=1)
    n_samples_per_prompt: int = bounded(ge=1)
    train_batch_size: int = bounded(ge=1)
    micro_train_batch_size: int = bounded(ge=1)
    micro_rollout_batch_size: int = bounded(ge=1)
    micro_batch_tokens: int | None = bounded(None, ge=1)
    max_epochs: int = bounded(1, ge=1)

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.num_rollouts % self.train_batch_size:
            size = self.train_batch_size
            count = self.num_rollouts
            divisor = max(number for number in range(1, min(size, count) + 1) if count % number == 0)
            message = f"``train_batch_size`` is {size}, which does not divide the {count} samples of a step"
            product = f"``rollout_batch_size={self.rollout_batch_size}`` x"
            raise ConfigError(
                f"{message} ({product} ``n_samples_per_prompt={self.n_samples_per_prompt}``)",
                hint=f"use ``train_batch_size={divisor}``",
            )

    @property
    def num_rollouts(self) -> int:
        """Rollouts per step."""
        return self.rollout_batch_size * self.n_samples_per_prompt

    def most_pass_tokens(self, max_response_tokens: int) -> int:
        """Return the trained tokens of the largest pass that a step of responses of this length could make."""
        if self.micro_batch_tokens is not None:
            return min(max_response_tokens * self.num_rollouts, self.micro_batch_tokens)
        largest = max(self.micro_train_batch_size, self.micro_rollout_batch_size)
        return max_response_tokens * min(largest, self.num_rollouts)

    @property
    def num_updates(self) -> int:
        """Updates per step, if no rollout is left out."""
        return self.num_mini_batches(self.num_rollouts) * self.max_epochs

    def num_mini_batches(self, num_trained: float) -> int:
        """Return the updates per epoch over `num_trained` rollouts, which may be fewer than `num_rollouts`."""
        return math.ceil(num_trained / self.train_batch_size)


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
        own_batches: likewise `forward_batches` of a model that runs on a part of the rows, by its role.
    """

    rows: tuple[int, ...]
    forward_batches: tuple[tuple[int, ...], ...]
    mini_batches: tuple[MiniBatch, ...]
    max_pass_tokens: int = 0
    own_batches: Mapping[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)

    def batches_of(self, role: str) -> tuple[tuple[int, ...], ...]:
        """Return the rows of each forward pass of `role` without gradient."""
        return self.own_batches.get(role, self.forward_batches)


def pass_fill(plans: Sequence[RankPlan], num_tokens: Sequence[int], pack_tokens: int) -> float | None:
    """Return the mean share of a full pass that training passes have.

    Args:
        plans: of all ranks, for one step.
        num_tokens: tokens of each rollout of the step.
        pack_tokens: tokens of a full pass.

    Returns:
        The share, or None if every update has one pass, so that fuller passes would not be fewer.
    """
    num_passes = [len(part.micro_batches) for plan in plans for part in plan.mini_batches]
    if max(num_passes, default=0) < 2:
        return None
    return sum(num_tokens) / (sum(num_passes) * pack_tokens)


def plan_rollouts(
    rollouts: Sequence[Rollout],
    sizes: BatchSizes,
    *,
    num_ranks: int,
    num_mini_batches: int,
    max_response_tokens: int,
    seed: int,
    costs: Sequence[float] | None = None,
    parts: Mapping[str, Collection[int]] | None = None,
    shares_prompts: bool = False,
) -> tuple[RankPlan, ...]:
    """Return one plan per rank for the rollouts of a step; see `plan_batches`.

    Args:
        sizes: of the passes.
        shares_prompts: whether rollouts of one prompt share it in a pass.
    """
    return plan_batches(
        [rollout.num_tokens for rollout in rollouts],
        [rollout.num_response_tokens for rollout in rollouts],
        costs,
        parts,
        num_ranks=num_ranks,
        num_mini_batches=num_mini_batches,
        micro_train_batch_size=sizes.micro_train_batch_size,
        micro_rollout_batch_size=sizes.micro_rollout_batch_size,
        max_response_tokens=max_response_tokens,
        seed=seed,
        micro_batch_tokens=sizes.micro_batch_tokens,
        prompts=[rollout.tokens_before_policy for rollout in rollouts] if shares_prompts else None,
    )


def plan_batches(
    num_tokens: Sequence[int],
    num_response_tokens: Sequence[int],
    costs: Sequence[float] | None = None,
    parts: Mapping[str, Collection[int]] | None = None,
    *,
    num_ranks: int,
    num_mini_batches: int,
    micro_train_batch_size: int,
    micro_rollout_batch_size: int,
    max_response_tokens: int,
    seed: int,
    micro_batch_tokens: int | None = None,
    prompts: Sequence[np.ndarray] | None = None,
) -> tuple[RankPlan, ...]:
    """Return one plan per rank; each rollout is in exactly one mini-batch of exactly one rank.

    Args:
        num_tokens: tokens of each rollout, prompt included.
        num_response_tokens: trained tokens of each rollout.
        costs: of each rollout, in any unit, such as `costs.PassCosts.of` returns. Ranks get about equal sums of them.
            None for the tokens.
        parts: the rollouts of each model that runs on a part of them, by its role.
        num_ranks: data-parallel ranks.
        num_mini_batches: updates per epoch; their sizes differ by at most one.
        micro_train_batch_size: rows per forward-backward pass.
        micro_rollout_batch_size: rows per forward pass without gradient.
        max_response_tokens: becomes `Denominators.max_tokens`.
        seed: decides which rollouts form a mini-batch.
        micro_batch_tokens: largest number of tokens per pass, with or without gradient. If set, it replaces the two
            micro batch sizes: a rank's rows are combined into as few passes as possible.
        prompts: token ids of each rollout's prompt, if rollouts of one prompt share them in a pass. They then stay
            together as far as sizes allow, in mini-batches as well.

    Raises:
        ValueError: no rollouts, or fewer rollouts than mini-batches.
        DataError: a rollout with more than `micro_batch_tokens` tokens.
    """
    count = len(num_tokens)
    if count < num_mini_batches or not count:
        raise ValueError(f"{count} rollouts cannot fill {num_mini_batches} mini-batches")
    everything = range(count)
    order = np.random.default_rng(seed).permutation(count)
    if prompts is not None:
        order = np.concatenate(_by_prompt(order.tolist(), prompts))
    rows: list[list[int]] = [[] for _ in range(num_ranks)]
    mini_batches: list[list[MiniBatch]] = [[] for _ in range(num_ranks)]
    for members in np.array_split(order, num_mini_batches):
        response = [num_response_tokens[i] for i in members]
        denominators = Denominators(sum(response), sum(n > 0 for n in response), max_response_tokens)
        starts = [len(shard) for shard in rows]
        largest = max(len(members) // num_ranks, 1)
        if micro_batch_tokens is None:
            largest = min(largest, micro_train_batch_size)
        units = _units(members.tolist(), num_tokens, prompts, largest, micro_batch_tokens)
        work = [_work(unit, num_tokens, costs, prompts) for unit in units]
        for shard, share in zip(rows, _shares(work, num_ranks), strict=True):
            # From long to short, so that the rows of a micro-batch have similar lengths and need little padding.
            own = sorted((units[item] for item in share), key=lambda unit: -_stored(unit, num_tokens, prompts))
            shard += [row for unit in own for row in unit]
        of_ranks = _passes(rows, starts, num_tokens, prompts, micro_train_batch_size, micro_batch_tokens, everything)
        for own, passes in zip(mini_batches, of_ranks, strict=True):
            own.append(MiniBatch(passes, denominators))
    longest = sorted(num_response_tokens, reverse=True)
    max_pass_tokens = sum(longest[: max(micro_train_batch_size, micro_rollout_batch_size)])
    if micro_batch_tokens is not None:
        max_pass_tokens = min(sum(longest), micro_batch_tokens)

    def forward(part: Collection[int]) -> list[tuple[tuple[int, ...], ...]]:
        starts = [0] * num_ranks
        return _passes(rows, starts, num_tokens, prompts, micro_rollout_batch_size, micro_batch_tokens, part)

    whole = forward(everything)
    of_parts = {role: forward(frozenset(part)) for role, part in (parts or {}).items()}
    return tuple(
        RankPlan(
            tuple(shard),
            whole[rank],
            tuple(mini_batches[rank]),
            max_pass_tokens,
            {role: passes[rank] for role, passes in of_parts.items()},
        )
        for rank, shard in enumerate(rows)
    )


def _passes(
    shards: Sequence[Sequence[int]],
    starts: Sequence[int],
    num_tokens: Sequence[int],
    prompts: Sequence[np.ndarray] | None,
    size: int,
    budget_tokens: int | None,
    part: Collection[int],
) -> list[tuple[tuple[int, ...], ...]]:
    """Return, for each rank, the rows of each pass over its shard from row `start` on, of the rollouts of `part`.

    Ranks run the same number of passes, or a collective would wait forever: some get empty ones.
    """
    parts: list[list[Sequence[int]]] = []
    for shard, start in zip(shards, starts, strict=True):
        rows = [row for row in range(start, len(shard)) if shard[row] in part]
        if budget_tokens is None:
            parts.append([rows[at : at + size] for at in range(0, len(rows), size)])
        else:
            row_of = {shard[row]: row for row in rows}
            units = _units(list(row_of), num_tokens, prompts, len(rows), budget_tokens)
            bins = pack([_stored(unit, num_tokens, prompts) for unit in units], budget_tokens)
            parts.append([[row_of[item] for unit in items for item in units[unit]] for items in bins])
    count = max(map(len, parts))
    return [tuple(map(tuple, own)) + ((),) * (count - len(own)) for own in parts]


def _shares(weights: Sequence[float], num_ranks: int) -> list[list[int]]:
    """Split items into one share per rank with about equal weights."""
    if len(weights) < num_ranks:
        return [[item] if item < len(weights) else [] for item in range(num_ranks)]
    return split_balanced(weights, num_ranks)


def _by_prompt(items: Sequence[int], prompts: Sequence[np.ndarray]) -> list[list[int]]:
    """Return rollouts by prompt, prompts and their rollouts in the order of `items`."""
    groups: dict[bytes, list[int]] = {}
    for item in items:
        groups.setdefault(prompts[item].tobytes(), []).append(item)
    return list(groups.values())


def _units(
    items: Sequence[int],
    num_tokens: Sequence[int],
    prompts: Sequence[np.ndarray] | None,
    size: int,
    budget_tokens: int | None,
) -> list[list[int]]:
    """Return rollouts that stay together: those of a prompt, in parts of at most `size` within the budget."""
    if prompts is None:
        return [[item] for item in items]
    units = []
    for group in _by_prompt(items, prompts):
        unit: list[int] = []
        for item in group:
            is_over = budget_tokens is not None and _stored([*unit, item], num_tokens, prompts) > budget_tokens
            if unit and (is_over or len(unit) == size):
                units.append(unit)
                unit = []
            unit.append(item)
        units.append(unit)
    return units


def _stored(unit: Sequence[int], num_tokens: Sequence[int], prompts: Sequence[np.ndarray] | None) -> int:
    """Return the tokens that a unit takes in a pass: the prompt counts once."""
    copies = 0 if prompts is None else (len(unit) - 1) * len(prompts[unit[0]])
    return sum(num_tokens[item] for item in unit) - copies


def _work(
    unit: Sequence[int],
    num_tokens: Sequence[int],
    costs: Sequence[float] | None,
    prompts: Sequence[np.ndarray] | None,
) -> float:
    """Return what a unit costs, in the unit of `costs`, or else in tokens. Copies of the prompt cost nothing."""
    stored = _stored(unit, num_tokens, prompts)
    if costs is None:
        return stored
    return sum(costs[item] for item in unit) * (stored / sum(num_tokens[item] for item in unit))
