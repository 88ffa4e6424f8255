"""Ctrl-C and SIGTERM during a run: they interrupt waiting at once, and updates of the models after these are done."""

import asyncio
import signal
import threading
from types import FrameType, TracebackType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """A signal asked this process to end.

    Attributes:
        signal_number: SIGINT or SIGTERM.
    """

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal.Signals(signal_number).name)
        self.signal_number = signal_number


class Interrupts:
    """Raises `Interrupted` for SIGINT and SIGTERM within a `with` block, in the main thread. Elsewhere it does nothing.

    In a running event loop, a signal cancels all tasks of the loop, and the block then ends with `Interrupted`.

    Attributes:
        received: the signal that arrived; None before.
        is_held: whether signals are only remembered, because the models are between two states that could be saved.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self.is_held = False
        self._is_closed = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.getsignal(number) for number in SIGNALS}
        self.listen()
        return self

    def listen(self) -> None:
        """Take the signals back after a library, such as Ray, has set handlers of its own."""
        for number in self._before:
            signal.signal(number, self._handle)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler or signal.SIG_DFL)  # type: ignore[arg-type]
        # Ray raises a KeyboardInterrupt of its own for any signal that interrupts its calls.
        is_other = isinstance(error, (asyncio.CancelledError, KeyboardInterrupt)) and not isinstance(error, Interrupted)
        if self.received is not None and is_other:
            raise Interrupted(self.received) from None

    def hold(self) -> None:
        """From here on only remember a signal. Raises `Interrupted` if one has arrived that interrupted nothing."""
        self.is_held = True
        if self.received is not None:
            self.release()

    def release(self) -> None:
        """Raise `Interrupted` if a signal has arrived, and for each later one at once."""
        self.is_held = False
        self._is_closed = False
        if self.received is not None:
            raise Interrupted(self.received)

    def close(self) -> None:
        """From here on only remember a signal, as the run ends: a second one must not keep it from cleaning up."""
        self._is_closed = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        signal.alarm(0)  # while Ray starts, a handler of its C++ part comes first and would abort the process after 3 s
        first = self.received is None
        self.received = number
        if self.is_held or self._is_closed:
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise Interrupted(number) from None
        if first:
            loop.call_soon_threadsafe(self._cancel, loop)

    def _cancel(self, loop: asyncio.AbstractEventLoop) -> None:
        # A signal that arrives as the loop ends is not seen before its next work, which may be a part of cleaning up.
        if not (self.is_held or self._is_closed):
            for task in asyncio.all_tasks(loop):
                task.cancel()
