"""How much slower `rlhf ppo` gets beside one other busy process.

    python tools/bench/run.py busy --out busy.json

Runs `rlhf ppo` with no flags but the number of steps four times: alone, twice beside a process that computes without
pause, and alone again. Compares the median seconds per step. Ranks and engines have a pool of OpenMP threads each. If
these threads spin while they wait, one busy neighbour slows a step down by much more than the core that it takes.

The ratio is meaningful only on a machine that does nothing else. The report holds the load before each run. If it is
too high, nothing is measured; with `--even_if_busy` it is, and the report says that the machine was not idle.
"""

import contextlib
import os
import statistics
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from runner import MORE_FLAGS, UsageError, progress, run_ppo

GOAL = 2.5  # largest ratio of a step beside a busy process to a step alone
IDLE_SHARE = 0.15  # the machine counts as idle up to this share of its cores in use
SAMPLE_S = 3.0  # seconds over which the load is measured
FLAGS = {
    "steps": (10, "of a run, at least 2: medians leave out the first"),
    "even_if_busy": (False, "measure even if the machine is in use"),
    "timeout_s": (900.0, "per run"),
    "flags": MORE_FLAGS,
}


def busy_share() -> float:
    """Return the share of all cores that is in use, measured over the next seconds."""
    return psutil.cpu_percent(SAMPLE_S) / 100


@contextlib.contextmanager
def neighbour() -> Iterator[None]:
    """Keep one core busy from another process."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def run(options: Namespace, folder: Path) -> dict[str, float]:
    """Run the job; return the median seconds per phase, without the first step, which warms up."""
    # Without the caller's OpenMP settings, so that the job runs with its own defaults.
    defaults = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "KMP_"))}
    flags = ["--train_steps", str(options.steps), *options.flags]
    steps = run_ppo(flags, folder, environ=defaults, timeout_s=options.timeout_s).steps[1:]
    names = {name for step in steps for name in step if name.startswith("time/")}
    return {name: statistics.median(step.get(name, 0.0) for step in steps) for name in sorted(names)}


def measure(options: Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Measure alone, beside a busy process twice, and alone."""
    if options.steps < 2:
        raise UsageError("--steps must be at least 2: the first step is left out of the medians")
    runs: list[dict[str, Any]] = []
    for number, beside in enumerate([False, True, True, False]):
        share = busy_share()
        if share > IDLE_SHARE and not options.even_if_busy:
            raise UsageError(
                f"the machine is not idle: {share:.0%} of its cores are in use, {IDLE_SHARE:.0%} are allowed\n"
                "hint: end other programs, or add --even_if_busy, and the report says that it was not idle"
            )
        with neighbour() if beside else contextlib.nullcontext():
            median = run(options, folder / str(number))
        runs.append({"neighbour": beside, "busy_share_before": share, "median": median})
        progress(runs[-1])
    yield summary(runs)


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return mean seconds per phase, alone and beside a busy process, and the ratio of the steps."""
    by_phase = {}
    for name in runs[0]["median"]:
        alone, beside = (
            statistics.mean(run["median"].get(name, 0.0) for run in runs if run["neighbour"] is side)
            for side in (False, True)
        )
        by_phase[name.removeprefix("time/")] = {"alone": alone, "beside": beside}
    step = by_phase["step"]
    ratio = step["beside"] / step["alone"]
    is_idle = all(run["busy_share_before"] <= IDLE_SHARE for run in runs)
    missed = [] if ratio <= GOAL else [f"a step takes {ratio:.2f} times as long, the goal is {GOAL}"]
    if not is_idle:
        missed.append("the machine was NOT idle, so that the ratio means little")
    figures = {"seconds_alone": step["alone"], "seconds_beside": step["beside"], "ratio": ratio, "goal": GOAL}
    return {"idle_at_start": is_idle, **figures, "by_phase": by_phase, "runs": runs, "missed": missed}
