"""Held-out accuracy on the built-in task before and after `rlhf ppo`, by seed.

    python tools/bench/run.py learning --out learning.json

Runs `rlhf ppo` with no flags but the seed, for seeds 1, 2 and 3, and once with both learning rates 0: that run must not
learn. The job itself measures accuracy: the engine answers 200 held-out prompts at temperature 1, with the weights
before the first step and with the final ones. Flags behind `--` go to the command: `-- --bf16 --colocate_all_models`
on a GPU.
"""

import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from runner import MORE_FLAGS, over_seeds, progress, run_ppo

FLAGS = {"seeds": [1, 2, 3], "flags": MORE_FLAGS}
STILL = ("--actor_learning_rate", "0", "--critic_learning_rate", "0")


def run(flags: Sequence[str], folder: Path) -> dict[str, Any]:
    """Run the job with `folder` as its --save_path; return its accuracies, times and largest log-prob gap."""
    metrics = run_ppo(flags, folder)
    by_step = {line["step"]: line["eval/accuracy"] for line in metrics.lines if "eval/accuracy" in line}
    found = {"flags": " ".join(flags), **metrics.accuracies(), "accuracy_by_step": by_step}
    progress(found)
    return found


def fine_tune(flags: str, folder: Path) -> None:
    """Run `rlhf sft` in a folder, to which the paths in its flags are relative."""
    subprocess.run(
        [sys.executable, "-m", "rlhf_cli.main", "sft", *flags.split()], check=True, cwd=folder, stdout=sys.stderr
    )


def measure(options: Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Run every seed and the run with learning rate 0."""
    runs = [run(["--seed", str(seed), *options.flags], folder / f"seed{seed}") for seed in options.seeds]
    yield over_seeds(runs) | {"learning_rate_zero": run(["--seed", "1", *STILL, *options.flags], folder / "still")}
