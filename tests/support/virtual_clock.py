"""An asyncio event loop whose clock jumps to the next timer, so that a day passes in seconds."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Selector(selectors.DefaultSelector):
    """Never waits for a timer: it moves the clock there."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            return super().select(None)  # only another thread can go on
        events = super().select(0)
        if not events:
            self.now += max(timeout, 0.0)
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its time begins at 0.0 and passes only when nothing else is to be done."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


def run_virtual(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that runs on a `VirtualLoop`."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(coroutine)


def now() -> float:
    """Return the seconds since the running loop began."""
    return asyncio.get_running_loop().time()
