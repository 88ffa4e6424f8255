"""Measure held-out accuracy on the built-in task before and after `rlhf ppo`, by seed.

    python tools/bench/learning.py --out learning.json

Runs `rlhf ppo` with no flags but the seed, for seeds 1, 2 and 3, and once with both learning rates 0: that run must not
learn. The job itself measures accuracy: the engine answers 200 held-out prompts at temperature 1, with the weights
before the first step and with the final ones. Flags behind `--` go to the command: `-- --bf16 --colocate_all_models`
on a GPU.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from runner import arguments, over_seeds, run_ppo, write

STILL = ["--actor_learning_rate", "0", "--critic_learning_rate", "0"]


def run(flags: list[str], folder: Path) -> dict[str, Any]:
    """Run the job with `folder` as its --save_path; return its accuracies, times and largest log-prob gap."""
    metrics = run_ppo(flags, folder)
    return {
        "flags": " ".join(flags),
        "accuracy_before": metrics.final["eval/accuracy_before"],
        "accuracy_after": metrics.final["eval/accuracy_after"],
        "accuracy_by_step": {line["step"]: line["eval/accuracy"] for line in metrics.lines if "eval/accuracy" in line},
        "seconds_total": round(metrics.final["time/total"], 1),
        "seconds_startup": round(metrics.final["time/startup"], 1),
        "seconds_a_step": round(metrics.median("time/step"), 3),
        "logprob_gap_max": max(line.get("mismatch/logprob_gap_max", 0.0) for line in metrics.steps),
    }


def main() -> None:
    """Run every seed and the run with learning rate 0, and write the report."""
    options = arguments(__doc__, more_flags=True, seeds=[1, 2, 3]).parse_args()
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in options.seeds:
            runs.append(run(["--seed", str(seed), *options.flags], Path(folder, f"seed{seed}")))
            print(json.dumps(runs[-1]), flush=True)
        still = run(["--seed", "1", *STILL, *options.flags], Path(folder, "still"))
        print(json.dumps(still), flush=True)
    report = over_seeds(runs) | {"learning_rate_zero": still}
    write(options, "learning", report)
    print(f"held-out accuracy {report['mean_before']:.3f} -> {report['mean_after']:.3f}")


if __name__ == "__main__":
    main()
