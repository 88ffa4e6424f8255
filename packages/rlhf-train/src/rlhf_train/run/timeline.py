"""Seconds by phase."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Timeline:
    """Adds up wall-clock seconds under names, until taken."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside under `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def move(self, source: str, target: str, seconds: float) -> None:
        """Count `seconds` that were counted under `source` under `target` instead."""
        self._seconds[source] = self._seconds.get(source, 0.0) - seconds
        self._seconds[target] = self._seconds.get(target, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """Return the seconds so far and start anew."""
        seconds, self._seconds = self._seconds, {}
        return seconds
