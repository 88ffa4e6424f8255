"""A run's timeline as data for its picture: the longest bars of each track of the newest timeline.json."""

import heapq
import json
from collections import defaultdict
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_cli.report.runs import finite

MAX_BARS = 8000  # in a page, about 60 bytes each

_Track = tuple[int, int]  # process and thread


class _Bar(NamedTuple):
    micros: float
    order: int
    track: _Track
    name: str
    begin: float
    args: dict[str, Any]


def timeline_data(folder: Path, max_bars: int = MAX_BARS) -> dict[str, Any] | None:
    """Return the picture of the newest timeline in the folder of a run; None without one. Damaged lines are left out.

    The result has the `file`, the names of `tracks`, distinct `names` and `texts` of bars, how many bars are
    `left_out`, and `bars`: track, begin and duration in microseconds, name, text, and how many bars one lies in.
    """
    files = list(folder.glob("timeline*.json"))
    if not files:
        return None
    newest = max(files, key=lambda path: path.stat().st_mtime)
    names: dict[Any, str] = {}
    kept: list[_Bar] = []
    num_bars = 0
    for num_bars, bar in enumerate(_bars(newest, names), 1):  # noqa: B007 - counts
        (heapq.heappush if len(kept) < max_bars else heapq.heappushpop)(kept, bar)
    tracks = sorted({bar.track for bar in kept})
    words: dict[str, int] = {}
    rows = []
    for number, track in enumerate(tracks):
        ends: list[float] = []  # of the bars that a bar lies in
        for bar in sorted((bar for bar in kept if bar.track == track), key=lambda bar: (bar.begin, -bar.micros)):
            while ends and ends[-1] <= bar.begin:
                ends.pop()
            text = ", ".join(f"{key}: {value}" for key, value in bar.args.items())
            at = [words.setdefault(word, len(words)) for word in (bar.name, text)]
            rows.append([number, bar.begin, bar.micros, *at, len(ends)])
            ends.append(bar.begin + bar.micros)
    titles = [[names.get(pid, str(pid)), names.get((pid, tid), str(tid))] for pid, tid in tracks]
    return {"file": newest.name, "tracks": titles, "words": list(words), "bars": rows, "left_out": num_bars - len(kept)}


def _bars(path: Path, names: dict[Any, str]) -> Iterator[_Bar]:
    """Yield the bars of tracks, and note the names of processes and threads. What has not ended lasts to the end."""
    order = count()
    begun: dict[_Track, list[tuple[float, str, dict[str, Any]]]] = defaultdict(list)
    last = 0.0
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                event = json.loads(line.strip().rstrip(","))
                kind, name, at = event["ph"], str(event["name"]), finite(event["ts"])
                args = dict(event.get("args", {}))
                track = int(event["pid"]), int(event["tid"])
                if kind == "M" and "name" in args:
                    names[track[0] if name == "process_name" else track] = str(args["name"])
                elif kind == "X":
                    yield _Bar(finite(event["dur"]), next(order), track, name, at, args)
                elif kind == "B":
                    begun[track].append((at, name, args))
                elif kind == "E":
                    began, name, args = begun[track].pop()
                    yield _Bar(at - began, next(order), track, name, began, args)
            except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError):
                continue  # a bracket, or a line that was being written when the run was killed
            last = max(last, at)
    for track, open_ones in begun.items():
        for began, name, args in open_ones:
            yield _Bar(max(last - began, 0.0), next(order), track, name, began, {**args, "ended": "no"})
