"""Says what a run waits for when a wait lasts long."""

import faulthandler
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from rlhf_data.options.progress import duration
from rlhf_train.run.observer import Observer
from rlhf_train.run.timeline import PHASES

STACKS_AFTER_S = 600.0  # of one wait; from then on, stacks are written, too
_CHECK_S = 1.0
_STDERR = 2


class Watch:
    """Says what the run has been waiting for after a minute, and again each time the wait has become twice as long.

    It also says so after ten minutes. From then on it writes, each time, the stacks of all threads of this process to
    standard error, which is the log of the run. In a `with` block a thread does so.

    Args:
        observer: is told of phases as they begin, and of long waits on that thread.
        first_s: length of a wait, in seconds, after which it is said for the first time.
        clock: returns seconds since a fixed moment.

    Attributes:
        details: each returns what more is known about the wait, such as who has not answered; "" for nothing.
    """

    def __init__(
        self, observer: Observer, *, first_s: float = 60.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.details: list[Callable[[], str]] = []
        self._observer = observer
        self._first_s = first_s
        self._clock = clock
        self._stop = threading.Event()
        self._begin("")

    def starting(self, text: str) -> None:
        """See `Observer`."""
        self._observer.starting(text)
        self._begin(f"the start of {text}")

    def ending(self, error: BaseException) -> None:
        """See `Observer`."""
        self._observer.ending(error)
        self._begin(f"the end of the run after {type(error).__name__}: {error}")

    def phase(self, name: str) -> None:
        """See `Observer`; for `Timeline`."""
        self._observer.phase(name)
        self._begin(PHASES[name])

    def _begin(self, what: str) -> None:
        self._wait = [what, self._clock(), self._first_s]  # the last is when it is said next, in seconds

    def look(self) -> None:
        """Say what the run waits for, if it is time."""
        wait = self._wait
        what, since, next_s = wait
        waited_s = self._clock() - since
        if not what or waited_s < next_s:
            return
        wait[2] = 2 * waited_s if waited_s >= STACKS_AFTER_S else min(2 * waited_s, STACKS_AFTER_S)
        known = [text for detail in self.details if (text := detail())]
        self._observer.waiting("; ".join([f"waiting for {duration(waited_s)}: {what}", *known]))
        if waited_s >= STACKS_AFTER_S:
            write_stacks()

    def __enter__(self) -> "Watch":
        threading.Thread(target=self._run, name="watch", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.wait(_CHECK_S):
            with suppress(Exception):  # what is looked at changes meanwhile, and the terminal may be closed
                self.look()


def write_stacks() -> None:
    """Write the stacks of all threads of this process to standard error."""
    faulthandler.dump_traceback(_STDERR, all_threads=True)


@contextmanager
def stacks_written(after_s: float = STACKS_AFTER_S) -> Iterator[None]:
    """Call `write_stacks` if a `with` block takes `after_s` seconds.

    A thread does so, while it holds the interpreter's lock. `faulthandler.dump_traceback_later` would read the stacks
    without the lock, which can crash the process.
    """
    timer = threading.Timer(after_s, write_stacks)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
