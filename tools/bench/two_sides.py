"""Draw what generation and training do at each moment of a synchronous and of an asynchronous run.

    python tools/bench/two_sides.py --out two-sides-cpu.json --picture docs/images/two-sides.svg
    python tools/bench/two_sides.py --draw two-sides-cpu.json --picture docs/images/two-sides.svg

Runs the task of `asynchronous.py` in this process. The learner's phases come from the run's own observer. When the
engine works is read from its processor time, 50 times per second.
"""

import argparse
import itertools
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import long_tail
from asynchronous import FLAGS, mode_flags
from engine_death import engine_process, job_of
from rlhf_train.online import run_online
from rlhf_train.processes import ray_cluster
from rlhf_train.run.observer import Observer
from runner import OWN_CLUSTER, write

PERIOD_S = 0.02
WORKING_SHARE = 0.25  # of a core, from which on the engine counts as working
WINDOW_S = 8.0  # shown of each run
COLORS = {
    "generating": "#4c78a8",
    "training": "#e45756",
    "weights": "#54a24b",
    "other": "#bab0ac",
}
# The learner's phases by what the picture calls them; while it is in "generate" or "reward", it waits.
SHOWN = {
    "load": "training",
    "experience": "training",
    "train": "training",
    "sync": "weights",
    "evaluate": "other",
    "write": "other",
    "save": "other",
    "checkpoint": "other",
}

Span = tuple[float, float, str]  # begin and end in seconds, and what it is


class Watcher(Observer):
    """Notes the learner's phases and the engine's processor time, in seconds since the first step."""

    def __init__(self) -> None:
        self.phases: list[tuple[float, str]] = []  # begin and name
        self.steps: list[float] = []  # end
        self.load: list[tuple[float, float]] = []  # moment, and cores in use since the one before
        self._tasks: Path | None = None
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._has_ended = threading.Event()

    def phase(self, name: str) -> None:
        self.phases.append((time.perf_counter(), name))
        if self._tasks is None:
            self._tasks = Path(f"/proc/{engine_process().pid}/task")
            self._thread.start()

    def step(self, step: int, num_steps: int, metrics: Mapping[str, float]) -> None:
        self.steps.append(time.perf_counter())

    def close(self) -> None:
        self._has_ended.set()
        self._thread.join()

    def _sample(self) -> None:
        used, moment = self._used_s(), time.perf_counter()
        while not self._has_ended.wait(PERIOD_S):
            now_used, now = self._used_s(), time.perf_counter()
            self.load.append((now, (now_used - used) / (now - moment)))
            used, moment = now_used, now

    def _used_s(self) -> float:
        """Return the processor time of all threads of the engine. `/proc/PID/stat` would count in ticks of 10 ms."""
        total = 0
        try:
            for task in self._tasks.iterdir():
                total += int((task / "schedstat").read_text(encoding="ascii").split()[0])
        except OSError:  # a thread, or the engine, has ended
            pass
        return total / 1e9


def learner_spans(phases: Sequence[tuple[float, str]], end: float) -> list[Span]:
    """Return what the learner does, without the time in which it waits. A phase lasts until the next one begins."""
    spans: list[Span] = []
    for (begin, name), (until, _) in itertools.pairwise([*phases, (end, "")]):
        what = SHOWN.get(name)
        if what and spans and spans[-1][1] == begin and spans[-1][2] == what:
            spans[-1] = (spans[-1][0], until, what)
        elif what:
            spans.append((begin, until, what))
    return spans


def engine_spans(load: Sequence[tuple[float, float]]) -> list[Span]:
    """Return when the engine works: where it uses at least `WORKING_SHARE` of a core."""
    spans: list[Span] = []
    for (begin, _), (end, share) in itertools.pairwise(load):
        if share < WORKING_SHARE:
            continue
        if spans and spans[-1][1] == begin:
            spans[-1] = (spans[-1][0], end, "generating")
        else:
            spans.append((begin, end, "generating"))
    return spans


def watch(flags: Sequence[str], folder: Path) -> dict[str, Any]:
    """Run a job in this process; return what both sides did from the end of its second step on."""
    job = job_of(flags, folder)
    watcher = Watcher()
    with ray_cluster(job.plan, None):
        run_online(job, watcher)
    watcher.close()
    zero, end = watcher.steps[1], watcher.steps[-2]

    def shifted(spans: Sequence[Span]) -> list[list[Any]]:
        inside = [(max(begin - zero, 0.0), min(until, end) - zero, what) for begin, until, what in spans]
        return [[round(begin, 3), round(until, 3), what] for begin, until, what in inside if until > begin]

    return {
        "flags": " ".join(flags),
        "seconds": round(end - zero, 3),
        "steps": [round(step - zero, 3) for step in watcher.steps[1:-1]],
        "generation": shifted(engine_spans(watcher.load)),
        "learner": shifted(learner_spans(watcher.phases, watcher.steps[-1])),
    }


def picture(runs: Sequence[dict[str, Any]], window_s: float) -> str:
    """Return an SVG with two lanes per run, generation and learner, over its first `window_s` seconds."""
    left, width, lane, gap = 90, 820, 22, 34
    height = 60 + len(runs) * (2 * lane + gap) + 30
    scale = (width - left - 10) / window_s
    parts = [f'<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg" font-family="sans-serif">']
    parts.append(f'<rect width="{width}" height="{height}" fill="white"/>')
    for index, (name, color) in enumerate(COLORS.items()):
        x = left + 130 * index
        parts.append(f'<rect x="{x}" y="10" width="14" height="14" fill="{color}"/>')
        parts.append(f'<text x="{x + 20}" y="22" font-size="13">{escape(name)}</text>')
    for number, run in enumerate(runs):
        top = 56 + number * (2 * lane + gap)
        parts.append(f'<text x="{left}" y="{top - 6}" font-size="13" font-weight="bold">{escape(run["name"])}</text>')
        for offset, side in ((0, "generation"), (lane, "learner")):
            y = top + offset
            parts.append(f'<rect x="{left}" y="{y}" width="{width - left - 10}" height="{lane - 3}" fill="#f2f2f2"/>')
            parts.append(f'<text x="{left - 8}" y="{y + 14}" font-size="11" text-anchor="end">{side}</text>')
            for begin, end, what in run[side]:
                if begin < window_s:
                    shown = (min(end, window_s) - begin) * scale
                    at = f'x="{left + begin * scale:.1f}" y="{y}" width="{max(shown, 0.5):.1f}" height="{lane - 3}"'
                    parts.append(f'<rect {at} fill="{COLORS[what]}"/>')
        for moment in run["steps"]:
            if moment < window_s:
                x = f"{left + moment * scale:.1f}"
                parts.append(f'<line x1="{x}" y1="{top - 3}" x2="{x}" y2="{top + 2 * lane}" stroke="black"/>')
    for second in range(int(window_s) + 1):
        x = f"{left + second * scale:.1f}"
        parts.append(f'<text x="{x}" y="{height - 10}" font-size="12" text-anchor="middle">{second} s</text>')
    return "\n".join([*parts, "</svg>\n"])


def main(argv: Sequence[str] | None = None) -> None:
    """Watch both runs, or read the report of an earlier call, and draw them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", type=Path, metavar="REPORT", help="run nothing; draw this report")
    parser.add_argument("--staleness", type=int, nargs="+", default=[4])
    parser.add_argument("--at_update", choices=["drain", "keep", "restart"], default="keep")
    parser.add_argument("--steps", type=int, default=11)
    parser.add_argument("--window_s", type=float, default=WINDOW_S)
    parser.add_argument("--task", type=Path, metavar="DIR", help="keep the task here, or use the one that is here")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--picture", type=Path, required=True)
    options = parser.parse_args(argv)
    if options.draw:
        report = json.loads(options.draw.read_text(encoding="utf-8"))
    else:
        os.environ.update(OWN_CLUSTER)
        runs = []
        with tempfile.TemporaryDirectory() as name:
            task = long_tail.make(options.task or Path(name, "task"), stdout=sys.stderr)
            for staleness in (None, *options.staleness):
                mode = mode_flags(staleness, options.at_update)
                flags = [*FLAGS.split(), *mode, "--train_steps", str(options.steps), "--seed", "2"]
                watched = watch([*task, *flags], Path(name, f"run{staleness}"))
                title = "synchronous" if staleness is None else f"staleness {staleness}"
                runs.append({"name": title, **watched, "flags": " ".join(flags)})
        report = {"runs": runs}
        if options.out:
            write(options, "two_sides", report)
    options.picture.write_text(picture(report["runs"], options.window_s), encoding="utf-8")


if __name__ == "__main__":
    main()
