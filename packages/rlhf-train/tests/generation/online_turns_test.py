"""Who has the device: what sleeps when, and under which phase its seconds are counted."""

import pytest

from rlhf_train.generation.turns import Turns
from rlhf_train.run.timeline import Timeline


class Side:
    """Notes its calls; each takes a second of the clock."""

    def __init__(self, name: str, log: list[str], clock: list[float]) -> None:
        self.name, self.log, self.clock = name, log, clock

    def sleep(self) -> None:
        self.log.append(f"{self.name} sleep")
        self.clock[0] += 1

    def release_cache(self) -> None:
        self.log.append(f"{self.name} release")
        self.clock[0] += 1

    def wake_up(self) -> None:
        self.log.append(f"{self.name} wake")
        self.clock[0] += 1


@pytest.fixture
def make():
    def turns(engines_sleep: bool, trainers_sleep: bool, engines_asleep: bool = False):
        log: list[str] = []
        clock = [0.0]
        timeline = Timeline(lambda: clock[0])
        sides = Side("engines", log, clock), Side("trainers", log, clock)
        options = {"engines_sleep": engines_sleep, "trainers_sleep": trainers_sleep, "engines_asleep": engines_asleep}
        return Turns(*sides, timeline, **options), log, timeline

    return turns


def test_both_sleep_in_turn_and_the_other_side_sleeps_first(make):
    turns, log, timeline = make(True, True, engines_asleep=True)
    turns.give_to_engines()
    assert log == ["trainers sleep", "engines wake"]
    turns.give_to_engines()
    assert len(log) == 2
    turns.give_to_trainers()
    turns.give_to_trainers()
    assert log[2:] == ["engines sleep", "trainers wake"]
    turns.give_to_engines()
    assert log[4:] == ["trainers sleep", "engines wake"]
    seconds = timeline.take()
    assert seconds == {"offload": 2, "wake": 2, "sleep": 1, "reload": 1, "other": 0, "step": 6}


@pytest.mark.parametrize(
    ("engines", "trainers", "calls"),
    [
        (False, False, []),
        # Trainers that stay still give the engines back what their passes took.
        (True, False, ["engines sleep", "trainers release", "engines wake"]),
        (False, True, ["trainers sleep", "trainers wake", "trainers sleep"]),
    ],
)
def test_a_side_that_does_not_sleep_keeps_its_states(make, engines, trainers, calls):
    turns, log, _ = make(engines, trainers)
    turns.give_to_engines()
    turns.give_to_trainers()
    turns.give_to_engines()
    assert log == calls
