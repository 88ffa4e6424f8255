"""Splits the wall-clock time of a step into phases."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rlhf_train.tracing.trace import CONTROLLER, PARTS, Trace

PHASES = {
    "generate": "engines answer prompts",
    "reward": "the run waits for rewards after the last answer",
    "load": "rewards are shaped, and rollouts dealt to the trainers",
    "experience": "old and reference log-probs, values and advantages",
    "train": "updates of the models",
    "sync": "weights go to the engines",
    "evaluate": "held-out prompts are answered and their rewards summed up",
    "write": "metrics and rollouts are handed to their writers",
    "save": "models are written",
    "checkpoint": "the state of the run is copied to host memory, to be written while the run goes on",
    "offload": "trainers give memory of a shared GPU back",
    "reload": "trainers take it again",
    "sleep": "engines give memory of a shared GPU back",
    "wake": "engines take it again",
}
"""The phases of an online run and what happens in them."""

OTHER, STEP = "other", "step"  # added by `take`


class Timeline:
    """Splits the wall-clock time of one thread into named phases that do not overlap.

    The phases of a step, with "other" for the rest, add up to the step. A phase within another one pauses the outer
    phase. Only the thread whose time is split may use a timeline.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        on_phase: Callable[[str], None] = lambda name: None,
        trace: Trace | None = None,
    ) -> None:
        """Split the time by `clock`, which returns seconds since a fixed moment.

        `on_phase` is called with the name of a phase that begins. `trace` is the file of phases and steps, with the
        same clock; None for none.
        """
        self._clock = clock
        self._on_phase = on_phase
        self.trace = trace or Trace(clock, is_on=False)
        self._seconds: dict[str, float] = {}
        self._open: list[str] = []  # open phases, the innermost last; time counts for that one only
        self._made_at = self._taken_at = self._counted_to = self._part_from = clock()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the timeline was made."""
        return self._clock() - self._made_at

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time within a `with` block as `name`. Raises ValueError for a name that is not among `PHASES`."""
        if name not in PHASES:
            raise ValueError(f"{name!r} is not a phase; those are {', '.join(PHASES)}")
        self._count()
        self._open.append(name)
        self._on_phase(name)
        self.trace.begin(CONTROLLER, name, self._counted_to, **{"waits for": PHASES[name]})
        try:
            yield
        finally:
            self._count()
            self._open.pop()
            self.trace.end(CONTROLLER, self._counted_to)

    def end_part(self, name: str) -> None:
        """Show the time from the last call to the last `take` as a part of the run, such as a step, in the trace."""
        self.trace.slice(PARTS, name, self._part_from, self._taken_at)
        self._part_from = self._taken_at

    def move(self, source: str, target: str, seconds: float) -> None:
        """Move `seconds` from phase `source` to phase `target`.

        For concurrent work within one phase, whose share of the time is known only afterwards. It was at the end.
        """
        now = self._clock()
        if seconds:
            self.trace.slice(CONTROLLER, target, now - seconds, now, **{"waits for": PHASES[target]})
        self._seconds[source] = self._seconds.get(source, 0.0) - seconds
        self._seconds[target] = self._seconds.get(target, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """Return the seconds of each phase since the last `take`, or since the timeline was created, and reset them.

        The result also has "step", the seconds between the two calls, and "other", the seconds outside any phase. All
        entries except "step" add up to "step". An open phase is counted up to now and stays open.
        """
        self._count()
        seconds, self._seconds = self._seconds, {}
        elapsed = self._counted_to - self._taken_at
        self._taken_at = self._counted_to
        return {**seconds, OTHER: elapsed - sum(seconds.values()), STEP: elapsed}

    def _count(self) -> None:
        now = self._clock()
        if self._open:
            name = self._open[-1]
            self._seconds[name] = self._seconds.get(name, 0.0) + now - self._counted_to
            self.trace.phase(name, self._counted_to, now)
        self._counted_to = now
