"""Writes what happens in a run, and when, to a file that Perfetto and Chrome show. Torch-free.

The file has the JSON Array Format of the Trace Event Format, one event per line:
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import json
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

LIMIT_BYTES = 256 << 20  # viewers hold a whole file in memory, several times as large
_FLUSH_BYTES = 1 << 16
_KEPT_PHASES = 1024
_KEPT_WORK = 1 << 14  # of a run without a timeline, where nobody takes it
_SHORTEST_WAIT_S = 0.001
_GROUPS = "prompts"  # the process of the viewer that shows rollout groups


class Track(NamedTuple):
    """A row of the viewer: the name of a process and that of a thread in it."""

    process: str
    thread: str


CONTROLLER = Track("controller", "phases")
PARTS = Track("controller", "steps")


class Span(NamedTuple):
    """What has ended.

    Attributes:
        name: what it was.
        begin_s, end_s: seconds of a clock.
        depth: how many spans it lies in.
        args: more about it.
        track: where it is shown; None for the track of its process.
    """

    name: str
    begin_s: float
    end_s: float
    depth: int = 0
    args: Mapping[str, Any] = MappingProxyType({})
    track: Track | None = None


class Work(NamedTuple):
    """What a process did.

    Attributes:
        machine: see `machine`.
        now_s: what the process's clock shows, in seconds.
        spans: by the same clock.
    """

    machine: str
    now_s: float
    spans: list[Span]


class WorkLog:
    """Notes what this process does, one thing within another, for `Trace.work` of another process."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._spans: deque[Span] = deque(maxlen=_KEPT_WORK)
        self._depth = 0

    @contextmanager
    def doing(self, name: str, **args: Any) -> Iterator[None]:
        """Note the time of a `with` block as `name`, with `args`."""
        begin_s = self._clock()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            self.add(Span(name, begin_s, self._clock(), self._depth, args))

    def add(self, span: Span) -> None:
        """Note what has ended, by `time.perf_counter`."""
        self._spans.append(span)

    def take(self) -> Work:
        """Return what was done since the last call."""
        spans = list(self._spans)
        self._spans.clear()
        return Work(machine(), self._clock(), spans)


WORK = WorkLog()
"""What this process does, if it is a rank."""


class Trace:
    """Writes events as they happen. Other threads may use it, too.

    A `Trace` that is not `open` keeps its events until it is; one that is `off` ignores them all. What has begun and
    has not ended is in the file already. The last bracket comes with `close`, which also ends what is open: the format
    allows a file without it, so that one can be read while the run goes on, and after the run was killed.

    Args:
        clock: returns seconds since a fixed moment, the same for all processes of this machine. Times of the file count
            from the construction of this object, in microseconds.
        is_on: whether anything is written.
        limit_bytes: about the largest size of the file.
        notice: is told that the file has reached its limit, after which nothing is written.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        *,
        is_on: bool = True,
        limit_bytes: int = LIMIT_BYTES,
        notice: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.is_on = is_on
        self._clock = clock
        self._limit_bytes = limit_bytes
        self._notice = notice
        self._start = clock()
        self._lock = threading.RLock()
        self._file: Any = None
        self._size = 0
        self._lines: list[str] = []
        self._num_pending = 0  # bytes in `_lines`
        self._ids: dict[Track, tuple[int, int]] = {}
        self._pids: dict[str, int] = {}
        self._open: dict[Track, list[str]] = {}  # names of what has begun, the innermost last
        self._items: dict[str, str] = {}  # rollout groups by id, with what happens to them
        self._phases: deque[Span] = deque(maxlen=_KEPT_PHASES)
        self._phase_from = 0.0  # since when the open phase counts
        self._busy_to: dict[Track, float] = {}  # the end of the last work on a track
        self._shifts: dict[str, tuple[float, float]] = {}  # by machine: seconds of the quickest answer, and the shift

    def now(self) -> float:
        """Return the time of the clock in seconds."""
        return self._clock()

    def open(self, path: Path) -> None:
        """Write to `path`; to a free name beside it, such as timeline.2.json, if there is a file: another process's."""
        if not self.is_on or self._file is not None:
            return
        number = 1
        name = path
        while name.exists():
            number += 1
            name = path.with_suffix(f".{number}{path.suffix}")
        self._file = open(name, "wb")  # noqa: SIM115 - `close` closes it
        self._file.write(b"[\n")
        self.flush()

    def begin(self, track: Track, name: str, at_s: float | None = None, **args: Any) -> None:
        """Begin `name` on a track, within what is open there, at a time of the clock; None for now."""
        if not self.is_on:
            return
        with self._lock:
            self._open.setdefault(track, []).append(name)
            self._event("B", name, track, at_s, **_args(args))
        if track.process == CONTROLLER.process:
            self._phase_from = self.now() if at_s is None else at_s
            self.flush()  # after a kill, the file says in what

    def end(self, track: Track, at_s: float | None = None) -> None:
        """End what was begun last on a track, if anything is open there."""
        with self._lock:
            if self._open.get(track):
                self._event("E", self._open[track].pop(), track, at_s)

    def state(self, track: Track, name: str | None, **args: Any) -> None:
        """End the state that a track is in, and begin another one; None for none."""
        with self._lock:
            if self._open.get(track) != [name]:
                self.end(track)
                if name is not None:
                    self.begin(track, name, **args)

    def slice(self, track: Track, name: str, begin_s: float, end_s: float, **args: Any) -> None:
        """Add what began and ended at times of the clock."""
        duration = max(self._micros(end_s) - self._micros(begin_s), 0)
        self._event("X", name, track, begin_s, dur=duration, **_args(args))

    def count(self, track: Track, value: float) -> None:
        """Add a number that is drawn as a curve."""
        self._event("C", track.thread, track, args={"value": value})

    def group(self, group_id: str, doing: str | None, **args: Any) -> None:
        """Note what happens to a rollout group from now on. The first call begins it, None ends it."""
        if not self.is_on:
            return
        common = {"cat": "prompt", "id": group_id}
        track = Track(_GROUPS, _GROUPS)
        with self._lock:
            now = self._clock()
            last = self._items.pop(group_id, None)
            if last is not None:
                self._event("e", last, track, now, **common)
            elif doing is not None:
                self._event("b", "prompt", track, now, **common, args={"group": group_id})
            if doing is not None:
                self._items[group_id] = doing
                self._event("b", doing, track, now, **common, **_args(args))
            elif last is not None:
                self._event("e", "prompt", track, now, **common, **_args(args))

    def phase(self, name: str, begin_s: float, end_s: float) -> None:
        """Note for `work` what the run did between two times of the clock."""
        if self.is_on:
            self._phases.append(Span(name, begin_s, end_s))
            self._phase_from = end_s

    def busy(self, track: Track, doing: str | None) -> None:
        """Begin what a process does, or end it with None. A wait between is added with the phases of the run then."""
        if doing is not None and not self._open.get(track):
            self._wait(track, self._clock())
        self.state(track, doing)
        self._busy_to[track] = self._clock()  # after what ends, so that a wait begins later

    def work(self, track: Track, work: "Work", asked_s: float) -> None:
        """Add what another process did, and the waits between.

        Args:
            track: of the process.
            work: its answer.
            asked_s: when it was asked, a moment ago. The middle of question and answer tells what the clock of another
                machine shows; the quickest answer of each machine counts.
        """
        shift = 0.0
        if work.machine != machine():
            answered_s = self._clock()
            found = answered_s - asked_s, (answered_s + asked_s) / 2 - work.now_s
            self._shifts[work.machine] = min(found, self._shifts.get(work.machine, found))
            shift = self._shifts[work.machine][1]
        floors: dict[Track, float] = {}  # by track, when the last of its outermost spans may begin
        for span in sorted(work.spans, key=lambda span: (span.begin_s, span.depth)):
            shown_on = span.track or track
            if not span.depth or shown_on not in floors:
                floors[shown_on] = self._busy_to.get(shown_on, self._start)
            begin_s = max(span.begin_s + shift, floors[shown_on])
            end_s = max(span.end_s + shift, begin_s)
            if not span.depth:
                if span.track is None:
                    self._wait(track, begin_s)
                self._busy_to[shown_on] = end_s
            self.slice(shown_on, span.name, begin_s, end_s, **span.args)

    def _wait(self, track: Track, until_s: float) -> None:
        """Add the wait from the last work on a track, if it was long enough to see."""
        since_s = self._busy_to.get(track, until_s)
        if until_s - since_s >= _SHORTEST_WAIT_S:
            self.slice(track, "wait", since_s, until_s, **self._waited_for(since_s, until_s))

    def _waited_for(self, begin_s: float, end_s: float) -> dict[str, str]:
        seconds: Counter[str] = Counter()
        phases = self._phases.copy()  # at once: the thread of the run goes on
        phases.extend(Span(name, self._phase_from, end_s) for name in self._open.get(CONTROLLER, [])[-1:])
        for phase in reversed(phases):
            if phase.end_s <= begin_s:
                break
            if (common := min(phase.end_s, end_s) - max(phase.begin_s, begin_s)) > 0:
                seconds[phase.name] += common
        text = ", ".join(f"{name} {value:.3f} s" for name, value in seconds.most_common())
        return {"waits for": text} if text else {}

    def flush(self) -> None:
        """Write what has not been written."""
        with self._lock:
            if self._file is None or not self._lines:
                return
            data = ",\n".join(self._lines).encode()
            try:
                self._file.write(data if not self._size else b",\n" + data)
                self._file.flush()
            except OSError as error:  # such as a full disk, which what the run needs will meet, too
                self.is_on = False
                self._notice(f"the timeline ends here, because it cannot be written: {error}")
            self._size += len(data)
            self._lines.clear()
            self._num_pending = 0

    def close(self) -> None:
        """End what is open, and the file."""
        with self._lock:
            self._end_all()
            self.flush()
            if self._file is not None:
                with suppress(OSError):  # `flush` has told
                    self._file.write(b"\n]\n")
                    self._file.close()
            self._file = None
            self.is_on = False

    def _end_all(self) -> None:
        for track, names in self._open.items():
            for _ in range(len(names)):
                self.end(track)
        for group_id in list(self._items):
            self.group(group_id, None)

    def _event(self, kind: str, name: str, track: Track, at_s: float | None = None, **fields: Any) -> None:
        if not self.is_on:
            return
        with self._lock:
            pid, tid = self._ids.get(track) or self._new_track(track)
            at_s = self._clock() if at_s is None else at_s
            head = {"name": name, "ph": kind, "pid": pid, "tid": tid, "ts": self._micros(at_s)}
            self._add(head | fields)
            if self._size + self._num_pending >= self._limit_bytes and self._file is not None:
                self._stop()

    def _add(self, event: Mapping[str, Any]) -> None:
        line = json.dumps(event, separators=(",", ":"))
        self._lines.append(line)
        self._num_pending += len(line) + 2
        if self._num_pending >= _FLUSH_BYTES:
            self.flush()

    def _new_track(self, track: Track) -> tuple[int, int]:
        """Number a track, and name it in the file."""
        is_new = track.process not in self._pids
        pid = self._pids.setdefault(track.process, len(self._pids) + 1)
        self._ids[track] = ids = pid, len(self._ids) + 1
        common = {"ph": "M", "pid": pid, "tid": ids[1], "ts": 0}
        if is_new:
            self._add({**common, "name": "process_name", "args": {"name": track.process}})
            self._add({**common, "name": "process_sort_index", "args": {"sort_index": pid}})
        self._add({**common, "name": "thread_name", "args": {"name": track.thread}})
        return ids

    def _stop(self) -> None:
        self._limit_bytes = 1 << 62  # for what ends
        size = self._size + self._num_pending
        self.slice(PARTS, "the file has reached its limit", self._clock(), self._clock())
        self.close()
        self._notice(f"the timeline has reached {size / 2**20:.0f} MiB and ends here; the run goes on without it")

    def _micros(self, time_s: float) -> int:
        return round((time_s - self._start) * 1e6)


def _args(args: Mapping[str, Any]) -> dict[str, Any]:
    return {"args": dict(args)} if args else {}


@cache
def machine() -> str:
    """Return a name that processes have in common if they have the same clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    except OSError:
        return os.uname().nodename
