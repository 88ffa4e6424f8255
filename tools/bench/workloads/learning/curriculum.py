"""Held-out accuracy at equal updates by seed: prompts and sources drawn in two ways, and answers used once or again.

    python tools/bench/run.py curriculum --out curriculum.json

Trains the built-in model by GRPO for 12 steps on its prompts. The held-out prompts are those of the built-in task.
`uniform` and `by_pass_rate` (`--difficulty_pool`) have 128 prompts, which are three episodes. Three in four have a
wrong label, as in data with mistakes, so that no response to them is right. `fixed_shares` (half of each) and
`adaptive_shares` (`--adaptive_mix`) have a source of 256 prompts, and one of 256 sums of three numbers, which the model
hardly ever gets right. `fresh` and `reused` (`--reuse_solved`) have 128 prompts with right labels.
"""

import json
import statistics
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rlhf_cli.builtin import RECIPE_FILE, TRAIN_FILE
from runner import over_seeds, progress, read_lines, run_ppo

ONE, TWO, RIGHT = "prompts.jsonl", "two.jsonl,three.jsonl", "right.jsonl"
DRAWS = {
    "uniform": (ONE, ""),
    "by_pass_rate": (ONE, "--difficulty_pool"),
    "fixed_shares": (TWO, "--prompt_data_probs 1,1"),
    "adaptive_shares": (TWO, "--adaptive_mix"),
    "fresh": (RIGHT, "--old_logprobs rollout"),
    "reused": (RIGHT, "--old_logprobs rollout --reuse_solved 128"),
}
NUM_PROMPTS = 128
NUM_OF_SOURCE = 256
FLAGS = {"seeds": [1, 2, 3], "only": {"nargs": "+", "choices": DRAWS, "default": list(DRAWS), "metavar": "NAME"}}
COMMON = "--advantage_estimator group_norm --train_steps 12 --eval_steps 3 --num_episodes 3 --disable_ds_ckpt"


def write_prompts(folder: Path) -> None:
    """Write the files of prompts: one with three in four wrong labels, and two of different difficulty."""
    rows = read_lines(TRAIN_FILE)
    wrong = [row | {"answer": str(int(row["answer"]) + 1000)} if index % 4 else row for index, row in enumerate(rows)]
    sums = rows[:NUM_OF_SOURCE]
    longer = [
        {"prompt": row["prompt"].replace("?", f" + {more}?"), "answer": str(int(row["answer"]) + more)}
        for more, row in enumerate(rows[NUM_OF_SOURCE : 2 * NUM_OF_SOURCE], start=11)
    ]
    parts = wrong[:NUM_PROMPTS], sums, longer, rows[:NUM_PROMPTS]
    for name, part in zip((ONE, *TWO.split(","), RIGHT), parts, strict=True):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")


def run(files: str, flags: Sequence[str], folder: Path) -> dict[str, Any]:
    """Run the job with `folder` as its --save_path; return accuracies, and by step what was drawn."""
    data = ",".join(str(folder.parent / name) for name in files.split(","))
    metrics = run_ppo(["--config", str(RECIPE_FILE), "--prompt_data", data, *COMMON.split(), *flags], folder)
    names = [
        name for name in metrics.steps[0] if name.startswith(("rollout/accuracy", "pool/", "mix/", "reuse/answers"))
    ]
    found = {
        "flags": " ".join([*COMMON.split(), *flags]),
        **metrics.accuracies(),
        "accuracy_by_step": {line["step"]: line["eval/accuracy"] for line in metrics.lines if "eval/accuracy" in line},
        "draws": {name: [step[name] for step in metrics.steps] for name in names},
    }
    progress(found)
    return found


def measure(options: Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Run each way to draw with every seed."""
    write_prompts(folder)
    found = {}
    for name in options.only:
        files, flags = DRAWS[name]
        runs = [run(files, [*flags.split(), "--seed", str(s)], folder / f"{name}-{s}") for s in options.seeds]
        found[name] = over_seeds(runs)
        curves = [one["accuracy_by_step"] for one in found[name]["runs"]]
        found[name]["mean_by_step"] = {step: statistics.mean(curve[step] for curve in curves) for step in curves[0]}
        yield found
