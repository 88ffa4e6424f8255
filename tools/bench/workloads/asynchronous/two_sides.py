"""What generation and learner of a run do at each moment, synchronously and asynchronously.

    python tools/bench/run.py two_sides --out two-sides-cpu.json
    python tools/bench/pictures.py --two_sides two-sides-cpu.json --out docs/images

Runs the task of `asynchronous` in this process. The learner's phases come from the run's own observer. When the engine
works is read from its processor time, 50 times per second.
"""

import itertools
import os
import threading
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_train.online import run_online
from rlhf_train.processes import ray_cluster
from rlhf_train.run.observer import Observer
from runner import OWN_CLUSTER
from workloads.asynchronous import long_tail
from workloads.asynchronous.asynchronous import RUN_FLAGS, mode_flags
from workloads.faults.engine_death import engine_process, job_of

FLAGS = {
    "staleness": [4],
    "at_update": {"choices": ["drain", "keep", "restart"], "default": "keep"},
    "steps": 11,
    "task": {"type": Path, "metavar": "DIR", "help": "keep the task here, or use the one that is here"},
}
PERIOD_S = 0.02
WORKING_SHARE = 0.25  # of a core, from which on the engine counts as working
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


def joined(spans: Iterator[Span]) -> list[Span]:
    """Return spans of which no two of the same kind touch."""
    found: list[Span] = []
    for begin, end, what in spans:
        if found and found[-1][1:] == (begin, what):
            found[-1] = (found[-1][0], end, what)
        else:
            found.append((begin, end, what))
    return found


def learner_spans(phases: Sequence[tuple[float, str]], end: float) -> list[Span]:
    """Return what the learner does, without the time in which it waits. A phase lasts until the next one begins."""
    pairs = itertools.pairwise([*phases, (end, "")])
    return joined((begin, until, SHOWN[name]) for (begin, name), (until, _) in pairs if name in SHOWN)


def engine_spans(load: Sequence[tuple[float, float]]) -> list[Span]:
    """Return when the engine works: where it uses at least `WORKING_SHARE` of a core."""
    pairs = itertools.pairwise(load)
    return joined((begin, end, "generating") for (begin, _), (end, share) in pairs if share >= WORKING_SHARE)


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
        "seconds": round(end - zero, 3),
        "steps": [round(step - zero, 3) for step in watcher.steps[1:-1]],
        "generation": shifted(engine_spans(watcher.load)),
        "learner": shifted(learner_spans(watcher.phases, watcher.steps[-1])),
    }


def measure(options: Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Watch a synchronous run, and one with each staleness."""
    os.environ.update(OWN_CLUSTER)
    task = long_tail.make(options.task or folder / "task")
    runs = []
    for staleness in (0, *options.staleness):
        mode = mode_flags(staleness, options.at_update)
        flags = [*RUN_FLAGS.split(), *mode, "--train_steps", str(options.steps), "--seed", "2"]
        name = f"staleness {staleness}" if staleness else "synchronous"
        runs.append({"name": name, "flags": " ".join(flags), **watch([*task, *flags], folder / f"run{staleness}")})
        yield {"runs": runs}
