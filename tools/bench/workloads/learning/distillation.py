"""Held-out accuracy on the built-in task before and after distillation from a teacher, by seed.

    python tools/bench/run.py distillation --out distillation.json

First `rlhf ppo --train_steps 14` trains the teacher from the task's reward. Then, for seeds 1, 2 and 3, a fresh policy
learns from it alone: `--teacher_model` and no reward. No scorer runs in these jobs, so accuracy is read from the
held-out responses that they write: the share whose text ends with the label.
"""

import statistics
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from runner import over_seeds, progress, read_lines, run_ppo

FLAGS = {"seeds": [1, 2, 3]}
TEACHER = "--seed 1 --train_steps 14 --eval_steps -1"
STUDENT = (
    "--remote_rm_url None --advantage_estimator reinforce --init_kl_coef 0 --actor_learning_rate 6e-4 --train_steps 12"
    " --eval_steps -1"
)


def accuracies(records: Iterable[Mapping[str, Any]]) -> dict[int, float]:
    """Return by step the share of responses whose text after the last `####` is the label."""
    right: dict[int, list[bool]] = defaultdict(list)
    for record in records:
        right[record["step"]].append(record["text"].rpartition("####")[2].strip() == record["label"])
    return {step: statistics.mean(found) for step, found in right.items()}


def run(flags: Sequence[str], folder: Path) -> dict[str, Any]:
    """Run the job with `folder` as its --save_path; return accuracy, time, and the divergence from the teacher."""
    metrics = run_ppo(flags, folder)
    by_step = accuracies(read_lines(folder / "eval_rollouts.jsonl"))
    found = {
        "flags": " ".join(flags).replace(str(folder.parent), "FOLDER"),
        "accuracy_before": by_step[0],
        "accuracy_after": by_step[len(metrics.steps)],
        "kl_teacher_by_step": [step["kl/teacher"] for step in metrics.steps if "kl/teacher" in step],
        **metrics.costs(),
    }
    progress(found)
    return found


def measure(options: Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Train the teacher, and distil it with every seed."""
    teacher = run(TEACHER.split(), folder / "teacher")
    flags = ["--teacher_model", str(folder / "teacher/model"), *STUDENT.split()]
    runs = [run([*flags, "--seed", str(seed)], folder / f"seed{seed}") for seed in options.seeds]
    yield {"teacher": teacher, **over_seeds(runs)}
