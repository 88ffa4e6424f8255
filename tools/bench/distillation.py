"""Measure held-out accuracy on the built-in task before and after distillation from a teacher, by seed.

    python tools/bench/distillation.py --out distillation.json

First `rlhf ppo --train_steps 14` trains the teacher from the task's reward. Then, for seeds 1, 2 and 3, a fresh policy
learns from it alone: `--teacher_model` and no reward. No scorer runs in these jobs, so accuracy is read from the
held-out responses that they write: the share whose text ends with the label.
"""

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from runner import arguments, over_seeds, read_lines, run_ppo, write

TEACHER = ["--seed", "1", "--train_steps", "14", "--eval_steps", "-1"]
STUDENT = [
    *("--remote_rm_url", "None", "--advantage_estimator", "reinforce", "--init_kl_coef", "0"),
    *("--actor_learning_rate", "6e-4", "--train_steps", "12", "--eval_steps", "-1"),
]


def accuracies(records: list[dict[str, Any]]) -> dict[int, float]:
    """Return by step the share of responses whose text after the last `####` is the label."""
    right: dict[int, list[bool]] = {}
    for record in records:
        right.setdefault(record["step"], []).append(record["text"].rpartition("####")[2].strip() == record["label"])
    return {step: statistics.mean(found) for step, found in sorted(right.items())}


def run(flags: list[str], folder: Path) -> dict[str, Any]:
    """Run the job with `folder` as its --save_path; return accuracy, time, and the divergence from the teacher."""
    metrics = run_ppo(flags, folder)
    found = accuracies(read_lines(folder / "eval_rollouts.jsonl"))
    return {
        "flags": " ".join(flags).replace(str(folder.parent), "FOLDER"),
        "accuracy_before": found[0],
        "accuracy_after": found[len(metrics.steps)],
        "kl_teacher_by_step": [line["kl/teacher"] for line in metrics.steps if "kl/teacher" in line],
        "seconds_total": round(metrics.final["time/total"], 1),
        "seconds_a_step": round(metrics.median("time/step"), 3),
        "logprob_gap_max": max(line["mismatch/logprob_gap_max"] for line in metrics.steps),
    }


def main() -> None:
    """Train the teacher, distil it with every seed, and write the report."""
    options = arguments(__doc__, seeds=[1, 2, 3]).parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        teacher = run(TEACHER, folder / "teacher")
        print(json.dumps(teacher), flush=True)
        runs = []
        for seed in options.seeds:
            flags = ["--teacher_model", str(folder / "teacher/model"), "--seed", str(seed), *STUDENT]
            runs.append(run(flags, folder / f"seed{seed}"))
            print(json.dumps(runs[-1]), flush=True)
    report = {"teacher": teacher, **over_seeds(runs)}
    write(options, "distillation", report)
    print(f"held-out accuracy {report['mean_before']:.3f} -> {report['mean_after']:.3f}")


if __name__ == "__main__":
    main()
