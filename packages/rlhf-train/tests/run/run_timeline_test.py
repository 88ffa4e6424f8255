"""Phases against a clock that the tests set by hand."""

import pytest

from record_testing import ManualClock
from rlhf_train.run.timeline import Timeline


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def timeline(clock):
    return Timeline(clock)


def test_phases_add_up_over_repeats_and_leave_the_rest_to_other(clock, timeline):
    clock.now += 1
    for seconds in (2, 4):
        with timeline.phase("train"):
            clock.now += seconds
        clock.now += 0.5
    with timeline.phase("sync"):
        clock.now += 8
    assert timeline.take() == {"train": 6, "sync": 8, "other": 2, "step": 16}


def test_a_nested_phase_pauses_the_outer_one(clock, timeline):
    with timeline.phase("sync"):
        clock.now += 1
        with timeline.phase("wake"):
            clock.now += 10
            with timeline.phase("load"):
                clock.now += 100
            clock.now += 20
        clock.now += 2
    assert timeline.take() == {"sync": 3, "wake": 30, "load": 100, "other": 0, "step": 133}


def test_a_phase_within_itself_counts_once(clock, timeline):
    with timeline.phase("train"), timeline.phase("train"):
        clock.now += 5
    assert timeline.take() == {"train": 5, "other": 0, "step": 5}


def test_take_starts_anew_and_a_phase_under_way_goes_on(clock, timeline):
    clock.now += 3
    with timeline.phase("train"):
        clock.now += 1
        assert timeline.take() == {"train": 1, "other": 3, "step": 4}
        clock.now += 2
    clock.now += 0.25
    assert timeline.take() == {"train": 2, "other": 0.25, "step": 2.25}
    assert timeline.take() == {"other": 0, "step": 0}


def test_a_phase_that_raises_is_counted_and_ended(clock, timeline):
    def fail():
        with timeline.phase("train"):
            clock.now += 2
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    clock.now += 1
    assert timeline.take() == {"train": 2, "other": 1, "step": 3}


def test_moved_seconds_leave_the_sum_alone(clock, timeline):
    with timeline.phase("generate"):
        clock.now += 10
    timeline.move("generate", "reward", 4)
    assert timeline.take() == {"generate": 6, "reward": 4, "other": 0, "step": 10}


@pytest.mark.parametrize("name", ["other", "step", "Train", ""])
def test_names_that_are_no_phase_are_refused(timeline, name):
    with pytest.raises(ValueError, match=f"'{name}' is not a phase; those are generate"), timeline.phase(name):
        pass


def test_elapsed_seconds_run_from_the_begin_whatever_was_taken(clock, timeline):
    clock.now += 3
    timeline.take()
    clock.now += 4
    assert timeline.elapsed_s == 7
