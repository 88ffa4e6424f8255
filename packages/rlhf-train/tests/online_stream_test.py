"""Between generation and training: what may be started, what comes out, and what is too old."""

import numpy as np
import pytest

from record_testing import make_group
from rlhf_data.records import FinishReason, Prompt, Rollout, Span, SpanSource
from rlhf_train.online.stream import SampleStream


def group(number: int, *versions: int, prefix: str = "step1"):
    """A group with one rollout per version."""
    group_id = f"{prefix}/{number}"
    rollouts = tuple(
        Rollout(
            f"{group_id}/{index}",
            group_id,
            (Span(SpanSource.PROMPT, [1]), Span(SpanSource.POLICY, [2], [-1.0], policy_version=version)),
            FinishReason.STOP,
        )
        for index, version in enumerate(versions)
    )
    return make_group(group_id, Prompt("p", np.array([1]), "p"), rollouts)


def fill(stream: SampleStream, *groups) -> None:
    for one in groups:
        stream.start()
        stream.put(one)


def ids(groups) -> list[str]:
    return [one.group_id for one in groups]


def test_synchronous_stream_has_room_for_one_batch_and_none_while_the_learner_works():
    stream = SampleStream(2)
    assert stream.room == 2
    stream.start()
    assert (stream.room, stream.num_in_flight) == (1, 1)
    stream.put(group(0, 0, 0, 0))
    assert (stream.room, stream.num_in_flight, stream.num_queued_rollouts) == (1, 0, 3)
    fill(stream, group(1, 0))
    assert stream.room == 0
    with pytest.raises(AssertionError, match="without room"):
        stream.start()
    batch, stale = stream.take()
    assert (ids(batch), stale, stream.num_queued_rollouts) == (["step1/0", "step1/1"], [], 0)
    assert stream.room == 0
    stream.done(policy_version=4)
    assert stream.room == 2


def test_group_that_is_left_out_makes_room():
    stream = SampleStream(1)
    stream.start()
    stream.leave_out()
    assert (stream.room, stream.num_in_flight) == (1, 0)
    with pytest.raises(AssertionError, match="not started"):
        stream.leave_out()
    with pytest.raises(AssertionError, match="not started"):
        stream.put(group(0, 0))


def test_batch_comes_out_in_the_order_in_which_groups_were_started():
    stream = SampleStream(12)
    fill(stream, *[group(number, 0) for number in (10, 2, 0, 11)])
    assert ids(stream.take()[0]) == ["step1/0", "step1/2", "step1/10", "step1/11"]


def test_batch_that_was_not_full_counts_as_a_full_one():
    stream = SampleStream(3)
    fill(stream, group(0, 0))
    stream.take()
    assert stream.room == 0
    stream.done(1)
    assert stream.room == 3


def test_admission_counts_trained_queued_and_in_flight_against_version_and_staleness():
    stream = SampleStream(2, max_staleness=1)
    fill(stream, group(0, 0), group(1, 0))
    assert stream.room == 0  # the queue has room for one batch
    stream.take()
    assert stream.room == 2  # (0 + 1 + 1) x 2 - 2 taken
    fill(stream, group(2, 0), group(3, 0))
    stream.take()
    assert stream.room == 0  # (0 + 1 + 1) x 2 - 4 taken: a third batch would be two updates old
    stream.done(1)
    assert stream.room == 2


@pytest.mark.parametrize(("max_staleness", "fresh"), [(0, ["s/3"]), (1, ["s/1", "s/2", "s/3"])])
def test_group_with_a_token_of_older_weights_than_allowed_does_not_come_out(max_staleness, fresh):
    stream = SampleStream(4, max_staleness)
    for version in (3, 5):  # two batches were trained, after which the weights had these versions
        stream.take()
        stream.done(version)
    groups = [
        group(0, 0, 5, prefix="s"),
        group(1, 5, 3, prefix="s"),
        group(2, 3, prefix="s"),
        group(3, 5, 5, prefix="s"),
    ]
    fill(stream, *groups)
    batch, stale = stream.take()
    assert ids(batch) == fresh
    assert ids(stale) == [name for name in ("s/0", "s/1", "s/2") if name not in fresh]


def test_learner_is_done_only_with_what_it_took():
    with pytest.raises(AssertionError, match="not taken"):
        SampleStream(1).done(0)


@pytest.mark.parametrize(("size", "staleness"), [(0, 0), (1, -1)])
def test_sizes_that_cannot_work_are_refused(size, staleness):
    with pytest.raises(ValueError, match=r"must be >= 1.*must be >= 0"):
        SampleStream(size, staleness)
