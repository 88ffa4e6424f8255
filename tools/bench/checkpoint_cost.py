"""Measure what `--save_steps 1` adds to the wall clock of the built-in run of `rlhf ppo`.

    python tools/bench/checkpoint_cost.py --out checkpoint-cost.json

Runs with and without the flag take turns, in another order in each pair, so that a machine that becomes slower or
faster meanwhile favors neither. The cost is the median over the pairs of the relative difference in `time/total`, which
is the wall clock of a run. The report also has the sum of the phase `checkpoint`, in which a run waits: the rest of the
cost is the thread that writes, which shares the processors with the run.
"""

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from runner import arguments, run_ppo, write

GOAL = 0.03  # largest share of the wall clock


def run(folder: Path, steps: int | None, *, saves: bool) -> dict[str, float]:
    """Run `rlhf ppo` and return seconds: of the whole run, of its steps, and of the phase `checkpoint`."""
    flags = ["--save_steps", "1"] if saves else []
    flags += [] if steps is None else ["--train_steps", str(steps)]
    metrics = run_ppo(flags, folder, is_quiet=False)
    saved = [step.get("time/checkpoint", 0.0) for step in metrics.steps]
    return {
        "total_s": metrics.final["time/total"],
        "steps_s": metrics.final["time/steps"],
        "checkpoint_s": sum(saved),
        "num_checkpoints": float(sum(seconds > 0 for seconds in saved)),
    }


def measure_pair(number: int, steps: int | None) -> dict[str, Any]:
    """Run once with and once without checkpoints; even pairs begin without."""
    found = {}
    for saves in (False, True) if number % 2 == 0 else (True, False):
        with tempfile.TemporaryDirectory() as scratch:
            found["with" if saves else "without"] = run(Path(scratch) / "run", steps, saves=saves)
    found["cost"] = found["with"]["total_s"] / found["without"]["total_s"] - 1
    print(f"pair {number + 1}: {found['without']['total_s']:.2f} s without, {found['with']['total_s']:.2f} s with")
    return found


def main() -> int:
    """Measure, and write the report. The exit status is 1 when the cost is above the goal."""
    options = arguments(__doc__, pairs=5, steps=(int, "of each run; default: those of the built-in run")).parse_args()
    pairs = [measure_pair(number, options.steps) for number in range(options.pairs)]
    cost = statistics.median(pair["cost"] for pair in pairs)
    waiting = statistics.median(pair["with"]["checkpoint_s"] / pair["with"]["total_s"] for pair in pairs)
    report = {
        "goal": GOAL,
        "cost": cost,
        "phase_share": waiting,
        "pairs": pairs,
    }
    write(options, "checkpoint_cost", report)
    print(f"checkpoints cost {cost:.1%} of the wall clock (goal {GOAL:.0%}); runs wait for {waiting:.1%} of it")
    return int(cost > GOAL)


if __name__ == "__main__":
    sys.exit(main())
