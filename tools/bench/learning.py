"""Measure held-out accuracy on the built-in task before and after `rlhf ppo`, by seed.

    python tools/bench/learning.py --out learning.json

Runs `rlhf ppo` with no flags but the seed, for seeds 1, 2 and 3, and once with both learning rates 0: that run must not
learn. The job itself measures accuracy: the engine answers 200 held-out prompts at temperature 1, with the weights
before the first step and with the final ones. Flags behind `--` go to the command: `-- --bf16 --colocate_all_models`
on a GPU.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from environment import OWN_CLUSTER, command_line, environment

STILL = ["--actor_learning_rate", "0", "--critic_learning_rate", "0"]


def run(flags: list[str], folder: Path) -> dict[str, Any]:
    """Run the job with `folder` as its --save_path; return its accuracies, times and largest log-prob gap."""
    command = [sys.executable, "-m", "rlhf_cli.commands.ppo", *flags, "--save_path", str(folder)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run(command, check=True, env=os.environ | OWN_CLUSTER, **quiet)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    final = next(line for line in reversed(lines) if "time/total" in line)
    steps = [line for line in lines if "time/step" in line]
    return {
        "flags": " ".join(flags),
        "accuracy_before": final["eval/accuracy_before"],
        "accuracy_after": final["eval/accuracy_after"],
        "accuracy_by_step": {line["step"]: line["eval/accuracy"] for line in lines if "eval/accuracy" in line},
        "seconds_total": round(final["time/total"], 1),
        "seconds_startup": round(final["time/startup"], 1),
        "seconds_a_step": round(statistics.median(line["time/step"] for line in steps), 3),
        "logprob_gap_max": max(line.get("mismatch/logprob_gap_max", 0.0) for line in steps),
    }


def main() -> None:
    """Run every seed and the run with learning rate 0, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("flags", nargs="*", help="further flags of the command, after --")
    options = parser.parse_args()
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in options.seeds:
            runs.append(run(["--seed", str(seed), *options.flags], Path(folder, f"seed{seed}")))
            print(json.dumps(runs[-1]), flush=True)
        still = run(["--seed", "1", *STILL, *options.flags], Path(folder, "still"))
        print(json.dumps(still), flush=True)
    report = {
        "benchmark": "learning",
        "command": command_line(options.out),
        "environment": environment(),
        "mean_before": statistics.mean(result["accuracy_before"] for result in runs),
        "mean_after": statistics.mean(result["accuracy_after"] for result in runs),
        "worst_after": min(result["accuracy_after"] for result in runs),
        "runs": runs,
        "learning_rate_zero": still,
    }
    options.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"held-out accuracy {report['mean_before']:.3f} -> {report['mean_after']:.3f}")


if __name__ == "__main__":
    main()
