"""When the GPU works for which process of a run, and on which kernels.

Processes of the run import `record_in_background` by a `sitecustomize` module. Each records its own kernels and copies
(CUPTI, by torch's profiler) between two moments that the benchmark chooses, and writes them down. Kernels of two
processes run at the same time under MPS, hence the union of all intervals.
"""

import json
import os
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

_POLL_S = 0.01
_ROLES = {"vllm": "engines", "deepspeed": "trainers"}  # by a module that the process has imported


class Recorder:
    """Has the processes of a run record the GPU's work, from the end of step `step` - 2 to that of `step`, at least 3.

    The step between is not used: the start of CUPTI takes time of it.
    """

    def __init__(self, folder: Path, step: int) -> None:
        """Write the module that records into `folder`."""
        folder.mkdir(parents=True)
        line = f"import gpu_time, pathlib\ngpu_time.record_in_background(pathlib.Path({str(folder)!r}))\n"
        (folder / "sitecustomize.py").write_text(line, encoding="utf-8")
        paths = [str(folder), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        self.environ = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}  # with which processes import it
        self._folder = folder
        self._step = step
        self._ended_at: dict[int, int] = {}  # nanoseconds since 1970, by step

    def look(self, num_steps: int) -> None:
        """Note that so many steps of the run have ended."""
        for number, name in ((self._step - 2, "begin"), (self._step - 1, None), (self._step, "end")):
            if num_steps >= number and number not in self._ended_at:
                self._ended_at[number] = time.time_ns()
                if name:
                    (self._folder / name).touch()

    def account(self) -> dict[str, Any]:
        """Return what the GPU did in the step. Raises RuntimeError where the run ended before it."""
        if self._step not in self._ended_at:
            raise RuntimeError(f"the run ended, or took too long, before step {self._step} did")
        return account(self._folder, self._ended_at[self._step - 1], self._ended_at[self._step])


def record_in_background(folder: Path) -> None:
    """Record this process's kernels from when a file `begin` appears in `folder` until `end` does."""
    threading.Thread(target=_record, args=(folder,), daemon=True, name="gpu-time").start()


def _record(folder: Path) -> None:
    while not (folder / "begin").exists():
        time.sleep(10 * _POLL_S)
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    profiler.start()
    while not (folder / "end").exists():
        time.sleep(_POLL_S)
    profiler.stop()
    events = [event for event in profiler.profiler.kineto_results.events() if event.device_type().name == "CUDA"]
    role = next((role for module, role in _ROLES.items() if module in sys.modules), "others")
    write_events(folder, role, [(event.start_ns(), event.duration_ns(), event.name()) for event in events])


def write_events(folder: Path, role: str, events: Sequence[tuple[int, int, str]]) -> None:
    """Write what this process ran on the GPU: (nanoseconds since 1970 at its start, nanoseconds, name)."""
    unfinished = folder / f"{os.getpid()}.unfinished"
    unfinished.write_text(json.dumps([role, events]), encoding="utf-8")
    unfinished.rename(folder / f"{os.getpid()}.json")


def account(folder: Path, begin: int, end: int, top: int = 20) -> dict[str, Any]:
    """Return the seconds between two moments in which the GPU worked.

    Returns:
        `seconds` between them; `busy`, by role and for "all", the seconds in which at least one kernel or copy ran; and
        `kernels`, by role, the `top` names with [number, sum of seconds].
    """
    rows: dict[str, list[tuple[int, int]]] = defaultdict(list)
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    seconds: dict[str, Counter[str]] = defaultdict(Counter)
    for path in sorted(folder.glob("*.json")):
        role, events = json.loads(path.read_text(encoding="utf-8"))
        for start, lasts, name in events:
            if start < end and start + lasts > begin:
                rows[role].append((start, start + lasts))
                counts[role][name] += 1
                seconds[role][name] += lasts / 1e9
    busy = {role: _union(intervals, begin, end) for role, intervals in rows.items()}
    busy["all"] = _union([interval for intervals in rows.values() for interval in intervals], begin, end)
    kernels = {
        role: {name: [counts[role][name], spent] for name, spent in own.most_common(top)}
        for role, own in sorted(seconds.items())
    }
    return {"seconds": (end - begin) / 1e9, "busy": busy, "kernels": kernels}


def _union(intervals: Sequence[tuple[int, int]], begin: int, end: int) -> float:
    """Return the seconds between `begin` and `end` that at least one of the intervals covers."""
    rows = np.array(sorted(intervals), np.int64).reshape(-1, 2).clip(begin, end)
    before = np.maximum.accumulate(np.concatenate([[begin], rows[:-1, 1]])) if len(rows) else rows[:, 1]
    return float(np.maximum(rows[:, 1] - np.maximum(rows[:, 0], before), 0).sum()) / 1e9
