"""The rewards of a step minus the algorithm's baseline: each is compared with the rewards of its group.

`algorithms.group` has the formulas. Here they are applied to what verdicts say of rollouts, turns and reasoning steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlhf_data.errors import ConfigError
from rlhf_data.records import Rollout
from rlhf_train.algorithms.group import (
    decoupled_rewards,
    relative_rewards,
    relative_token_rewards,
    relative_turn_rewards,
)
from rlhf_train.algorithms.table import AlgorithmSpec
from rlhf_train.generation.run_spec import RewardSpec

GREEDY_REWARD = "greedy_reward"  # in `Verdict.extra`: the reward of the greedy response to the same prompt


@dataclass(frozen=True, slots=True)
class RelativeRewards:
    """The rewards of N rollouts, relative to the baseline.

    Attributes:
        rewards: N rewards.
        earned: for each rollout the tokens that earned a part of its reward, as pairs of a position and a reward.
    """

    rewards: list[float]
    earned: list[list[tuple[int, float]]]


def subtract_baseline(
    rollouts: Sequence[Rollout],
    shaped: np.ndarray,
    algorithm: AlgorithmSpec,
    reward: RewardSpec,
    episode_ids: Sequence[str] | None = None,
) -> RelativeRewards:
    """Return the rewards of rollouts relative to the algorithm's baseline.

    The rewards of reasoning steps are compared among themselves, and so is what is left of each rollout's reward: as a
    whole, or turn by turn. Sources whose rewards are normalised each by itself have rewards of whole rollouts only.

    Args:
        rollouts: N rollouts with verdicts.
        shaped: [N] float64, their rewards from `RewardShaper.shape`.
        algorithm: has the baseline.
        reward: says how rewards are normalised.
        episode_ids: see `algorithms.group`.
    """
    group_ids = [rollout.group_id for rollout in rollouts]
    if reward.reward_normalize == "each":
        sources = _rewards_by_source(rollouts, len(reward.sources))
        weights = [source.weight for source in reward.sources]
        total = decoupled_rewards(
            sources, weights, group_ids, over_batch=not algorithm.row.whiten, episode_ids=episode_ids
        )
        return RelativeRewards(total.tolist(), [[] for _ in rollouts])
    compares = algorithm.row.uses_group and reward.reward_normalize == "none"
    baseline = "none" if compares else algorithm.row.baseline
    divide_by_std = algorithm.whiten_std
    verdicts = [rollout.verdict for rollout in rollouts]
    steps = [np.array([value for _, value in verdict.token_rewards]) for verdict in verdicts]
    turns = [np.array(verdict.turn_rewards) for verdict in verdicts]
    # What the episode earned before a rollout began is no consequence of the rollout.
    before = np.array([verdict.earned_elsewhere[0] for verdict in verdicts])
    rest = shaped - _sums(steps)

    if algorithm.row.compares_responses and any(map(len, steps)):
        message = f"{algorithm.row.full_name} compares whole responses, and a reward source scores reasoning steps"
        raise ConfigError(message, hint="use ``estimator=group_norm`` with rewards of steps")
    lengths = np.array([max(int(np.sum(rollout.loss_mask)), 1) for rollout in rollouts], np.float64)
    weights = lengths if baseline == "group_mean_by_length" else None
    greedy = np.array([verdict.extra[GREEDY_REWARD] for verdict in verdicts]) if baseline == "greedy" else None
    in_steps = "none" if baseline == "greedy" else baseline
    steps = relative_token_rewards(steps, group_ids, in_steps, divide_by_std=divide_by_std, episode_ids=episode_ids)
    relative = relative_rewards(
        rest,
        group_ids,
        baseline,
        divide_by_std=divide_by_std,
        episode_ids=episode_ids,
        weights=weights,
        greedy=greedy,
    )
    if algorithm.row.prefers:
        whole = relative  # signs, from which nothing is subtracted
    elif algorithm.group_by == "episode":
        whole = relative - before
    else:
        by_state = algorithm.group_by == "state"
        turns = relative_turn_rewards(
            [_with_rest(*each) for each in zip(rollouts, turns, rest - before, strict=True)],
            group_ids,
            baseline,
            turn_gamma=1.0 if algorithm.turn_gamma is None else algorithm.turn_gamma,
            divide_by_std=divide_by_std,
            episode_ids=episode_ids,
            states=[_states(rollout) for rollout in rollouts] if by_state else None,
            of_episodes=relative,
            state_coef=algorithm.state_coef,
        )
        whole = _sums(turns)
    earned = [_by_token(*each) for each in zip(rollouts, turns, steps, strict=True)]
    return RelativeRewards((whole + _sums(steps)).tolist(), earned)


def _rewards_by_source(rollouts: Sequence[Rollout], num_sources: int) -> np.ndarray:
    """Return the rewards of each source, [N, num_sources] float64; NaN where it abstained.

    A failed reward that has a fixed value has it from every source.
    """
    verdicts = [rollout.verdict for rollout in rollouts]
    rows = [verdict.source_rewards or (verdict.reward,) * num_sources for verdict in verdicts]
    return np.array(rows, np.float64).reshape(-1, num_sources)  # None becomes NaN


def _states(rollout: Rollout) -> list[bytes]:
    """Return what the policy read since the turn before, for each turn: the prompt, or the observation."""
    mask = rollout.loss_mask
    starts = np.flatnonzero(mask & ~np.append(False, mask[:-1]))
    token_ids = rollout.token_ids
    read_from = [0, *(rollout.turn_ends + 1)]
    return [token_ids[first:start].tobytes() for first, start in zip(read_from, starts, strict=False)]


def _with_rest(rollout: Rollout, turn_rewards: np.ndarray, reward: float) -> np.ndarray:
    """Return a rollout's reward by turn, [K] float64: what no turn earned is earned by the last one."""
    rewards = turn_rewards if len(turn_rewards) else np.zeros(len(rollout.turn_ends))
    rewards[-1:] += reward - rewards.sum()
    return rewards


def _by_token(rollout: Rollout, turns: np.ndarray, steps: np.ndarray) -> list[tuple[int, float]]:
    """Return the rewards of turns and of steps with the position of the last token of each."""
    turn_ends = rollout.turn_ends.tolist() if len(turns) else ()
    step_ends = [position for position, _ in rollout.verdict.token_rewards]
    return [*zip(turn_ends, turns.tolist(), strict=True), *zip(step_ends, steps.tolist(), strict=True)]


def _sums(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.array([own.sum() for own in parts])
