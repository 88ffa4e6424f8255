"""Held-out accuracy at equal updates with prompts drawn uniformly and by pass rate (`--difficulty_pool`), by seed.

    python tools/bench/run.py curriculum --out curriculum.json

Trains the built-in model by GRPO for 12 steps on 128 of its prompts, which are three episodes. Three in four have a
wrong label, as in data with mistakes, so that no response to them is right. The held-out prompts are those of the
built-in task.
"""

import json
import statistics
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rlhf_cli.builtin import RECIPE_FILE, TRAIN_FILE
from runner import over_seeds, progress, read_lines, run_ppo

DRAWS = {"uniform": "", "by_pass_rate": "--difficulty_pool"}
NUM_PROMPTS = 128
FLAGS = {"seeds": [1, 2, 3], "only": {"nargs": "+", "choices": DRAWS, "default": list(DRAWS), "metavar": "NAME"}}
COMMON = "--advantage_estimator group_norm --train_steps 12 --eval_steps 3 --num_episodes 3 --disable_ds_ckpt"


def write_prompts(path: Path) -> None:
    """Write the first prompts of the built-in task to a file, three in four with a wrong label."""
    rows = read_lines(TRAIN_FILE)[:NUM_PROMPTS]
    wrong = [row | {"answer": str(int(row["answer"]) + 1000)} if index % 4 else row for index, row in enumerate(rows)]
    path.write_text("".join(json.dumps(row) + "\n" for row in wrong), encoding="utf-8")


def run(flags: Sequence[str], folder: Path) -> dict[str, Any]:
    """Run the job with `folder` as its --save_path; return accuracies, and by step what was drawn."""
    data = ["--config", str(RECIPE_FILE), "--prompt_data", str(folder.parent / "prompts.jsonl")]
    metrics = run_ppo([*data, *COMMON.split(), *flags], folder)
    names = ("rollout/accuracy", "pool/solved", "pool/unseen", "pool/mean_pass_rate")
    found = {
        "flags": " ".join([*COMMON.split(), *flags]),
        **metrics.accuracies(),
        "accuracy_by_step": {line["step"]: line["eval/accuracy"] for line in metrics.lines if "eval/accuracy" in line},
        "draws": {name: [step[name] for step in metrics.steps] for name in names if name in metrics.steps[0]},
    }
    progress(found)
    return found


def measure(options: Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Run both ways to draw with every seed."""
    write_prompts(folder / "prompts.jsonl")
    found = {}
    for name in options.only:
        flags = DRAWS[name].split()
        found[name] = over_seeds([run([*flags, "--seed", str(s)], folder / f"{name}-{s}") for s in options.seeds])
        curves = [one["accuracy_by_step"] for one in found[name]["runs"]]
        found[name]["mean_by_step"] = {step: statistics.mean(curve[step] for curve in curves) for step in curves[0]}
        yield found
