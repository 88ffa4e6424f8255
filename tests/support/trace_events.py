"""A checker of the Trace Event Format's published rules, which shares no code with what writes the events.

Rules: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

_METADATA = {
    "process_name": ("name", str),
    "thread_name": ("name", str),
    "process_sort_index": ("sort_index", int),
    "thread_sort_index": ("sort_index", int),
}


class Slice(NamedTuple):
    """A bar of the viewer. Times are microseconds; `end` is None for what has not ended."""

    process: str
    thread: str
    name: str
    begin: int
    end: int | None
    args: dict[str, Any]
    depth: int


class Events(NamedTuple):
    """What a file shows: bars of tracks, bars of asynchronous work by its id, and curves."""

    slices: list[Slice]
    groups: dict[str, list[Slice]]
    counters: dict[tuple[str, str], list[tuple[int, float]]]
    is_complete: bool

    def of(self, process: str, thread: str) -> list[Slice]:
        return [found for found in self.slices if (found.process, found.thread) == (process, thread)]


def load(path: Path) -> tuple[list[dict[str, Any]], bool]:
    """Return the events of a file in the JSON Array Format, and whether it has the last bracket, which is optional."""
    text = path.read_text(encoding="utf-8")
    assert text.startswith("[")
    is_complete = text.rstrip().endswith("]")
    events = json.loads(text if is_complete else text + "]")
    assert isinstance(events, list)
    return events, is_complete


def check(path: Path) -> Events:
    """Return what a file shows; fail for a file that breaks a rule."""
    events, is_complete = load(path)
    names: dict[Any, str] = {}
    for event in events:
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert isinstance(event["name"], str) and event["name"]
        assert isinstance(event["ts"], int | float) and event["ts"] >= 0
        assert isinstance(event.get("args", {}), dict)
        assert event["ph"] in ("B", "E", "X", "b", "e", "C", "M"), event
        if event["ph"] == "M":
            key, kind = _METADATA[event["name"]]
            assert isinstance(event["args"][key], kind)
            track = event["pid"] if event["name"].startswith("process") else (event["pid"], event["tid"])
            if key == "name":
                names[track] = event["args"]["name"]
    timed = [event for event in events if event["ph"] != "M"]
    for event in timed:
        assert event["pid"] in names and (event["pid"], event["tid"]) in names, "a track has no name"
    slices = _thread_slices([event for event in timed if event["ph"] in "BEX"], names)
    groups = _async_slices([event for event in timed if event["ph"] in "be"], names)
    counters: dict[tuple[str, str], list[tuple[int, float]]] = defaultdict(list)
    for event in timed:
        if event["ph"] == "C":
            assert event["args"] and all(isinstance(value, int | float) for value in event["args"].values())
            counters[names[event["pid"]], event["name"]].append((event["ts"], event["args"]["value"]))
    if is_complete:
        assert all(each.end is not None for each in [*slices, *[s for found in groups.values() for s in found]])
    return Events(slices, groups, dict(counters), is_complete)


def _thread_slices(events, names):
    """Return the bars of threads: begins and ends are balanced, and bars lie within or beside each other."""
    threads = defaultdict(list)
    for event in events:
        threads[event["pid"], event["tid"]].append(event)
    slices = []
    for key, found in threads.items():
        bars = []
        stack = []
        last = 0
        for event in found:
            if event["ph"] == "X":
                assert event["dur"] >= 0
                bars.append([event["ts"], event["ts"] + event["dur"], event])
                continue
            assert event["ts"] >= last, "begins and ends of a thread are not in their order"
            last = event["ts"]
            if event["ph"] == "B":
                bars.append([event["ts"], None, event])
                stack.append(bars[-1])
            else:
                assert stack, f"{event} ends nothing"
                bar = stack.pop()
                assert bar[2]["name"] == event["name"]
                bar[1] = event["ts"]
        far = max([bar[1] or bar[0] for bar in bars]) + 1
        bars.sort(key=lambda bar: (bar[0], -(far if bar[1] is None else bar[1])))
        enclosing = []
        for begin, end, event in bars:
            while enclosing and enclosing[-1] <= begin:
                enclosing.pop()
            until = far if end is None else end
            assert not enclosing or until <= enclosing[-1], f"{event} overlaps what is before it"
            process, thread = names[key[0]], names[key]
            slices.append(Slice(process, thread, event["name"], begin, end, event.get("args", {}), len(enclosing)))
            enclosing.append(until)
    return slices


def _async_slices(events, names):
    """Return the bars of asynchronous work by id: begins and ends of the same name are nested."""
    groups = defaultdict(list)
    stacks = defaultdict(list)
    last = defaultdict(int)
    for event in events:
        key = event["cat"], event["id"]
        assert event["ts"] >= last[key]
        last[key] = event["ts"]
        stack = stacks[key]
        if event["ph"] == "b":
            place = len(groups[event["id"]])
            args = event.get("args", {})
            made = Slice(names[event["pid"]], "", event["name"], event["ts"], None, args, len(stack))
            groups[event["id"]].append(made)
            stack.append(place)
        else:
            assert stack, f"{event} ends nothing"
            place = stack.pop()
            begun = groups[event["id"]][place]
            assert begun.name == event["name"]
            groups[event["id"]][place] = begun._replace(end=event["ts"], args=begun.args | event.get("args", {}))
    return dict(groups)
