"""Measure held-out accuracy on the built-in task before and after distillation from a teacher, by seed.

    python tools/bench/distillation.py --out distillation.json

First `rlhf ppo --train_steps 14` trains the teacher from the task's reward. Then, for seeds 1, 2 and 3, a fresh policy
learns from it alone: `--teacher_model` and no reward. No scorer runs in these jobs, so accuracy is read from the
held-out responses that they write: the share whose text ends with the label.
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

TEACHER = ["--seed", "1", "--train_steps", "14", "--eval_steps", "-1"]
STUDENT = [
    *("--remote_rm_url", "None", "--advantage_estimator", "reinforce", "--init_kl_coef", "0"),
    *("--actor_learning_rate", "6e-4", "--train_steps", "12", "--eval_steps", "-1"),
]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the values of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def accuracies(records: list[dict[str, Any]]) -> dict[int, float]:
    """Return by step the share of responses whose text after the last `####` is the label."""
    right: dict[int, list[bool]] = {}
    for record in records:
        right.setdefault(record["step"], []).append(record["text"].rpartition("####")[2].strip() == record["label"])
    return {step: statistics.mean(found) for step, found in sorted(right.items())}


def run(flags: list[str], folder: Path) -> dict[str, Any]:
    """Run the job with `folder` as its --save_path; return accuracy, time, and the divergence from the teacher."""
    command = [sys.executable, "-m", "rlhf_cli.commands.ppo", *flags, "--save_path", str(folder)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run(command, check=True, env=os.environ | OWN_CLUSTER, **quiet)
    lines = read_lines(folder / "metrics.jsonl")
    steps = [line for line in lines if "time/step" in line]
    found = accuracies(read_lines(folder / "eval_rollouts.jsonl"))
    return {
        "flags": " ".join(flags).replace(str(folder.parent), "FOLDER"),
        "accuracy_before": found[0],
        "accuracy_after": found[len(steps)],
        "kl_teacher_by_step": [line["kl/teacher"] for line in steps if "kl/teacher" in line],
        "seconds_total": round(next(line["time/total"] for line in lines if "time/total" in line), 1),
        "seconds_a_step": round(statistics.median(line["time/step"] for line in steps), 3),
        "logprob_gap_max": max(line["mismatch/logprob_gap_max"] for line in steps),
    }


def main() -> None:
    """Train the teacher, distil it with every seed, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        teacher = run(TEACHER, folder / "teacher")
        print(json.dumps(teacher), flush=True)
        runs = []
        for seed in options.seeds:
            flags = ["--teacher_model", str(folder / "teacher/model"), "--seed", str(seed), *STUDENT]
            runs.append(run(flags, folder / f"seed{seed}"))
            print(json.dumps(runs[-1]), flush=True)
    report = {
        "benchmark": "distillation",
        "command": command_line(options.out),
        "environment": environment(),
        "teacher": teacher,
        "mean_before": statistics.mean(result["accuracy_before"] for result in runs),
        "mean_after": statistics.mean(result["accuracy_after"] for result in runs),
        "worst_after": min(result["accuracy_after"] for result in runs),
        "runs": runs,
    }
    options.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"held-out accuracy {report['mean_before']:.3f} -> {report['mean_after']:.3f}")


if __name__ == "__main__":
    main()
