"""What `--save_steps 1` adds to the wall clock of the built-in run of `rlhf ppo`.

    python tools/bench/run.py checkpoint_cost --out checkpoint-cost.json

Runs with and without the flag take turns, in another order in each pair, so that a machine that becomes slower or
faster meanwhile favors neither. The cost is the median over the pairs of the relative difference in `time/total`, which
is the wall clock of a run. The report also has the sum of the phase `checkpoint`, in which a run waits: the rest of the
cost is the thread that writes, which shares the processors with the run.
"""

import statistics
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from runner import progress, run_ppo

FLAGS = {"pairs": 5, "steps": (int, "of each run; default: those of the built-in run")}
GOAL = 0.03  # largest share of the wall clock


def run(folder: Path, steps: int | None, *, saves: bool) -> dict[str, float]:
    """Run `rlhf ppo` and return seconds: of the whole run, of its steps, and of the phase `checkpoint`."""
    flags = ["--save_steps", "1"] if saves else []
    flags += [] if steps is None else ["--train_steps", str(steps)]
    metrics = run_ppo(flags, folder)
    saved = [step.get("time/checkpoint", 0.0) for step in metrics.steps]
    return {
        "total_s": metrics.final["time/total"],
        "steps_s": metrics.final["time/steps"],
        "checkpoint_s": sum(saved),
        "num_checkpoints": sum(seconds > 0 for seconds in saved),
    }


def measure(options: Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Measure pairs of runs with and without checkpoints; even pairs begin without."""
    pairs = []
    for number in range(options.pairs):
        pair: dict[str, Any] = {}
        for saves in (False, True) if number % 2 == 0 else (True, False):
            name = "with" if saves else "without"
            pair[name] = run(folder / f"{name}{number}", options.steps, saves=saves)
        pair["cost"] = pair["with"]["total_s"] / pair["without"]["total_s"] - 1
        progress(pair)
        pairs.append(pair)
    cost = statistics.median(pair["cost"] for pair in pairs)
    waiting = statistics.median(pair["with"]["checkpoint_s"] / pair["with"]["total_s"] for pair in pairs)
    missed = [f"checkpoints cost {cost:.1%} of the wall clock, the goal is {GOAL:.0%}"] if cost > GOAL else []
    yield {"goal": GOAL, "cost": cost, "phase_share": waiting, "pairs": pairs, "missed": missed}
