"""Measure held-out accuracy before and after training for each example in `examples/`, by seed.

    python tools/bench/agents_learning.py --jobs 8 --cores_per_job 2 --out agents-learning.json

Runs the commands that the docstring of an example names, with a `--seed` for `rlhf`. Each run has a folder, a Ray
cluster and CPU cores of its own, so that `--jobs` of them run at the same time without sharing anything. Accuracy is
the job's own: the engine plays the held-out prompts with the weights before the first step and with the final ones. A
docstring also states the accuracy that every seed must reach, which is the goal in the report. Examples that are not
run keep their part of a report that is there; each part names its commit.
"""

import ast
import json
import os
import queue
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner import OWN_CLUSTER, ROOT, arguments, environment, read_metrics, write

EXAMPLES = ROOT / "examples"
TIMEOUT_S = 1800
PROGRAMS = {"python": "", "rlhf": "-m rlhf_cli.main"}  # what the commands call, and this Python's arguments for it
_LONG = ("commands", "accuracy_by_step")
_COMMAND = re.compile(r"^ +((?:python|rlhf) (?:.*\\\n)*.*)$", re.MULTILINE)
_GOAL = re.compile(r"held-out accuracy\s+of\s+at\s+least\s+(\d\.\d+)")


@dataclass(frozen=True, slots=True)
class Example:
    """An example: the commands of its docstring, of which the last one is `rlhf ppo`, and the accuracy to reach."""

    name: str
    commands: tuple[str, ...]
    goal: float


def read_example(path: Path) -> Example | None:
    """Return the example in a Python file; None for one whose docstring does not state an accuracy."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    commands = tuple(" ".join(found.replace("\\\n", " ").split()) for found in _COMMAND.findall(text))
    goal = _GOAL.search(text)
    return Example(path.stem, commands, float(goal[1])) if goal else None


def with_seed(command: str, seed: int) -> str:
    """Return a command with the seed, and with a --save_path for the last job of an example."""
    if not command.startswith("rlhf"):
        return command
    path = "" if "--save_path" in command else " --save_path out"
    return f"{command} --seed {seed}{path}"


def run(example: Example, seed: int, cores: Sequence[int]) -> dict[str, Any]:
    """Run an example's commands in a folder of their own; return its accuracies, or the end of its output."""
    with tempfile.TemporaryDirectory(prefix="al") as name:
        folder = Path(name)
        (folder / "examples").symlink_to(EXAMPLES)
        programs = folder / "bin"
        programs.mkdir()
        for program, script in PROGRAMS.items():
            (programs / program).write_text(f'#!/bin/sh\nexec {sys.executable} {script} "$@"\n', encoding="utf-8")
            (programs / program).chmod(0o755)
        commands = [with_seed(command, seed) for command in example.commands]
        own = {"PATH": f"{programs}:{os.environ['PATH']}", "TMPDIR": name, "RAY_TMPDIR": name}
        pinned = ["taskset", "-c", ",".join(map(str, cores))] if cores else []
        result: dict[str, Any] = {"seed": seed, "commands": commands, "cores": len(cores) or os.cpu_count()}
        started = time.monotonic()
        done = subprocess.run(
            [*pinned, "bash", "-ec", "\n".join(commands)],
            cwd=folder,
            env=os.environ | OWN_CLUSTER | own,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
        )
        result["seconds"] = round(time.monotonic() - started, 1)
        if done.returncode:
            return result | {"error": done.stdout[-2000:]}
        [saved] = re.findall(r"--save_path (\S+)", commands[-1])
        return result | figures_of(folder / saved)


def figures_of(folder: Path) -> dict[str, Any]:
    """Return held-out accuracy before and after, training accuracy by step, and the largest log-prob gap of a run."""
    metrics = read_metrics(folder)
    return {
        "accuracy_before": metrics.final["eval/accuracy_before"],
        "accuracy_after": metrics.final["eval/accuracy_after"],
        "accuracy_by_step": {line["step"]: round(line["rollout/accuracy"], 4) for line in metrics.steps},
        "seconds_a_step": round(metrics.median("time/step"), 3),
        "logprob_gap_max": max(line["mismatch/logprob_gap_max"] for line in metrics.steps),
    }


def summary(example: Example, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return an example's part of the report. Its goal is met when every seed has reached it."""
    whole = [result for result in runs if "error" not in result]
    worst = min((result["accuracy_after"] for result in whole), default=None)
    return {
        "goal": example.goal,
        "goal_met": len(whole) == len(runs) and worst >= example.goal,
        "mean_before": statistics.mean(result["accuracy_before"] for result in whole) if whole else None,
        "mean_after": statistics.mean(result["accuracy_after"] for result in whole) if whole else None,
        "worst_after": worst,
        "logprob_gap_max": max((result["logprob_gap_max"] for result in whole), default=None),
        "runs": runs,
    }


def main() -> None:
    """Run every example with every seed, and write the report."""
    parser = arguments(
        __doc__,
        seeds=[1, 2, 3],
        jobs=(1, "runs at the same time"),
        cores_per_job=(0, "CPU cores to which a run is bound; 0: all"),
    )
    read = [read_example(path) for path in sorted(EXAMPLES.glob("*.py"))]
    examples = {example.name: example for example in read if example}
    parser.add_argument("--only", nargs="+", choices=examples, default=list(examples), metavar="NAME")
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    size = options.cores_per_job
    if options.jobs * size > len(cores):
        parser.error(f"{options.jobs} jobs of {size} cores need {options.jobs * size} cores, there are {len(cores)}")
    places: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
    for job in range(options.jobs):
        places.put(cores[job * size : (job + 1) * size])

    def placed(name: str, seed: int) -> dict[str, Any]:
        place = places.get()
        try:
            result = run(examples[name], seed, place)
        finally:
            places.put(place)
        print(name, json.dumps({key: result[key] for key in result if key not in _LONG}), flush=True)
        return result

    with ThreadPoolExecutor(options.jobs) as pool:
        waiting = {name: [pool.submit(placed, name, seed) for seed in options.seeds] for name in options.only}
    before = json.loads(options.out.read_text(encoding="utf-8"))["examples"] if options.out.is_file() else {}
    commit = {"commit": environment()["commit"]}
    made = {
        name: commit | summary(examples[name], [future.result() for future in futures])
        for name, futures in waiting.items()
    }
    write(options, "agents_learning", {"examples": dict(sorted((before | made).items()))})
    for name, result in made.items():
        met = "met" if result["goal_met"] else "MISSED"
        print(f"{name}: worst {result['worst_after']}, goal {result['goal']}: {met}")
    sys.exit(not all(result["goal_met"] for result in made.values()))


if __name__ == "__main__":
    main()
