"""Measure how much slower `rlhf ppo` gets beside one other busy process.

    python tools/bench/busy.py --out busy.json

Runs `rlhf ppo` with no flags but the number of steps four times: alone, twice beside a process that computes without
pause, and alone again. Compares the median seconds per step. Ranks and engines have a pool of OpenMP threads each. If
these threads spin while they wait, one busy neighbour slows a step down by much more than the core that it takes.

The ratio is meaningful only on a machine that does nothing else. The report holds the load before each run. If it is
too high, the script says so and exits with 1; with `--even_if_busy` it goes on and sets `idle_at_start` to false.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from runner import arguments, run_ppo, write

GOAL = 2.5  # largest ratio of a step beside a busy process to a step alone
IDLE_SHARE = 0.15  # the machine counts as idle up to this share of its cores in use
SAMPLE_S = 3.0  # seconds over which the load is measured


def busy_share(seconds: float = SAMPLE_S) -> float:
    """Return the share of all cores that is in use, measured over the next `seconds`."""
    before = _cpu_times()
    time.sleep(seconds)
    total, idle = (after - earlier for after, earlier in zip(_cpu_times(), before, strict=True))
    return 1 - idle / total


def _cpu_times() -> tuple[float, float]:
    """Return clock ticks since boot, summed over cores: all ticks, and those spent idle or waiting for a disk."""
    fields = [float(field) for field in Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0].split()[1:9]]
    return sum(fields), fields[3] + fields[4]


@contextlib.contextmanager
def neighbour() -> Iterator[None]:
    """Keep one core busy from another process."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def run(num_steps: int, flags: list[str], folder: Path, timeout_s: float) -> list[dict[str, Any]]:
    """Run the job; return the metrics of its steps."""
    # Without the caller's OpenMP settings, so that the job runs with its own defaults.
    defaults = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "KMP_"))}
    return run_ppo(["--train_steps", str(num_steps), *flags], folder, environ=defaults, timeout_s=timeout_s).steps


def medians(steps: list[dict[str, Any]]) -> dict[str, float]:
    """Return the median seconds per phase, without the first step, which warms up."""
    names = sorted({name for step in steps for name in step if name.startswith("time/")})
    return {name: statistics.median(step[name] for step in steps[1:] if name in step) for name in names}


def main() -> int:
    """Measure, write the report, and return the exit status: 1 when the machine was busy or the goal is missed."""
    parser = arguments(
        __doc__,
        more_flags=True,
        steps=10,
        even_if_busy=(False, "measure even if the machine is in use"),
        timeout_s=(900.0, "per run"),
    )
    options = parser.parse_args()
    if options.steps < 2:
        parser.error("--steps must be at least 2: the first step is left out of the medians")
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for number, beside in enumerate([False, True, True, False]):
            share = busy_share()
            if share > IDLE_SHARE and not options.even_if_busy:
                print(f"the machine is not idle: {share:.0%} of its cores are in use, {IDLE_SHARE:.0%} are allowed")
                print("hint: end other programs, or add --even_if_busy, and the report says that it was not idle")
                return 1
            with neighbour() if beside else contextlib.nullcontext():
                steps = run(options.steps, options.flags, Path(folder, str(number)), options.timeout_s)
            runs.append({"neighbour": beside, "busy_share_before": round(share, 3), "median": medians(steps)})
            print(json.dumps(runs[-1]), flush=True)
    report = summary(runs)
    write(options, "busy", report)
    note = "" if report["idle_at_start"] else "; the machine was NOT idle, so that the ratio means little"
    print(
        f"step {report['seconds_alone']:.3f} s alone, {report['seconds_beside']:.3f} s beside a busy process: ", end=""
    )
    print(f"{report['ratio']:.2f} times (goal: at most {GOAL}){note}")
    return 0 if report["idle_at_start"] and report["ratio"] <= GOAL else 1


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return mean seconds per step and phase, alone and beside a busy process, and the ratio of the steps."""

    def seconds(name: str, beside: bool) -> float:
        return statistics.mean(each["median"].get(name, 0.0) for each in runs if each["neighbour"] == beside)

    phases = {name.removeprefix("time/"): name for each in runs for name in each["median"]}
    by_phase = {
        phase: {"alone": seconds(name, False), "beside": seconds(name, True)} for phase, name in sorted(phases.items())
    }
    return {
        "idle_at_start": all(each["busy_share_before"] <= IDLE_SHARE for each in runs),
        "seconds_alone": by_phase["step"]["alone"],
        "seconds_beside": by_phase["step"]["beside"],
        "ratio": by_phase["step"]["beside"] / by_phase["step"]["alone"],
        "goal": GOAL,
        "by_phase": by_phase,
        "runs": runs,
    }


if __name__ == "__main__":
    sys.exit(main())
