"""Where the wall-clock time of a step goes."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

OTHER, STEP = "other", "step"  # names that `take` adds


class Timeline:
    """Splits wall-clock time into named phases that do not overlap, so that the phases of a step add up to the step.

    A phase inside another one pauses the outer one. Only one thread may use a timeline: the one whose time it splits.
    """

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, on_phase: Callable[[str], None] = lambda name: None
    ) -> None:
        """`clock` returns seconds from any fixed moment; `on_phase` is told the name of each phase as it begins."""
        self._clock = clock
        self._on_phase = on_phase
        self._seconds: dict[str, float] = {}
        self._open: list[str] = []  # phases under way, the innermost last; only that one is counting
        self._taken_at = self._counted_to = clock()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside under `name`. Raises ValueError for the two names that `take` adds."""
        if name in (OTHER, STEP):
            raise ValueError(f"a phase cannot be called {name!r}")
        self._count()
        self._open.append(name)
        self._on_phase(name)
        try:
            yield
        finally:
            self._count()
            self._open.pop()

    def move(self, source: str, target: str, seconds: float) -> None:
        """Count `seconds` that were counted under `source` under `target` instead.

        For work that runs side by side within one phase and whose share is only known afterwards.
        """
        self._seconds[source] = self._seconds.get(source, 0.0) - seconds
        self._seconds[target] = self._seconds.get(target, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """Return the seconds by phase since the last `take` (at first, since the timeline was made), and start anew.

        "step" is the wall clock between the two calls, and "other" is what lies in no phase; all but "step" add up to
        it. A phase that is under way counts up to now, and goes on.
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
        self._counted_to = now
