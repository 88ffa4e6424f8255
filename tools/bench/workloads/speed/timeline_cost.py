"""What `--timeline` adds to a step of the built-in run of `rlhf ppo`.

    python tools/bench/run.py timeline_cost --out timeline-cost.json

Runs with and without the flag take turns, in another order in each pair, so that a machine that becomes slower or
faster meanwhile favors neither. A run's value is the median of `time/step` without the first step. The cost is the
median over the pairs of the relative difference; `spread` is that of runs without the flag.
"""

import statistics
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from runner import UsageError, progress, run_ppo

FLAGS = {"pairs": 4, "steps": (12, "of each run, at least 2")}


def measure(options: Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Measure pairs of runs with and without a timeline; even pairs begin without."""
    if options.steps < 2:
        raise UsageError("--steps must be at least 2: the first step is left out of the medians")
    pairs = []
    for number in range(options.pairs):
        pair: dict[str, Any] = {}
        for name in ("without", "with") if number % 2 == 0 else ("with", "without"):
            run = folder / f"{name}{number}"
            flags = ["--train_steps", str(options.steps), *(["--timeline"] if name == "with" else [])]
            steps = run_ppo(flags, run).steps[1:]
            pair[f"{name}_s"] = statistics.median(step["time/step"] for step in steps)
        pair["cost"] = pair["with_s"] / pair["without_s"] - 1
        pair["bytes_per_step"] = (folder / f"with{number}" / "timeline.json").stat().st_size / options.steps
        progress(pair)
        pairs.append(pair)
    without = [pair["without_s"] for pair in pairs]
    yield {
        "cost": statistics.median(pair["cost"] for pair in pairs),
        "spread": max(without) / min(without) - 1,
        "bytes_per_step": statistics.median(pair["bytes_per_step"] for pair in pairs),
        "pairs": pairs,
    }
