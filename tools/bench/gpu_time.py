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
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

_POLL_S = 0.01
_ROLES = {"vllm": "engines", "deepspeed": "trainers"}  # by a module that the process has imported


def prepare(folder: Path) -> dict[str, str]:
    """Write the module that records into `folder`; return the environment variables with which processes import it."""
    folder.mkdir(parents=True)
    line = f"import gpu_time, pathlib\ngpu_time.record_in_background(pathlib.Path({str(folder)!r}))\n"
    (folder / "sitecustomize.py").write_text(line, encoding="utf-8")
    paths = [str(folder), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


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
    names = sorted({name for *_, name in events})
    number = {name: index for index, name in enumerate(names)}
    rows = np.array([(start, lasts, number[name]) for start, lasts, name in events], np.int64).reshape(-1, 3)
    unfinished = folder / f"{os.getpid()}.unfinished"
    with unfinished.open("wb") as file:
        np.savez(file, rows=rows, names=json.dumps(names), role=role)
    unfinished.rename(folder / f"{os.getpid()}.npz")


def record_step(folder: Path, num_steps: Callable[[], int], step: int, is_over: Callable[[], bool]) -> tuple[int, int]:
    """Have processes record the GPU's work, from the end of step `step` - 2; return begin and end of step `step`.

    The step between is not used: the start of CUPTI takes time of it.

    Args:
        folder: of `prepare`.
        num_steps: returns how many steps of the run have ended.
        step: number of the step, at least 3.
        is_over: returns whether the run has ended, or takes too long.

    Raises:
        RuntimeError: the run was over first.
    """
    seen = {}
    for number in (step - 2, step - 1, step):
        while num_steps() < number:
            if is_over():
                raise RuntimeError(f"the run ended, or took too long, before step {number} did")
            time.sleep(_POLL_S)
        seen[number] = time.time_ns()
        if number == step - 2:
            (folder / "begin").touch()
    (folder / "end").touch()
    return seen[step - 1], seen[step]


def account(folder: Path, begin: int, end: int, top: int = 20) -> dict[str, Any]:
    """Return the seconds between two moments in which the GPU worked.

    Returns:
        `seconds` between them; `busy`, by role and for "all", the seconds in which at least one kernel or copy ran; and
        `kernels`, by role, the `top` names with [number, sum of seconds].
    """
    rows: dict[str, list[np.ndarray]] = defaultdict(list)
    kernels: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(lambda: [0, 0.0]))
    for path in sorted(folder.glob("*.npz")):
        with np.load(path) as saved:
            role, names, found = str(saved["role"]), json.loads(str(saved["names"])), saved["rows"]
        found = found[(found[:, 0] < end) & (found[:, 0] + found[:, 1] > begin)]
        rows[role].append(found)
        for _, lasts, number in found.tolist():
            kernels[role][names[number]][0] += 1
            kernels[role][names[number]][1] += lasts / 1e9
    busy = {role: _union(np.concatenate(parts), begin, end) for role, parts in rows.items()}
    every = [part for parts in rows.values() for part in parts]
    busy["all"] = _union(np.concatenate(every), begin, end) if every else 0.0
    longest = {
        role: dict(sorted(own.items(), key=lambda item: -item[1][1])[:top]) for role, own in sorted(kernels.items())
    }
    return {"seconds": (end - begin) / 1e9, "busy": busy, "kernels": longest}


def _union(rows: np.ndarray, begin: int, end: int) -> float:
    """Return the seconds between `begin` and `end` that at least one of the intervals covers."""
    rows = rows[rows[:, 0].argsort()]
    starts = np.maximum(rows[:, 0], begin)
    ends = np.minimum(rows[:, 0] + rows[:, 1], end)
    covered = np.concatenate([[begin], np.maximum.accumulate(ends)[:-1]]) if len(ends) else ends
    return float(np.maximum(ends - np.maximum(starts, covered), 0).sum()) / 1e9
