"""Between generation and training: prompts are admitted, complete groups go in, batches come out. Torch-free."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rlhf_data.records import Rollout, RolloutGroup


@dataclass(slots=True, eq=False)
class Ticket:
    """An admitted prompt.

    Attributes:
        number: of the admission, counted over the run.
        group_id: id of the rollout group: `step<S>/<N>`, the Nth admission while batch S is the next one to finish.
        item: index of the prompt.
        last_batch: number of the last batch that may train on the group, from 0.
        group: the complete group; None while it is in flight.
    """

    number: int
    group_id: str
    item: int
    last_batch: int
    group: RolloutGroup | None = None


class SampleStream:
    """Admits prompts, holds complete rollout groups until the learner takes them, and so bounds their staleness.

    A group that waits gets stale: the policy that trains on it moves on. The stream never discards one for that.
    Discarding would leave out the prompts with long answers more often than others. It bounds staleness in two ways:

    - A prompt is admitted only while

          taken + queued + in flight < (done + 1 + max_staleness) batch_size

      where `done` is the number of batches that the learner has finished, and `taken` the number of groups in the
      batches that it has taken. A batch that was not full counts as full. So there is room for every group in one
      of the next `max_staleness + 1` batches.
    - A batch comes out only if all groups that remain still have such room. Otherwise the learner waits for the
      slowest of the groups whose last batch this is.

    With `max_staleness` 0, no prompt is admitted while the learner works, and every group is trained by the weights
    that wrote it. At the end of a run, no prompt is admitted whose group could not be trained any more.

    Args:
        batch_size: groups per batch.
        num_batches: batches of the whole run.
        max_staleness: batches that may be trained between the admission of a prompt and the batch that trains on it.

    Raises:
        ValueError: `batch_size` or `num_batches` below 1, or `max_staleness` below 0.
    """

    def __init__(self, batch_size: int, num_batches: int, max_staleness: int = 0) -> None:
        if batch_size < 1 or num_batches < 1 or max_staleness < 0:
            sizes = f"batch_size {batch_size} and num_batches {num_batches} must be >= 1"
            raise ValueError(f"{sizes}, max_staleness {max_staleness} must be >= 0")
        self._batch_size = batch_size
        self._num_batches = num_batches
        self._max_staleness = max_staleness
        self._tickets: dict[int, Ticket] = {}  # admitted and not taken, in the order of admission
        # Those with a complete group: to look through all of thousands in flight at each change would take seconds.
        self._complete: dict[int, Ticket] = {}
        self._num_admitted = 0
        self._num_admitted_now = 0  # since the last batch was done
        self._num_taken = 0  # batches
        self._num_done = 0  # batches
        # Policy versions of the last batches at their beginning. No engine should have older weights than the first.
        self._versions = deque([0], maxlen=max_staleness + 1)

    @property
    def batch_size(self) -> int:
        """Groups per batch."""
        return self._batch_size

    @property
    def is_being_trained(self) -> bool:
        """Whether the learner has a batch."""
        return self._num_taken > self._num_done

    @property
    def room(self) -> int:
        """Number of prompts that may be admitted now."""
        num_batches = min(self._num_done + 1 + self._max_staleness, self._num_batches)
        return max((num_batches - self._num_taken) * self._batch_size - len(self._tickets), 0)

    @property
    def num_in_flight(self) -> int:
        """Number of admitted prompts without a complete group."""
        return len(self._tickets) - len(self._complete)

    @property
    def num_queued(self) -> int:
        """Number of complete groups that wait to be taken."""
        return len(self._complete)

    def admit(self, item: int) -> Ticket:
        """Admit the prompt with index `item`. Call it only when there is `room`."""
        assert self.room, "a prompt was admitted without room for it"
        group_id = f"step{self._num_done + 1}/{self._num_admitted_now:05d}"
        ticket = Ticket(self._num_admitted, group_id, item, self._num_done + self._max_staleness)
        self._num_admitted += 1
        self._num_admitted_now += 1
        self._tickets[ticket.number] = ticket
        return ticket

    def put(self, ticket: Ticket, group: RolloutGroup) -> None:
        """Queue the complete group of an admitted prompt."""
        assert self._tickets.get(ticket.number) is ticket and ticket.group is None, "the prompt is not in flight"
        ticket.group = group
        self._complete[ticket.number] = ticket

    def leave_out(self, ticket: Ticket) -> None:
        """Give up an admitted prompt, because its group failed or is not worth training."""
        assert self._tickets.get(ticket.number) is ticket and ticket.group is None, "the prompt is not in flight"
        del self._tickets[ticket.number]

    def is_ready(self, *, can_grow: bool) -> bool:
        """Return whether `take` may be called.

        Args:
            can_grow: whether further groups may become complete before the next batch is taken. If so, a batch that
                is not full is worth waiting for.
        """
        if len(self._complete) < self._batch_size and can_grow:
            return False
        batch = self._next_batch()
        chosen = {ticket.number for ticket in batch}
        rest = sorted(ticket.last_batch for ticket in self._tickets.values() if ticket.number not in chosen)
        # The group at position n of the rest, the most urgent first, is trained at the earliest n // batch_size batches
        # after the next one.
        return all(last >= self._num_taken + 1 + position // self._batch_size for position, last in enumerate(rest))

    def take(self) -> tuple[list[RolloutGroup], list[RolloutGroup]]:
        """Remove the groups of the next batch and return them in the order of admission. See `is_ready`.

        Groups whose last batch comes first are taken first. The second list has the stale rollouts, as groups of these
        alone: they have a token of weights that no engine should have had any more. The first list has the others. A
        rollout without a token of the policy, such as one whose environment failed at once, is never stale.
        """
        batch = sorted(self._next_batch(), key=lambda ticket: ticket.number)
        for ticket in batch:
            del self._tickets[ticket.number]
            del self._complete[ticket.number]
        self._num_taken += 1
        fresh: list[RolloutGroup] = []
        stale: list[RolloutGroup] = []
        for group in [ticket.group for ticket in batch if ticket.group is not None]:
            if not any(map(self._is_stale, group.rollouts)):
                fresh.append(group)
                continue
            fresh += _part(group, lambda rollout: not self._is_stale(rollout))
            stale += _part(group, self._is_stale)
        return fresh, stale

    def done(self, policy_version: int) -> None:
        """Record that the learner has finished the batch it took, and that the engines have its weights."""
        assert self._num_done < self._num_taken, "a batch is done that was not taken"
        self._num_done += 1
        self._versions.append(policy_version)
        self._num_admitted_now = 0

    def in_flight(self) -> list[Ticket]:
        """Return the admitted prompts without a complete group, in the order of admission."""
        return [ticket for ticket in self._tickets.values() if ticket.group is None]

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs: counts, and every admitted prompt, with its group if that is complete."""
        counts = {
            "num_admitted": self._num_admitted,
            "num_admitted_now": self._num_admitted_now,
            "num_taken": self._num_taken,
            "num_done": self._num_done,
            "versions": list(self._versions),
        }
        tickets = [[t.number, t.group_id, t.item, t.last_batch, t.group] for t in self._tickets.values()]
        return {**counts, "tickets": tickets}

    def restore(self, state: Mapping[str, Any], tickets: Iterable[Ticket]) -> None:
        """Continue where another process was, with the prompts that it had admitted.

        Those that were `in_flight` there are so here.
        """
        self._num_admitted = state["num_admitted"]
        self._num_admitted_now = state["num_admitted_now"]
        self._num_taken = state["num_taken"]
        self._num_done = state["num_done"]
        self._versions.extend(state["versions"])
        self._tickets = {ticket.number: ticket for ticket in tickets}
        self._complete = {number: ticket for number, ticket in self._tickets.items() if ticket.group is not None}

    def _next_batch(self) -> list[Ticket]:
        return sorted(self._complete.values(), key=lambda ticket: (ticket.last_batch, ticket.number))[
            : self._batch_size
        ]

    def _is_stale(self, rollout: Rollout) -> bool:
        return rollout.policy_version is not None and rollout.policy_version < self._versions[0]


def _part(group: RolloutGroup, wanted: Callable[[Rollout], bool]) -> list[RolloutGroup]:
    """Return the group with its `wanted` rollouts alone; an empty list if there are none."""
    kept = [(episode, tuple(filter(wanted, episode.rollouts))) for episode in group.episodes]
    episodes = tuple(replace(episode, rollouts=rollouts) for episode, rollouts in kept if rollouts)
    return [replace(group, episodes=episodes)] if episodes else []
