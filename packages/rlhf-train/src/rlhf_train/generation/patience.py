"""Ends a run that finds nothing to learn from for several steps. Torch-free."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_data.errors import RewardError
from rlhf_data.records import RolloutGroup
from rlhf_train.generation.summaries import scored
from rlhf_train.run.ledger import RolloutCounts
from rlhf_train.run.observer import Observer

MAX_BARREN_STEPS = 3  # steps in a row without a reward to learn from, after which the run ends


@dataclass(slots=True, eq=False, repr=False)
class Patience:
    """Counts steps without a reward to learn from, and warns with the reason.

    Attributes:
        batch_size: groups in a full batch.
        num_steps: of the run. A run with fewer than `MAX_BARREN_STEPS` ends if none of them has a reward.
        observer: receives a warning for each such step, and for each batch that is not full.
        is_exhausted: whether dynamic sampling has left out all groups of as many steps as end the run.
    """

    batch_size: int
    num_steps: int
    observer: Observer
    is_exhausted: bool = False
    _num_barren_steps: int = 0
    _last_failure: str = ""

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs."""
        return {"num_barren_steps": self._num_barren_steps, "last_failure": self._last_failure}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where another process was between two steps."""
        self._num_barren_steps = state["num_barren_steps"]
        self._last_failure = state["last_failure"]

    def observe(self, groups: Sequence[RolloutGroup]) -> None:
        """Remember why the last rollout of a step that has no reward has none."""
        verdicts = [rollout.verdict for group in groups for rollout in group.rollouts if rollout.verdict]
        self._last_failure = next((verdict.detail for verdict in reversed(verdicts) if verdict.reward is None), "")

    def can_learn(self, groups: Sequence[RolloutGroup], counts: RolloutCounts) -> bool:
        """Return whether any rollout of `groups` has a reward.

        Args:
            groups: the batch.
            counts: of the step's rollouts so far.

        Raises:
            RewardError: rewards have failed in as many steps in a row as end the run.
        """
        if scored(groups):
            if len(groups) < self.batch_size and counts.filtered:
                text = f"only {len(groups)} of {self.batch_size} rollout groups are worth training"
                self.observer.warning(text)
            self._num_barren_steps = 0
            return True
        self._num_barren_steps += 1
        gives_up = self._num_barren_steps >= min(MAX_BARREN_STEPS, self.num_steps)
        message = "no rollout has a reward"
        if self._last_failure:
            message += f"; the last reason: {self._last_failure}"
        if counts.stale:
            message += f"; {counts.stale} rollouts are too old for the batch (stale)"
        if counts.filtered > counts.failed:
            message = f"all {counts.filtered} scored rollouts are in groups that dynamic sampling leaves out"
            self.is_exhausted = gives_up
        elif gives_up:
            message = f"{self._num_barren_steps} step(s) in a row: {message}"
            raise RewardError(message, hint="rollouts.jsonl has the prompts and responses that the reward was given")
        end = "the run ends here" if self.is_exhausted else "nothing is learned from this step"
        self.observer.warning(f"{end}: {message}")
        return False
