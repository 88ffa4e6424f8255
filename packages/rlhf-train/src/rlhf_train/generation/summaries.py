"""Metrics that summarize a set of rollouts. Torch-free."""

import re
from collections.abc import Sequence

from rlhf_data.records import FinishReason, Rollout, RolloutGroup, VerdictKind


def metric_part(name: str) -> str:
    """Return the name of a data source as a part of a metric's name, in which trackers allow few characters."""
    return re.sub(r"[^\w.-]", "_", name) or "_"


def scored(groups: Sequence[RolloutGroup]) -> list[Rollout]:
    """Return the rollouts that have a reward, group by group."""
    return [r for group in groups for r in group.rollouts if r.verdict is not None and r.verdict.reward is not None]


def episode_ids(groups: Sequence[RolloutGroup]) -> list[str]:
    """Return the id of the episode of each rollout of `scored`."""
    episodes = (episode for group in groups for episode in group.episodes)
    return [
        e.episode_id for e in episodes for r in e.rollouts if r.verdict is not None and r.verdict.reward is not None
    ]


def summarize(groups: Sequence[RolloutGroup], prefix: str) -> dict[str, float]:
    """Return the mean reward, the verdicts and the lengths of `groups`, under names that begin with `prefix`.

    Means of rewards and scores are over the rollouts that have a reward. `accuracy` is the share of all episodes whose
    verdict is ok; episodes without a reward count as not ok. Numbers that a reward function logs (`extra_logs`) are
    averaged under their own names. If such a name is taken by a metric of this function, it becomes `extra_<name>`. In
    a run without a scorer there are only lengths.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = [rollout.verdict.reward for rollout in scored(groups)]
    scores = [rollout.verdict.score for rollout in scored(groups)]
    episodes = [episode for group in groups for episode in group.episodes]
    kinds = [episode.verdict.kind for episode in episodes if episode.verdict is not None]
    if not rollouts:
        return {}
    if is_unscored(groups):
        return lengths(rollouts, prefix)
    numbers = lengths(rollouts, prefix) | {f"{prefix}/accuracy": kinds.count(VerdictKind.OK) / len(episodes)}
    if rewards:
        numbers[f"{prefix}/reward"] = sum(rewards) / len(rewards)
        numbers[f"{prefix}/score"] = sum(scores) / len(scores)
    numbers |= {f"{prefix}/verdict_{kind.value}": float(kinds.count(kind)) for kind in VerdictKind if kind in kinds}
    values: dict[str, list[float]] = {}
    for episode in episodes:
        for name, value in (episode.verdict.extra if episode.verdict else {}).items():
            values.setdefault(name, []).append(value)
    for name, logged in values.items():
        key = f"{prefix}/{name}"
        numbers[f"{prefix}/extra_{name}" if key in numbers else key] = sum(logged) / len(logged)
    return numbers


def is_unscored(groups: Sequence[RolloutGroup]) -> bool:
    """Return whether there is no scorer, so that rewards, scores and accuracy mean nothing."""
    verdicts = [rollout.verdict for group in groups for rollout in group.rollouts]
    return all(verdict is not None and verdict.kind is VerdictKind.UNSCORED for verdict in verdicts)


def lengths(rollouts: Sequence[Rollout], prefix: str) -> dict[str, float]:
    """Return the mean response length in tokens and the share of `rollouts` that the length limit ended."""
    return {
        f"{prefix}/response_tokens": sum(rollout.num_response_tokens for rollout in rollouts) / len(rollouts),
        f"{prefix}/truncated": sum(r.finish_reason is FinishReason.LENGTH for r in rollouts) / len(rollouts),
    }
