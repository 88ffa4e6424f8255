"""Held-out accuracy before and after training for each example in `examples/`, by seed.

    python tools/bench/run.py agents_learning --jobs 8 --cores_per_job 2 --out agents-learning.json

Runs the commands that the docstring of an example names, with a `--seed` for `rlhf`. Each run has a folder, a Ray
cluster and CPU cores of its own, so that `--jobs` of them run at the same time without sharing anything. Accuracy is
the job's own: the engine plays the held-out prompts with the weights before the first step and with the final ones. A
docstring also states the accuracy that every seed must reach, which is the goal in the report.
"""

import ast
import os
import queue
import re
import shlex
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from runner import OWN_CLUSTER, ROOT, UsageError, over_seeds, progress, read_metrics

EXAMPLES = ROOT / "examples"
TIMEOUT_S = 1800
PROGRAMS = {"python": "", "rlhf": "-m rlhf_cli.main"}  # what the commands call, and this Python's arguments for it
FLAGS = {
    "seeds": [1, 2, 3],
    "jobs": (1, "runs at the same time"),
    "cores_per_job": (0, "CPU cores to which a run is bound; 0: all"),
    "only": {"nargs": "+", "metavar": "NAME", "help": "names of examples"},
}
_COMMAND = re.compile(r"^ +((?:python|rlhf) (?:.*\\\n)*.*)$", re.MULTILINE)
_GOAL = re.compile(r"held-out accuracy\s+of\s+at\s+least\s+(\d\.\d+)")


class Example(NamedTuple):
    """The commands in the docstring of an example, of which the last one is `rlhf ppo`, and the accuracy to reach."""

    commands: tuple[str, ...]
    goal: float


def read_example(path: Path) -> Example | None:
    """Return the example in a Python file; None for one whose docstring does not state an accuracy."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    commands = tuple(" ".join(found.replace("\\\n", " ").split()) for found in _COMMAND.findall(text))
    goal = _GOAL.search(text)
    return Example(commands, float(goal[1])) if goal else None


def with_seed(command: str, seed: int) -> str:
    """Return a command with the seed, and with a --save_path for the last job of an example."""
    if not command.startswith("rlhf"):
        return command
    path = "" if "--save_path" in command else " --save_path out"
    return f"{command} --seed {seed}{path}"


def run(example: Example, seed: int, cores: Sequence[int]) -> dict[str, Any]:
    """Run an example's commands in a folder of their own; return its accuracies, or the end of its output."""
    commands = [with_seed(command, seed) for command in example.commands]
    result: dict[str, Any] = {"seed": seed, "commands": commands, "cores": len(cores) or os.cpu_count()}
    pinned = ["taskset", "-c", ",".join(map(str, cores))] if cores else []
    # Functions, so that the commands find this Python and this `rlhf`.
    functions = [f'{name}() {{ {shlex.quote(sys.executable)} {more} "$@"; }}' for name, more in PROGRAMS.items()]
    with tempfile.TemporaryDirectory(prefix="al") as name:
        folder = Path(name)
        (folder / "examples").symlink_to(EXAMPLES)
        done = subprocess.run(
            [*pinned, "bash", "-ec", "\n".join([*functions, *commands])],
            cwd=folder,
            env=os.environ | OWN_CLUSTER | {"TMPDIR": name, "RAY_TMPDIR": name},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
        )
        if done.returncode:
            return result | {"error": done.stdout[-2000:]}
        [saved] = re.findall(r"--save_path (\S+)", commands[-1])
        metrics = read_metrics(folder / saved)
    by_step = {step["step"]: round(step["rollout/accuracy"], 4) for step in metrics.steps}
    return result | metrics.accuracies() | {"accuracy_by_step": by_step}


def summary(example: Example, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return an example's part of the report. Its goal is met when every seed has reached it."""
    whole = [result for result in runs if "error" not in result]
    figures = over_seeds(whole) if whole else {"worst_after": None}
    goal_met = len(whole) == len(runs) and figures["worst_after"] >= example.goal
    gap = max((result["logprob_gap_max"] for result in whole), default=None)
    return {"goal": example.goal, "goal_met": goal_met, "logprob_gap_max": gap, **figures, "runs": runs}


def measure(options: Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Run every example with every seed."""
    read = {path.stem: read_example(path) for path in sorted(EXAMPLES.glob("*.py"))}
    examples = {name: example for name, example in read.items() if example}
    names = options.only or [*examples]
    if unknown := set(names) - set(examples):
        raise UsageError(f"there is no example {', '.join(unknown)} with a goal; there are {', '.join(examples)}")
    cores = sorted(os.sched_getaffinity(0))
    size = options.cores_per_job
    if options.jobs * size > len(cores):
        raise UsageError(
            f"{options.jobs} jobs of {size} cores need {options.jobs * size} cores, there are {len(cores)}"
        )
    places: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
    for job in range(options.jobs):
        places.put(cores[job * size : (job + 1) * size])

    def placed(name: str, seed: int) -> dict[str, Any]:
        place = places.get()
        try:
            result = run(examples[name], seed, place)
        finally:
            places.put(place)
        progress({"example": name} | result)
        return result

    with ThreadPoolExecutor(options.jobs) as pool:
        waiting = {name: [pool.submit(placed, name, seed) for seed in options.seeds] for name in names}
    parts = {name: summary(examples[name], [run.result() for run in runs]) for name, runs in waiting.items()}
    missed = [f"{name}: {part['worst_after']}" for name, part in parts.items() if not part["goal_met"]]
    yield {"examples": parts, "missed": missed}
