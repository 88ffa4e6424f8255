"""Which side may use the device when engines and trainers share it."""

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


class Turns:
    """Gives the device to the engines or to the trainers, after putting the other side to sleep if it may sleep.

    The order matters: one side must release its memory before the other side takes it. Asking for a side that has the
    device already costs nothing. The timeline phases are "offload" (trainers fall asleep, or only release their cache),
    "wake" (engines wake up), "sleep" (engines fall asleep) and "reload" (trainers wake up).

    Args:
        engines, trainers: the two sides.
        timeline: counts the seconds of each change.
        engines_sleep, trainers_sleep: whether that side releases its memory while the other one works.
        engines_asleep: whether the engines are asleep at the start.
    """

    def __init__(
        self,
        engines: Sleeper,
        trainers: Trainers,
        timeline: Timeline,
        *,
        engines_sleep: bool,
        trainers_sleep: bool,
        engines_asleep: bool,
    ) -> None:
        self._engines = engines
        self._trainers = trainers
        self._timeline = timeline
        self._engines_sleep = engines_sleep
        self._trainers_sleep = trainers_sleep
        self._engines_asleep = engines_asleep
        self._trainers_asleep = False

    def give_to_engines(self) -> None:
        """Make the engines ready to generate and to receive weights."""
        if self._trainers_sleep and not self._trainers_asleep:
            with self._timeline.phase("offload"):
                self._trainers.sleep()
            self._trainers_asleep = True
        if self._engines_asleep:
            if not self._trainers_sleep:
                # Their passes have grown into the memory that the engines left.
                with self._timeline.phase("offload"):
                    self._trainers.release_cache()
            with self._timeline.phase("wake"):
                self._engines.wake_up()
            self._engines_asleep = False

    def give_to_trainers(self) -> None:
        """Make the trainers ready to compute."""
        if self._engines_sleep and not self._engines_asleep:
            with self._timeline.phase("sleep"):
                self._engines.sleep()
            self._engines_asleep = True
        if self._trainers_asleep:
            with self._timeline.phase("reload"):
                self._trainers.wake_up()
            self._trainers_asleep = False
