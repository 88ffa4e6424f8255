"""What a set of rollouts says in a few numbers, and the check that none was lost. Torch-free."""

from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_data.errors import RlhfError
from rlhf_data.records import FinishReason, Rollout, RolloutGroup, VerdictKind


@dataclass(frozen=True, slots=True)
class Ledger:
    """Where the rollouts of one step went.

    Attributes:
        num_generated: asked of the engines.
        num_trained: in the update; not a whole number when an epoch missed some.
        num_filtered: of groups that dynamic sampling left out.
        num_reward_failed: without a reward, by timeout or crash; all of a step that had too few rewards to learn from.
        num_engine_failed: never finished by an engine.
    """

    num_generated: int = 0
    num_trained: float = 0
    num_filtered: int = 0
    num_reward_failed: int = 0
    num_engine_failed: int = 0

    def check(self) -> None:
        """Raise RlhfError unless every rollout is accounted for."""
        failed = self.num_reward_failed + self.num_engine_failed
        if self.num_generated != self.num_trained + self.num_filtered + failed:
            raise RlhfError(
                f"rollouts were lost: {self.num_generated} generated, {self.num_trained:g} trained,"
                f" {self.num_filtered} filtered, {self.num_reward_failed} without a reward,"
                f" {self.num_engine_failed} failed in an engine"
            )

    def metrics(self) -> dict[str, float]:
        """Return the counts to log."""
        return {
            "samples/generated": self.num_generated,
            "samples/trained": int(self.num_trained),
            "samples/filtered": self.num_filtered,
            "samples/failed": self.num_reward_failed + self.num_engine_failed,
        }


def scored(groups: Sequence[RolloutGroup]) -> list[Rollout]:
    """Return the rollouts that have a reward, group by group."""
    return [r for group in groups for r in group.rollouts if r.verdict is not None and not r.verdict.kind.failed]


def summarize(groups: Sequence[RolloutGroup], prefix: str) -> dict[str, float]:
    """Return reward, verdicts and lengths of `groups` under `prefix`; means are over all rollouts with a reward.

    What a reward function logs beside the reward keeps its name; one of ours becomes `extra_<name>`, so that a user's
    `accuracy` never stands where ours is read.

    `accuracy` is the share of verdicts that are ok among all rollouts, failures included.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = [rollout.verdict.reward for rollout in scored(groups)]
    scores = [rollout.verdict.score for rollout in scored(groups)]
    kinds = [rollout.verdict.kind for rollout in rollouts if rollout.verdict is not None]
    if not rollouts:
        return {}
    numbers = lengths(rollouts, prefix) | {f"{prefix}/accuracy": kinds.count(VerdictKind.OK) / len(rollouts)}
    if rewards:
        numbers[f"{prefix}/reward"] = sum(rewards) / len(rewards)
        numbers[f"{prefix}/score"] = sum(scores) / len(scores)
    numbers |= {f"{prefix}/verdict_{kind.value}": float(kinds.count(kind)) for kind in VerdictKind if kind in kinds}
    values: dict[str, list[float]] = {}
    for rollout in rollouts:
        for name, value in (rollout.verdict.extra if rollout.verdict else {}).items():
            values.setdefault(name, []).append(value)
    for name, logged in values.items():
        key = f"{prefix}/{name}"
        numbers[f"{prefix}/extra_{name}" if key in numbers else key] = sum(logged) / len(logged)
    return numbers


def lengths(rollouts: Sequence[Rollout], prefix: str) -> dict[str, float]:
    """Return the mean length and the share of `rollouts` that the length limit ended, under `prefix`."""
    return {
        f"{prefix}/response_tokens": sum(rollout.num_response_tokens for rollout in rollouts) / len(rollouts),
        f"{prefix}/truncated": sum(r.finish_reason is FinishReason.LENGTH for r in rollouts) / len(rollouts),
    }
