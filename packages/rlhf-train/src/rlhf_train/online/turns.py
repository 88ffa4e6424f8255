"""Who has the device when engines and trainers share it."""

from typing import Protocol

from rlhf_train.run.timeline import Timeline


class Sleeper(Protocol):
    """One side of a shared device: it can give most of its memory back, and take it again."""

    def sleep(self) -> None:
        """Give memory of the device back."""

    def wake_up(self) -> None:
        """Take the memory again. Only called after `sleep`."""


class Turns:
    """Gives the device to the engines or to the trainers, and puts the other side to sleep first where it may sleep.

    Writes the phases "offload" (trainers fall asleep), "wake" (engines wake up), "sleep" (engines fall asleep) and
    "reload" (trainers wake up).

    Args:
        engines, trainers: the two sides.
        timeline: where the seconds of each change are counted.
        engines_sleep, trainers_sleep: whether that side gives its memory back while the other one works.
        engines_asleep: whether the engines sleep already.
    """

    def __init__(
        self,
        engines: Sleeper,
        trainers: Sleeper,
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
        """Let the engines work: for generation, and to receive weights."""
        if self._trainers_sleep and not self._trainers_asleep:
            with self._timeline.phase("offload"):
                self._trainers.sleep()
            self._trainers_asleep = True
        if self._engines_asleep:
            with self._timeline.phase("wake"):
                self._engines.wake_up()
            self._engines_asleep = False

    def give_to_trainers(self) -> None:
        """Let the trainers work."""
        if self._engines_sleep and not self._engines_asleep:
            with self._timeline.phase("sleep"):
                self._engines.sleep()
            self._engines_asleep = True
        if self._trainers_asleep:
            with self._timeline.phase("reload"):
                self._trainers.wake_up()
            self._trainers_asleep = False
