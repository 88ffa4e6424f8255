"""The online algorithm, on one screen. Placement, overlap, faults and bookkeeping are the run's business."""

from collections.abc import Sequence
from typing import Protocol

from rlhf_data.records import RolloutGroup


class OnlineRun(Protocol):
    """What one step is made of."""

    num_steps: int
    is_exhausted: bool
    """Whether the prompts have nothing left to teach."""

    def generate(self, step: int) -> Sequence[RolloutGroup]:
        """Draw prompts, let the engines answer and the reward score; return the groups that are worth training."""
        ...

    def can_learn(self, groups: Sequence[RolloutGroup]) -> bool:
        """Say whether enough rollouts have a reward for an update."""
        ...

    def make_experience(self, groups: Sequence[RolloutGroup], step: int) -> None:
        """Deal rollouts to ranks; fill in old and reference log-probs and values."""
        ...

    def assign_advantages(self) -> None:
        """Turn rewards into advantages and returns."""
        ...

    def update(self, step: int) -> None:
        """Optimise the critic and, unless it is still frozen, the actor."""
        ...

    def sync_weights(self) -> None:
        """Bring the actor's weights into the engines."""
        ...

    def evaluate(self, step: int) -> None:
        """Answer the held-out prompts with the engines' weights, when it is time to."""
        ...

    def record(self, step: int) -> None:
        """Check that no rollout was lost, and report the step."""
        ...


def train(run: OnlineRun) -> None:
    """Run every step: generate with the newest weights, learn from what was generated, repeat."""
    run.sync_weights()
    run.evaluate(step=0)
    for step in range(1, run.num_steps + 1):
        groups = run.generate(step)
        if run.can_learn(groups):
            run.make_experience(groups, step)
            run.assign_advantages()
            run.update(step)
            run.sync_weights()
        run.record(step)
        run.evaluate(step)
        if run.is_exhausted:
            break
