"""The queue between generation and training: complete rollout groups go in, batches come out. Torch-free."""

from collections import deque
from collections.abc import Mapping
from typing import Any

from rlhf_data.records import RolloutGroup


class SampleStream:
    """Holds complete rollout groups until the learner takes them, and limits how many groups may be started.

    A limit is needed because groups that wait get stale: the policy that trains on them moves on. After each admission

        trained + queued + in flight <= (version + 1 + max_staleness) batch_size

    holds, where `version` is the number of batches that the learner has finished, and `trained` the number of groups in
    the batches that it has taken. A batch that was not full counts as full. With `max_staleness` 0, no group is started
    while the learner works. The queue has room for one batch.

    Args:
        batch_size: groups per batch.
        max_staleness: batches that may be trained between the weights that wrote a group and the weights that train on
            it.

    Attributes:
        num_in_flight: groups that were started and are not complete yet.

    Raises:
        ValueError: `batch_size` below 1 or `max_staleness` below 0.
    """

    def __init__(self, batch_size: int, max_staleness: int = 0) -> None:
        if batch_size < 1 or max_staleness < 0:
            raise ValueError(f"batch_size {batch_size} must be >= 1, max_staleness {max_staleness} must be >= 0")
        self._batch_size = batch_size
        self._max_staleness = max_staleness
        self._queue: list[RolloutGroup] = []
        self._num_taken = 0  # batches
        self._num_done = 0  # batches
        # Policy versions at the start of the last batches, the current one last. A group must not be older than the
        # first of them.
        self._versions = deque([0], maxlen=max_staleness + 1)
        self.num_in_flight = 0

    @property
    def room(self) -> int:
        """Number of groups that may be started now."""
        under_way = len(self._queue) + self.num_in_flight
        by_staleness = (self._num_done + 1 + self._max_staleness - self._num_taken) * self._batch_size - under_way
        return max(min(by_staleness, self._batch_size - under_way), 0)

    @property
    def num_queued_rollouts(self) -> int:
        """Number of rollouts in the groups that wait to be taken."""
        return sum(len(group.rollouts) for group in self._queue)

    def start(self) -> None:
        """Count one more group as in flight. Call it only when there is `room`."""
        assert self.room, "a rollout group was started without room for it"
        self.num_in_flight += 1

    def put(self, group: RolloutGroup) -> None:
        """Queue a complete group, which is then no longer in flight."""
        self.leave_out()
        self._queue.append(group)

    def leave_out(self) -> None:
        """Count one group less as in flight, because it failed or is not worth training."""
        assert self.num_in_flight, "a rollout group ended that was not started"
        self.num_in_flight -= 1

    def take(self) -> tuple[list[RolloutGroup], list[RolloutGroup]]:
        """Empty the queue; return the groups to train on, in the order in which they were started, and the stale ones.

        The oldest token of a group decides whether the group is stale.
        """
        groups = sorted(self._queue, key=lambda group: _number(group.group_id))
        self._queue = []
        self._num_taken += 1
        fresh: list[RolloutGroup] = []
        stale: list[RolloutGroup] = []
        for group in groups:
            is_fresh = all(rollout.policy_version >= self._versions[0] for rollout in group.rollouts)
            (fresh if is_fresh else stale).append(group)
        return fresh, stale

    def done(self, policy_version: int) -> None:
        """Record that the learner has finished the batch it took, and that its weights are now `policy_version`."""
        assert self._num_done < self._num_taken, "a batch is done that was not taken"
        self._num_done += 1
        self._versions.append(policy_version)

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs. Call it between two steps, when no group waits or is in flight."""
        assert not self._queue and not self.num_in_flight, "a group waits or is in flight"
        return {"num_taken": self._num_taken, "num_done": self._num_done, "versions": list(self._versions)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where another process was between two steps."""
        self._num_taken = state["num_taken"]
        self._num_done = state["num_done"]
        self._versions.extend(state["versions"])


def _number(group_id: str) -> tuple[str, int]:
    prefix, _, number = group_id.rpartition("/")
    return prefix, int(number)
