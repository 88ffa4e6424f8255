"""What a person sees while waiting: one live line on a terminal, and a line now and then in a pipe."""

import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TextIO

_FRAMES = "|/-\\"
_REFRESH_S = 0.25
_HEARTBEAT_S = 20.0
_CLEAR = "\r\x1b[2K"
_UP = "\x1b[{}A\r\x1b[J"  # so many lines, and clears from there to the end of the screen


@dataclass(slots=True)
class _Work:
    text: str
    started: float
    done: int | None = None
    total: int | None = None
    ends_at: float | None = None
    above: Sequence[str] = ()


class Progress:
    """Says on a stream what is being done, for how long, and about how long it will still take.

    On a terminal the line is drawn again a few times per second, and `clear` removes it. Elsewhere a line is written
    when the text changes, and one more after every 20 seconds of silence.

    Args:
        stream: where to; None for stderr.
        clock: returns seconds from any fixed moment.
    """

    def __init__(self, stream: TextIO | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._own_stream = stream
        self._clock = clock
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._work: _Work | None = None
        self._written = ""  # the text written last where no terminal is
        self._written_at = -math.inf
        self._num_frames = 0
        self._num_above = 0  # lines above the live line that are drawn
        self._thread: threading.Thread | None = None

    @property
    def _stream(self) -> TextIO:
        return self._own_stream or sys.stderr

    @property
    def _is_live(self) -> bool:
        return self._stream.isatty() and os.environ.get("TERM") != "dumb"

    def show(
        self,
        text: str,
        *,
        done: int | None = None,
        total: int | None = None,
        ends_in_s: float | None = None,
        announce: bool = True,
        above: Sequence[str] = (),
    ) -> None:
        """Say that `text` is being done.

        Args:
            text: what; the clock goes on while it stays the same.
            done, total: how many parts of it, from which the time that is left is estimated.
            ends_in_s: the time that is left, where the caller knows better.
            announce: write a line at once where no terminal is; else only after a silence.
            above: lines that a terminal shows above the live line, as part of it, if it is high enough.
        """
        with self._lock:
            now = self._clock()
            is_new = self._work is None or self._work.text != text
            started = now if is_new or self._work is None else self._work.started
            ends_at = None if ends_in_s is None else now + ends_in_s
            self._work = _Work(text, started, done, total, ends_at, above)
            if self._is_live:
                self._draw()
            elif announce and text != self._written:
                self._write(f"{text} ...")
            elif is_new:
                self._written_at = now
            if self._thread is None:
                self._wake.clear()
                self._thread = threading.Thread(target=self._run, args=(self._wake,), daemon=True)
                self._thread.start()

    def clear(self) -> None:
        """Say that it is done; other lines may be written to the terminal from here on."""
        with self._lock:
            if self._work is not None and self._is_live:
                self._stream.write(self._erase())
                self._stream.flush()
            self._work = None
            self._thread = None
            self._wake.set()
            self._wake = threading.Event()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the terminal to other lines for the time of a `with` block. The live line then comes back."""
        with self._lock:
            if self._work is not None and self._is_live:
                self._stream.write(self._erase())
                self._stream.flush()
            yield

    @contextmanager
    def doing(self, text: str) -> Iterator[None]:
        """Say that `text` is being done for the time of a `with` block."""
        self.show(text)
        try:
            yield
        finally:
            self.clear()

    def beat(self) -> None:
        """Draw the line again, or write it after a long silence. A thread does so while something is being done."""
        with self._lock:
            if self._work is None:
                return
            if self._is_live:
                self._draw()
            elif self._clock() - self._written_at >= _HEARTBEAT_S:
                self._write(f"{self._work.text}: {self._state(self._work)}")

    def _run(self, stop: threading.Event) -> None:
        while not stop.wait(_REFRESH_S):
            with suppress(ValueError, OSError):  # the stream may be closed before the process ends
                self.beat()

    def _state(self, work: _Work) -> str:
        elapsed = self._clock() - work.started
        parts = [duration(elapsed)]
        if work.total is not None:
            parts.insert(0, f"{work.done or 0}/{work.total}")
        left = None if work.ends_at is None else work.ends_at - self._clock()
        if left is not None and left < 0:
            left = None  # that estimate was wrong
        if left is None and work.total is not None and work.done:
            left = elapsed / work.done * (work.total - work.done)
        if left is not None:
            parts.append(f"about {duration(max(left, 0.0))} left")
        return ", ".join(parts)

    def _draw(self) -> None:
        assert self._work is not None
        self._num_frames += 1
        frame = _FRAMES[self._num_frames % len(_FRAMES)]
        line = f"{frame} {self._work.text}  {self._state(self._work)}"
        size = self._size()
        above = self._work.above if len(self._work.above) < size.lines - 1 else ()
        erased = self._erase()
        drawn = "\n".join(text[: size.columns - 1] for text in (*above, line))  # a full line would wrap and stay
        encoding = self._stream.encoding or "utf-8"
        self._stream.write(erased + drawn.encode(encoding, "replace").decode(encoding))
        self._stream.flush()
        self._num_above = len(above)

    def _size(self) -> os.terminal_size:
        """Return the size of the stream's terminal: standard output may be a file, or another one."""
        try:
            size = os.get_terminal_size(self._stream.fileno())
        except (OSError, ValueError):  # a stream without a file
            size = os.terminal_size((0, 0))
        return size if min(size) else shutil.get_terminal_size()  # some terminals of containers do not say theirs

    def _erase(self) -> str:
        """Return what removes that which is drawn."""
        num_above, self._num_above = self._num_above, 0
        return _UP.format(num_above) if num_above else _CLEAR

    def _write(self, line: str) -> None:
        assert self._work is not None
        self._stream.write(f"{line}\n")
        self._stream.flush()
        self._written = self._work.text
        self._written_at = self._clock()


def duration(seconds: float) -> str:
    """Return a time as people say it: `42 s`, `3 min 20 s`, `2 h 5 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
