"""Right answers to hard prompts, kept for the visits in which the policy finds none. Torch-free."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rlhf_data.bounds import bounded, check_bounds
from rlhf_data.records import Episode, RolloutGroup, VerdictKind
from rlhf_train.generation.difficulty import pass_rate, verdict_kinds


@dataclass(frozen=True, slots=True, kw_only=True)
class ReuseSpec:
    """Which answers are kept for later.

    Attributes:
        reuse_solved: largest number of answers that are kept, one per prompt; the oldest give way.
        reuse_max_age: steps after which an answer is given up.
        reuse_pass_rate: largest pass rate of a prompt whose answer is kept.
    """

    reuse_solved: int = bounded(ge=1)
    reuse_max_age: int = bounded(100, ge=1)
    reuse_pass_rate: float = bounded(0.5, gt=0, lt=1)

    def __post_init__(self) -> None:
        check_bounds(self)


def replaced_answers(sampled: Sequence[RolloutGroup], trained: Sequence[RolloutGroup]) -> list[RolloutGroup]:
    """Return the answers of `sampled` groups in whose places `trained` has kept ones, as groups of these alone."""
    found = []
    for old, new in zip(sampled, trained, strict=True):
        if old is not new:
            ids = {episode.episode_id for episode in new.episodes}
            found.append(replace(old, episodes=tuple(each for each in old.episodes if each.episode_id not in ids)))
    return found


def as_sampled(
    trained: Sequence[RolloutGroup], others: Sequence[RolloutGroup]
) -> tuple[list[RolloutGroup], list[RolloutGroup]]:
    """Return recorded groups as their step sampled them, and `others` without the answers that were replaced.

    Args:
        trained: groups of one step, some of them with a kept answer.
        others: the groups that were not trained, the `replaced_answers` last.
    """
    left = list(others)
    sampled = []
    for group in trained:
        name = reused_id(group.group_id)
        if name in (names := [episode.episode_id for episode in group.episodes]):
            last = max(index for index, other in enumerate(left) if other.group_id == group.group_id)
            at = names.index(name)
            episodes = (*group.episodes[:at], *left.pop(last).episodes, *group.episodes[at + 1 :])
            group = replace(group, episodes=episodes)
        sampled.append(group)
    return sampled, left


def reused_id(group_id: str) -> str:
    """Return the id of a kept answer in a group."""
    return f"{group_id}/reused"


class SolvedAnswers:
    """The best right answer to each hard prompt, with the log-probs and the policy version that it was sampled with.

    An answer is best by its reward, and among equal ones by its mean log-prob per token. When a later group of the
    prompt has no right answer, the kept one takes the place of a wrong one, so that the group has something to learn
    from: the response reuse of Zhang et al. 2025, arXiv:2509.25808 (AR3PO). The newest visit with right answers
    decides what is kept of a prompt: its best answer, or nothing if its pass rate is above the limit.
    """

    def __init__(self, spec: ReuseSpec) -> None:
        self._spec = spec
        self._step = 0
        self._kept: dict[str, tuple[int, RolloutGroup]] = {}  # by prompt, the oldest first: step, and the answer alone

    def filled(self, group: RolloutGroup) -> RolloutGroup:
        """Return the group with the kept answer in the place of its worst one, if it has wrong answers alone."""
        _, kept = self._kept.get(group.prompt.prompt_id, (0, None))
        rewards = [verdict.reward if (verdict := one.verdict) else None for one in group.episodes]
        known = [index for index, reward in enumerate(rewards) if reward is not None]
        if kept is None or not known or pass_rate(verdict_kinds(group)) != 0:
            return group
        worst = min(known, key=lambda index: rewards[index])
        name = reused_id(group.group_id)
        rollout = replace(kept.rollouts[0], rollout_id=name, group_id=group.group_id)
        episodes = list(group.episodes)
        episodes[worst] = Episode(name, group.group_id, (rollout,))
        return replace(group, episodes=tuple(episodes))

    def settle(
        self, batch: Sequence[RolloutGroup], others: Sequence[RolloutGroup]
    ) -> tuple[list[RolloutGroup], dict[str, float]]:
        """Return the batch of a step, filled with kept answers, and metrics; then keep answers of all of its groups.

        Args:
            batch: the groups to train on, each with one rollout per episode.
            others: the groups that are not trained.
        """
        filled = [self.filled(group) for group in batch]
        reused = [new.prompt.prompt_id for new, old in zip(filled, batch, strict=True) if new is not old]
        metrics = {"reuse/answers": float(len(reused))}
        if reused:
            metrics["reuse/age"] = self._step + 1 - sum(self._kept[prompt_id][0] for prompt_id in reused) / len(reused)
        self._step += 1
        for group in sorted((*batch, *others), key=lambda group: group.group_id):  # not by when it was complete
            self._keep(group)
        self._give_up()
        return filled, metrics | {"reuse/kept": float(len(self._kept))}

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs."""
        return {"step": self._step, "kept": [list(kept) for kept in self._kept.values()]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue with the answers of another process."""
        self._step = state["step"]
        self._kept = {group.prompt.prompt_id: (step, group) for step, group in state["kept"]}
        self._give_up()  # the limits may be lower than they were

    def _give_up(self) -> None:
        """Let go of the answers that are too old or too many for the next step."""
        oldest = self._step - self._spec.reuse_max_age
        fresh = [(prompt_id, kept) for prompt_id, kept in self._kept.items() if kept[0] > oldest]
        self._kept = dict(fresh[-self._spec.reuse_solved :])

    def _keep(self, group: RolloutGroup) -> None:
        rate = pass_rate(verdict_kinds(group))
        if not rate:
            return
        self._kept.pop(group.prompt.prompt_id, None)
        if rate <= self._spec.reuse_pass_rate:
            right = [one for one in group.episodes if one.verdict is not None and one.verdict.kind is VerdictKind.OK]
            best = max(right, key=lambda one: (one.verdict.reward, _mean_logprob(one)))
            self._kept[group.prompt.prompt_id] = self._step, replace(group, episodes=(best,))


def _mean_logprob(episode: Episode) -> float:
    rollout = episode.rollouts[0]
    return float(np.mean(rollout.rollout_logprobs[rollout.loss_mask]))
