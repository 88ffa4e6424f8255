"""Between generation and training: what may be admitted, what comes out and when, and how stale it is at most."""

import numpy as np
import pytest

from record_testing import make_group, short_rollout
from rlhf_data.records import FinishReason, Prompt, Rollout
from rlhf_train.generation.stream import SampleStream, Ticket


def group(ticket: Ticket, *versions: int):
    """The group of a ticket, with one rollout per version."""
    rollouts = [
        short_rollout(f"{ticket.group_id}/{index}", ticket.group_id, version=version)
        for index, version in enumerate(versions or (0,))
    ]
    return make_group(ticket.group_id, Prompt("p", np.array([1]), "p"), rollouts)


def admit(stream: SampleStream, count: int) -> list[Ticket]:
    return [stream.admit(item) for item in range(count)]


def complete(stream: SampleStream, *tickets: Ticket) -> None:
    for ticket in tickets:
        stream.put(ticket, group(ticket))


def ids(groups) -> list[str]:
    return [one.group_id for one in groups]


def taken(stream: SampleStream) -> list[str]:
    return ids(stream.take()[0])


def test_synchronous_stream_has_room_for_one_batch_and_none_while_the_learner_works():
    stream = SampleStream(2, 9)
    assert stream.room == 2
    first = stream.admit(7)
    assert (first.group_id, first.item, stream.room, stream.num_in_flight) == ("step1/00000", 7, 1, 1)
    complete(stream, first)
    assert (stream.room, stream.num_in_flight, stream.num_queued) == (1, 0, 1)
    complete(stream, stream.admit(3))
    assert stream.room == 0
    with pytest.raises(AssertionError, match="without room"):
        stream.admit(0)
    assert (taken(stream), stream.num_queued) == (["step1/00000", "step1/00001"], 0)
    assert stream.room == 0 and stream.is_being_trained
    stream.done(policy_version=4)
    assert stream.room == 2 and not stream.is_being_trained
    assert stream.admit(0).group_id == "step2/00000"


def test_group_that_is_left_out_makes_room():
    stream = SampleStream(1, 9)
    [ticket] = admit(stream, 1)
    stream.leave_out(ticket)
    assert (stream.room, stream.num_in_flight) == (1, 0)
    with pytest.raises(AssertionError, match="not in flight"):
        stream.leave_out(ticket)
    with pytest.raises(AssertionError, match="not in flight"):
        complete(stream, ticket)
    assert stream.admit(0).group_id == "step1/00001"


def test_batch_comes_out_in_the_order_of_admission():
    stream = SampleStream(12, 9)
    tickets = admit(stream, 12)
    complete(stream, *[tickets[number] for number in (10, 2, 0, 11)])
    assert taken(stream) == [f"step1/{number:05d}" for number in (0, 2, 10, 11)]


def test_batch_that_was_not_full_counts_as_a_full_one():
    stream = SampleStream(3, 9)
    complete(stream, *admit(stream, 1))
    stream.take()
    assert stream.room == 0
    stream.done(1)
    assert stream.room == 3


def test_admission_counts_trained_queued_and_in_flight_against_finished_batches_and_staleness():
    stream = SampleStream(2, 9, max_staleness=1)
    complete(stream, *admit(stream, 4))
    assert stream.room == 0  # (0 + 1 + 1) x 2
    stream.take()
    assert stream.room == 0  # two taken, two queued
    stream.done(1)
    assert stream.room == 2
    complete(stream, *admit(stream, 1))
    stream.take()
    assert stream.room == 1  # (1 + 1 + 1) x 2 - 4 taken - 1 queued


def test_no_prompt_is_admitted_that_could_not_be_trained_any_more():
    stream = SampleStream(2, 2, max_staleness=3)
    assert stream.room == 4
    complete(stream, *admit(stream, 4))
    for _ in range(2):
        stream.take()
        stream.done(1)
        assert stream.room == 0


def test_batch_waits_for_further_groups_only_while_some_may_come():
    stream = SampleStream(2, 9, max_staleness=1)
    complete(stream, *admit(stream, 1))
    assert not stream.is_ready(can_grow=True)
    assert stream.is_ready(can_grow=False)


def test_slow_group_is_overtaken_until_its_last_batch_and_then_waited_for():
    stream = SampleStream(2, 9, max_staleness=1)
    slow, *others = admit(stream, 4)
    complete(stream, *others)
    assert stream.is_ready(can_grow=True)
    assert taken(stream) == ["step1/00001", "step1/00002"]
    stream.done(1)
    complete(stream, *admit(stream, 2))
    # Three groups are complete, but the next batch is the last one that may train on the slow group.
    assert not stream.is_ready(can_grow=True)
    complete(stream, slow)
    assert taken(stream) == ["step1/00000", "step1/00003"]


def test_batch_that_would_leave_too_little_room_for_urgent_groups_waits():
    stream = SampleStream(1, 9, max_staleness=2)
    first = admit(stream, 3)  # the last batches of all three are 0 to 2
    complete(stream, first[0])
    assert stream.is_ready(can_grow=True)
    stream.take()
    stream.done(1)
    [late] = admit(stream, 1)
    complete(stream, late)
    # If it were trained now, both groups in flight would remain for the one batch 2.
    assert not stream.is_ready(can_grow=True)
    complete(stream, first[2])
    assert stream.is_ready(can_grow=True)
    assert taken(stream) == ["step1/00002"]


def test_groups_that_failed_leave_a_short_batch_when_nothing_else_may_come():
    stream = SampleStream(2, 9)
    one, other = admit(stream, 2)
    stream.leave_out(one)
    complete(stream, other)
    assert not stream.is_ready(can_grow=True)
    assert stream.is_ready(can_grow=False)
    assert taken(stream) == ["step1/00001"]


@pytest.mark.parametrize(
    ("max_staleness", "fresh", "old"),
    [
        (0, [[1], [0], [0, 1]], [[0], [1], [0]]),  # of groups 0, 1 and 3; of groups 0, 1 and 2
        (1, [[1], [0, 1], [0], [0, 1]], [[0]]),
    ],
)
def test_rollout_with_a_token_of_weights_that_no_engine_should_have_does_not_come_out(max_staleness, fresh, old):
    stream = SampleStream(4, 9, max_staleness)
    for version in (3, 5):  # two batches were trained, after which the weights had these versions
        stream.take()
        stream.done(version)
    for versions in [(0, 5), (5, 3), (3,), (5, 5)]:
        ticket = stream.admit(0)
        stream.put(ticket, group(ticket, *versions))
    batch, stale = stream.take()
    places = [[int(rollout.rollout_id.split("/")[-1]) for rollout in one.rollouts] for one in (*batch, *stale)]
    assert places == fresh + old
    assert len(set(ids(batch)) | set(ids(stale))) == 4


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_rollout_without_a_token_of_the_policy_has_no_age(max_staleness):
    """The environment of one episode failed at its start. The others are of the newest weights, and are trained."""
    stream = SampleStream(2, 9, max_staleness)
    for _ in range(max_staleness + 1):
        stream.take()
        stream.done(7)
    ticket = stream.admit(0)
    whole = group(ticket, 7, 7, 7)
    failed = Rollout(f"{ticket.group_id}/3", ticket.group_id, whole.rollouts[0].spans[:1], FinishReason.STOP)
    stream.put(ticket, make_group(ticket.group_id, whole.prompt, (*whole.rollouts, failed)))
    assert failed.policy_version is None
    batch, stale = stream.take()
    assert [len(one.rollouts) for one in batch] == [4] and stale == []


def test_learner_is_done_only_with_what_it_took():
    with pytest.raises(AssertionError, match="not taken"):
        SampleStream(1, 9).done(0)


@pytest.mark.parametrize(("size", "batches", "staleness"), [(0, 9, 0), (1, 0, 0), (1, 9, -1)])
def test_sizes_that_cannot_work_are_refused(size, batches, staleness):
    with pytest.raises(ValueError, match=r"must be >= 1.*must be >= 0"):
        SampleStream(size, batches, staleness)


def test_restored_stream_has_the_same_groups_waiting_and_prompts_in_flight():
    stream = SampleStream(2, 9, max_staleness=1)
    one, _, three, _ = admit(stream, 4)
    complete(stream, three)
    other = SampleStream(2, 9, max_staleness=1)
    state = stream.state()
    other.restore(state, [Ticket(*parts) for parts in state["tickets"]])
    assert [ticket.group_id for ticket in other.in_flight()] == ["step1/00000", "step1/00001", "step1/00003"]
    assert (other.room, other.num_queued) == (0, 1)
    with pytest.raises(AssertionError, match="not in flight"):
        complete(other, one)  # of the first stream
    complete(other, other.in_flight()[0])
    assert taken(other) == ["step1/00000", "step1/00002"]
    other.done(1)
    assert other.admit(5).group_id == "step2/00000"


@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_lost_or_too_stale_in_whatever_order_groups_finish(seed):
    """Random schedules: prompts are admitted, fail, finish in any order, and batches are taken whenever they may be."""
    rng = np.random.default_rng(seed)
    for _ in range(100):
        check_random_schedule(rng, *(int(rng.integers(low, high + 1)) for low, high in ((1, 4), (1, 6), (0, 3))))


def check_random_schedule(rng: np.random.Generator, size: int, batches: int, staleness: int) -> None:
    stream = SampleStream(size, batches, staleness)
    admitted_at: dict[str, int] = {}
    lost: set[str] = set()
    trained: list[str] = []
    flying: list[Ticket] = []

    def admit_one(batch):
        flying.append(stream.admit(0))
        admitted_at[flying[-1].group_id] = batch

    for batch in range(batches):
        while not stream.is_ready(can_grow=bool(flying) or stream.room > 0):
            what = rng.choice(["admit"] * (stream.room > 0) + ["finish", "finish", "fail"] * bool(flying))
            if what == "admit":
                admit_one(batch)
                continue
            ticket = flying.pop(int(rng.integers(len(flying))))
            if what == "fail":
                stream.leave_out(ticket)
                lost.add(ticket.group_id)
            else:
                stream.put(ticket, group(ticket, batch))
        groups, stale = stream.take()
        assert not stale and len(groups) == size
        assert all(batch - admitted_at[name] <= staleness for name in ids(groups))
        trained += ids(groups)
        for _ in range(int(rng.integers(4))):  # the learner works meanwhile
            if stream.room:
                admit_one(batch)
        stream.done(batch + 1)
    assert len(set(trained)) == len(trained) == size * batches
    assert set(admitted_at) == {*trained, *lost}
