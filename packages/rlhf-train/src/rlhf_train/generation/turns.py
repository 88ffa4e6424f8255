"""Which side may use the device when engines and trainers share it."""

from dataclasses import dataclass
from typing import Protocol

from rlhf_train.run.timeline import Timeline

TURN_PHASES = ("offload", "wake", "sleep", "reload")


class Sleeper(Protocol):
    """One side of a shared device, which can release most of its memory and take it back."""

    def sleep(self) -> None:
        """Release device memory."""

    def wake_up(self) -> None:
        """Take the memory back. Called only after `sleep`."""


class Trainers(Sleeper, Protocol):
    """The side that may keep its states while the other one works."""

    def release_cache(self) -> None:
        """Give back the memory that the allocator keeps for later passes; the states stay."""


@dataclass(slots=True, eq=False, repr=False)
class Turns:
    """Gives the device to the engines or to the trainers, after putting the other side to sleep if it may sleep.

    The order matters: one side must release its memory before the other side takes it. Asking for a side that has the
    device already costs nothing. The timeline phases are "offload" (trainers fall asleep, or only release their cache),
    "wake" (engines wake up), "sleep" (engines fall asleep) and "reload" (trainers wake up).

    Attributes:
        engines, trainers: the two sides.
        timeline: counts the seconds of each change.
        engines_sleep, trainers_sleep: whether that side releases its memory while the other one works.
        engines_asleep: whether the engines are asleep at the start.
    """

    engines: Sleeper
    trainers: Trainers
    timeline: Timeline
    engines_sleep: bool
    trainers_sleep: bool
    engines_asleep: bool
    trainers_asleep: bool = False

    def give_to_engines(self) -> None:
        """Make the engines ready to generate and to receive weights."""
        if self.trainers_sleep and not self.trainers_asleep:
            with self.timeline.phase("offload"):
                self.trainers.sleep()
            self.trainers_asleep = True
        if self.engines_asleep:
            if not self.trainers_sleep:
                # Their passes have grown into the memory that the engines left.
                with self.timeline.phase("offload"):
                    self.trainers.release_cache()
            with self.timeline.phase("wake"):
                self.engines.wake_up()
            self.engines_asleep = False

    def give_to_trainers(self) -> None:
        """Make the trainers ready to compute."""
        if self.engines_sleep and not self.engines_asleep:
            with self.timeline.phase("sleep"):
                self.engines.sleep()
            self.engines_asleep = True
        if self.trainers_asleep:
            with self.timeline.phase("reload"):
                self.trainers.wake_up()
            self.trainers_asleep = False
