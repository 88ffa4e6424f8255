"""Held-out accuracy on two tasks that can both be learned, with equal shares of prompts and with `--adaptive_mix`.

    python tools/bench/run.py mixing --out mixing.json

The tasks are sums with their carry, as in the built-in task, and sums that are to be added without it, as the question
says. `rlhf sft` shows the built-in model both. The share `RIGHT` of these answers is right, which is more for the
second task; the others forget the carry, or take it. GRPO then trains this model for 12 steps on 256 prompts of each
task. Accuracy is over 200 held-out prompts, half of them of each task.
"""

import json
import random
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from runner import ROOT, over_seeds
from workloads.learning.curriculum import COMMON, run
from workloads.learning.learning import fine_tune

sys.path.append(str(ROOT / "tools/builtin"))
import builtin_task as task

RIGHT = {"carry": 0.25, "plain": 0.6}
NUM_HELD_OUT = 100
NUM_PROMPTS = 256
NUM_SHOWN = 1500
DRAWS = {"equal": "--prompt_data_probs 1,1", "adaptive": "--adaptive_mix"}
FLAGS = {"seeds": [1, 2, 3]}
SFT = (
    "--pretrain builtin --dataset shown.jsonl --input_key prompt --output_key completion --apply_chat_template"
    " --max_len 64 --train_batch_size 64 --micro_train_batch_size 64 --max_epochs 3 --learning_rate 2e-3"
    " --zero_stage 0 --save_path sft"
)


def write_tasks(folder: Path) -> None:
    """Write prompts and held-out prompts of each task, and demonstrations of both."""
    shown = []
    for name, share in RIGHT.items():
        rng = random.Random(name)
        problems = task.problems()
        rng.shuffle(problems)
        is_plain = name == "plain"
        end = " without carry?" if is_plain else "?"
        questions = [task.question(problem).replace("?", end) for problem in problems]
        answers = [str(sum(problem) - 10 * is_plain) for problem in problems]
        rows = [{"prompt": question, "answer": answer} for question, answer in zip(questions, answers, strict=True)]
        _write(folder / f"{name}_held_out.jsonl", rows[:NUM_HELD_OUT])
        _write(folder / f"{name}.jsonl", rows[NUM_HELD_OUT:][:NUM_PROMPTS])
        for problem, row in zip(problems[-NUM_SHOWN:], rows[-NUM_SHOWN:], strict=True):
            answer = task.solution(problem, carries=(rng.random() < share) != is_plain)
            shown.append({"prompt": row["prompt"], "completion": answer})
    _write(folder / "shown.jsonl", shown)


def _write(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def measure(options: Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Make the model to begin with; run every seed with each way to draw."""
    write_tasks(folder)
    fine_tune(SFT, folder)
    held_out = ",".join(str(folder / f"{name}_held_out.jsonl") for name in RIGHT)
    model = ["--pretrain", str(folder / "sft/model"), "--eval_data", held_out]
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in DRAWS}
    for seed in options.seeds:
        for name, own in runs.items():
            flags = [*DRAWS[name].split(), "--seed", str(seed)]
            found = run("carry.jsonl,plain.jsonl", [*model, *flags], folder / f"{name}-{seed}")
            own.append(found | {"flags": " ".join([COMMON, *flags])})
        yield {"sft": SFT, **{name: over_seeds(own) for name, own in runs.items()}}
