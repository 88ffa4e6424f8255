"""Held-out figures before and after training with every offline command, by seed, on a CPU.

    python tools/bench/run.py offline --real_data DATA --out offline.json

Runs `rlhf sft`, `rm`, `dpo`, `kto`, `prm` and `kd` on the built-in model, once for each seed and row of `RECIPES`. Two
rows read real data from the folder `--real_data`: `gsm8k/{train,test}.jsonl` and `hh-harmless/pairs.jsonl.gz`. The
other rows read solutions of two-digit additions. Half of the additions need a carry:

    What is 47 + 38?    chosen  7+8=15, 4+3+1=8 #### 85    rejected  7+8=15, 4+3=7 #### 75
    What is 41 + 38?    chosen  1+8=9, 4+3=7 #### 79       rejected  1+8=9, 4+3+1=8 #### 89

A written carry is right in half of the rows, so a model that only looks for one has an accuracy of 0.5: it must add the
ones. `kto` reads single solutions with a label. `prm` reads solutions whose steps are each wrong with probability 0.5.
`sft` and `kd` read the chosen solutions; the teacher of `kd` is the model that `sft` trained. Held-out additions are
not trained on. Flags behind `--` go to all commands: `-- --max_samples 512`.
"""

import gzip
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from runner import MORE_FLAGS, ROOT, progress, read_lines

sys.path.append(str(ROOT / "tools/builtin"))
from builtin_task import Problem, question, solution

COMMAND = [sys.executable, "-m", "rlhf_cli.main"]
NUM_TRAIN = 2048
NUM_HELD_OUT = 256
NUM_HELD_OUT_REAL = 200  # pairs
PLACEHOLDER = "<|endoftext|>"
COMMON = "--train_batch_size 64 --zero_stage 0"
SHORT = f"{COMMON} --micro_train_batch_size 64 --max_len 64"
LONG = f"{COMMON} --packing_samples --micro_batch_tokens 4096"
PAIRS = f"--dataset pairs.jsonl --eval_dataset pairs_held_out.jsonl --prompt_key prompt --apply_chat_template {SHORT}"
RIGHT = f"--dataset right.jsonl --eval_dataset right_held_out.jsonl --apply_chat_template {SHORT}"
JUDGED = f"--dataset judged.jsonl --eval_dataset judged_held_out.jsonl --apply_chat_template {SHORT}"
STEPS = f"--dataset steps.jsonl --eval_dataset steps_held_out.jsonl --placeholder_token {PLACEHOLDER} {SHORT}"
GSM8K = (
    "--dataset gsm8k_train.jsonl --eval_dataset gsm8k_test.jsonl --input_key question --output_key answer"
    f" --apply_chat_template --max_len 1024 {LONG}"
)
HH = f"--dataset hh.jsonl --eval_dataset hh_held_out.jsonl --max_len 512 {LONG}"
RECIPES = {
    "sft": f"sft {RIGHT} --learning_rate 1e-3",
    "sft, GSM8K": f"sft {GSM8K} --learning_rate 3e-3",
    "rm": f"rm {PAIRS} --learning_rate 1e-3 --max_epochs 2",
    "rm, HH": f"rm {HH} --learning_rate 1e-3 --max_epochs 2",
    "dpo": f"dpo {PAIRS} --learning_rate 1e-4",
    "ipo": f"dpo {PAIRS} --learning_rate 1e-4 --loss_type ipo",
    "simpo": f"dpo {PAIRS} --learning_rate 3e-4 --loss_type simpo --beta 2",
    "orpo": f"dpo {PAIRS} --learning_rate 1e-3 --loss_type orpo",
    "kto": f"kto {JUDGED} --learning_rate 1e-4",
    "prm": f"prm {STEPS} --learning_rate 1e-3 --max_epochs 12",
    "kd": f"kd {RIGHT} --learning_rate 1e-3 --teacher_model teacher",
}
NEEDS_REAL_DATA = ("sft, GSM8K", "rm, HH")
FLAGS = {
    "seeds": [1, 2],
    "real_data": (Path, "folder of the real data; without it, its rows are left out"),
    "jobs": (1, "seeds that run at the same time"),
    "only": {"nargs": "+", "choices": RECIPES, "default": list(RECIPES), "metavar": "NAME"},
    "flags": MORE_FLAGS,
}

Row = Mapping[str, Any]


def additions() -> tuple[list[Problem], list[Problem]]:
    """Return training and held-out additions, half of which carry."""
    rng = random.Random(0)
    kinds: tuple[list[Problem], list[Problem]] = ([], [])  # without a carry, with a carry
    for problem in ((a, b) for a in range(10, 100) for b in range(10, 100)):
        kinds[carries(problem)].append(problem)
    for problems in kinds:
        rng.shuffle(problems)
    both = [problem for pair in zip(*kinds, strict=False) for problem in pair][: NUM_TRAIN + NUM_HELD_OUT]
    return both[NUM_HELD_OUT:], both[:NUM_HELD_OUT]


def carries(problem: Problem) -> bool:
    """Return whether the ones of the two numbers add up to 10 or more."""
    return problem[0] % 10 + problem[1] % 10 >= 10


def write_additions(folder: Path) -> None:
    """Write training rows and held-out rows for each command into `folder`."""
    for problems, ending in zip(additions(), ("", "_held_out"), strict=True):
        pairs = [
            {
                "prompt": question(problem),
                "chosen": solution(problem, carries=carries(problem)),
                "rejected": solution(problem, carries=not carries(problem)),
            }
            for problem in problems
        ]
        rows = {
            "pairs": pairs,
            "right": [{"input": pair["prompt"], "output": pair["chosen"]} for pair in pairs],
            "judged": [
                {"input": pair["prompt"], "output": pair[key], "label": key == "chosen"}
                for pair in pairs
                for key in ("chosen", "rejected")
            ],
            "steps": judged_steps(problems),
        }
        for name, made in rows.items():
            write_jsonl(folder / f"{name}{ending}.jsonl", made)


def judged_steps(problems: list[Problem]) -> Iterator[Row]:
    """Yield solutions of two steps with a label per step."""
    rng = random.Random(0)
    for problem in problems:
        good = [rng.random() < 0.5 for _ in range(2)]
        ones, tens = solution(problem, carries=carries(problem) == good[1]).partition(" ####")[0].split(", ")
        if not good[0]:
            sum_of_ones = problem[0] % 10 + problem[1] % 10
            ones = f"{ones.partition('=')[0]}={sum_of_ones + rng.choice([-2, -1, 1, 2])}"
        text = f"{question(problem)} {ones}{PLACEHOLDER} {tens}{PLACEHOLDER}"
        yield {"input": text, "label": ["+" if right else "-" for right in good]}


def write_real(source: Path, folder: Path) -> None:
    """Write the real data into `folder`. The last pairs are held out."""
    for name in ("train", "test"):
        shutil.copyfile(source / f"gsm8k/{name}.jsonl", folder / f"gsm8k_{name}.jsonl")
    with gzip.open(source / "hh-harmless/pairs.jsonl.gz", "rt", encoding="utf-8") as lines:
        pairs = [json.loads(line) for line in lines]
    write_jsonl(folder / "hh.jsonl", pairs[:-NUM_HELD_OUT_REAL])
    write_jsonl(folder / "hh_held_out.jsonl", pairs[-NUM_HELD_OUT_REAL:])


def write_jsonl(path: Path, rows: Iterable[Row]) -> None:
    """Write one JSON object per line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def run(recipe: str, seed: int, folder: Path) -> dict[str, Any]:
    """Run a command in `folder`; return its held-out figures before and after."""
    out = folder / f"seed{seed}"
    command, *flags = recipe.split()
    words = [*COMMAND, command, *flags, "--pretrain", "builtin", "--seed", str(seed)]
    shutil.rmtree(out, ignore_errors=True)
    environ = os.environ | {"BUILD_WORKING_DIRECTORY": str(folder)}
    started = time.perf_counter()
    subprocess.run([*words, "--save_path", out.name], cwd=folder, env=environ, stdout=subprocess.DEVNULL, check=True)
    seconds = time.perf_counter() - started
    held_out = [line for line in read_lines(out / "metrics.jsonl") if any(name.startswith("eval/") for name in line)]
    figures = {when: figures_of(line) for when, line in (("before", held_out[0]), ("after", held_out[-1]))}
    return {"seed": seed, **figures, "num_steps": held_out[-1]["step"], "seconds": seconds}


def figures_of(line: Mapping[str, float]) -> dict[str, float]:
    """Return the held-out figures of a line of metrics. For `kto`, add the margin of good over bad answers."""
    figures = {name.removeprefix("eval/"): value for name, value in line.items() if name.startswith("eval/")}
    if "desirable_reward" in figures:
        figures["margin"] = figures["desirable_reward"] - figures["undesirable_reward"]
    return figures


def means(runs: Sequence[Mapping[str, Mapping[str, float]]], when: str) -> dict[str, float]:
    """Return the means over the seeds of the figures "before" or "after"."""
    return {name: statistics.mean(result[when][name] for result in runs) for name in runs[0][when]}


def measure(options: Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Run every recipe with every seed."""
    write_additions(folder)
    if options.real_data is not None:
        write_real(options.real_data, folder)
    table = []
    for name in options.only:
        if name in NEEDS_REAL_DATA and options.real_data is None:
            continue
        if name == "kd" and not (folder / "teacher").exists():
            run(RECIPES["sft"], options.seeds[0], folder)
            shutil.move(folder / f"seed{options.seeds[0]}/model", folder / "teacher")
        recipe = " ".join([RECIPES[name], *options.flags])
        with ThreadPoolExecutor(options.jobs) as pool:
            runs = list(pool.map(run, [recipe] * len(options.seeds), options.seeds, [folder] * len(options.seeds)))
        row = {"name": name, "before": means(runs, "before"), "after": means(runs, "after")}
        progress(row)
        table.append(row | {"command": f"rlhf {recipe}", "runs": runs})
        yield {"table": table}
