"""What `rlhf ppo --async_train` gains where responses have a long tail, on two cores.

    python tools/bench/run.py asynchronous --out asynchronous-cpu.json

Runs the task of `long_tail.py` from each seed, synchronously and with each `--max_staleness`, all with the same flags.
Samples per second are those of all steps, without start-up and evaluations. Accuracy is the job's own: the engine
answers the held-out prompts with the weights before the first step and with the final ones. The synchronous runs also
give the costs to the simulator (`sim/`), whose predictions stand beside the measurements. Both cores share caches, so
an engine is slower while the learner trains. How much, is fitted to the runs of the first seed; the others test the
predictions.

With `--keep`, runs that are there are read and not run again, so that seeds can be run one by one.
"""

import math
import os
import statistics
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from runner import MORE_FLAGS, environment, progress, read_metrics, run_ppo
from sim.costs import MeasuredRun, read_run
from sim.model import AtUpdate, Costs, Layout, simulate
from workloads.asynchronous import long_tail

GOALS = {1: 1.3, 4: 1.5}  # least samples per second, relative to the synchronous run, by staleness
MAX_ERROR = 0.1  # of the mean prediction of a mode
BATCH_SIZE, NUM_SAMPLES, SLOTS = 8, 4, 128
NUM_ANSWERS = 4  # per held-out prompt
RUN_FLAGS = (
    f"--rollout_batch_size {BATCH_SIZE} --n_samples_per_prompt {NUM_SAMPLES} --vllm_max_num_seqs {SLOTS}"
    f" --train_batch_size {BATCH_SIZE * NUM_SAMPLES} --micro_train_batch_size 32 --micro_rollout_batch_size 64"
    " --advantage_estimator group_norm --init_kl_coef 0 --old_logprobs rollout --actor_learning_rate 1.5e-4"
    " --packing_samples --eval_steps -1"
    f" --eval_temperature 1 --eval_n_samples_per_prompt {NUM_ANSWERS}"
)
FLAGS = {
    "seeds": [1, 2, 3],
    "steps": (110, "of each run"),
    "cores": ([0, 1], "of this machine, for everything"),
    "timeout_s": (900.0, "per run"),
    "staleness": {"type": int, "nargs": "*", "default": [1, 4]},
    "at_update": {"choices": ["drain", "keep", "restart"], "default": "keep"},
    "task": {"type": Path, "metavar": "DIR", "help": "keep the task here, or use the one that is here"},
    "keep": {"type": Path, "metavar": "DIR", "help": "keep the folders of the runs here"},
    "flags": MORE_FLAGS,
}
_NOT_COUNTED = ("time/evaluate", "time/save", "time/checkpoint")
SYNCHRONOUS = "synchronous"


def mode_flags(staleness: int, at_update: AtUpdate) -> list[str]:
    """Return the flags of a mode; a staleness of 0 is the synchronous run."""
    if not staleness:
        return []
    return ["--async_train", "--max_staleness", str(staleness), "--at_update", at_update]


def mode_name(staleness: int) -> str:
    """Return the name of a mode in the report."""
    return f"staleness_{staleness}" if staleness else SYNCHRONOUS


def run(flags: Sequence[str], folder: Path, timeout_s: float) -> dict[str, Any]:
    """Run the job with `folder` as its --save_path, unless it has ended there already.

    Returns:
        Samples per second, accuracies, and the means of all times and shares over the steps.
    """
    if not (folder / "model").is_dir():
        run_ppo(flags, folder, timeout_s=timeout_s)
    _, steps, final = read_metrics(folder)
    seconds = sum(step["time/step"] - sum(step.get(name, 0.0) for name in _NOT_COUNTED) for step in steps)
    names = sorted({name for step in steps for name in step if name.startswith(("time/", "async/", "throughput/"))})
    return {
        "num_steps": len(steps),
        "seconds": seconds,
        "samples_per_s": sum(step["samples/trained"] for step in steps) / seconds,
        "accuracy_before": final["eval/accuracy_before"],
        "accuracy_after": final["eval/accuracy_after"],
        "mean": {name: statistics.fmean(step.get(name, 0.0) for step in steps) for name in names},
    }


def predict(costs: Costs, run: MeasuredRun, staleness: int, at_update: AtUpdate) -> float:
    """Return the samples per second of an asynchronous run with these costs, and the lengths of a synchronous run."""
    layout = Layout(slots=run.slots, batch_size=run.batch_size, max_staleness=staleness, at_update=at_update)
    return simulate(costs, layout, run.groups, len(run.steps)).samples_per_s


def fit_slowdown(costs: Costs, run: MeasuredRun, at_update: AtUpdate, samples_per_s: Mapping[int, float]) -> Costs:
    """Return the costs with the slowdown, from 1 to 2, that comes closest to the asynchronous runs of one seed.

    `samples_per_s` is what they reached, by staleness.
    """

    def error(candidate: Costs) -> float:
        return sum(
            (predict(candidate, run, staleness, at_update) / reached - 1) ** 2
            for staleness, reached in samples_per_s.items()
        )

    return min((replace(costs, slowdown=1 + hundredths / 100) for hundredths in range(0, 101, 2)), key=error)


def add_predictions(
    runs: dict[str, list[dict[str, Any]]], folders: Sequence[Path], stalenesses: Sequence[int], at_update: AtUpdate
) -> Costs:
    """Add the simulator's samples per second to the asynchronous runs of all seeds but the first; return the costs.

    Args:
        runs: figures by mode, one entry per seed in the same order; changed in place.
        folders: of the synchronous runs, by seed.
        stalenesses: of the other modes.
        at_update: of the other modes.
    """
    first, *others = [read_run(folder) for folder in folders]
    reached = {staleness: runs[mode_name(staleness)][0]["samples_per_s"] for staleness in stalenesses}
    costs = fit_slowdown(read_run(*folders).costs, first, at_update, reached)
    for staleness in stalenesses:
        for figures, measured in zip(runs[mode_name(staleness)][1:], others, strict=True):
            figures["predicted"] = predict(costs, measured, staleness, at_update)
    return costs


def standard_error(accuracies: Sequence[float], num_answers: int) -> float:
    """Return the standard error of a mean accuracy over seeds.

    It is the larger one of two estimates, because a few seeds may agree by chance: from the spread between seeds, and
    from the number of answers, as if these were independent.
    """
    mean = statistics.fmean(accuracies)
    binomial = math.sqrt(mean * (1 - mean) / (num_answers * len(accuracies)))
    between = statistics.stdev(accuracies) / math.sqrt(len(accuracies)) if len(accuracies) > 1 else 0.0
    return max(binomial, between)


def summary(runs: Mapping[str, Sequence[dict[str, Any]]], num_answers: int) -> dict[str, Any]:
    """Return the means of each mode, and its ratio and difference to the synchronous one.

    Args:
        runs: figures by mode, one entry per seed in the same order.
        num_answers: to held-out prompts, per evaluation.
    """

    def mean(found: Sequence[Mapping[str, float]], name: str) -> float:
        return statistics.fmean(each[name] for each in found)

    base = runs[SYNCHRONOUS]
    base_error = standard_error([each["accuracy_after"] for each in base], num_answers)
    modes: dict[str, Any] = {}
    for name, found in runs.items():
        ratios = [a["samples_per_s"] / b["samples_per_s"] for a, b in zip(found, base, strict=True)]
        error = standard_error([each["accuracy_after"] for each in found], num_answers)
        mode = modes[name] = {
            **{key: mean(found, key) for key in ("samples_per_s", "accuracy_before", "accuracy_after")},
            "accuracy_standard_error": error,
            "accuracy_difference": mean(found, "accuracy_after") - mean(base, "accuracy_after"),
            "difference_standard_error": math.hypot(error, base_error),
            "ratio": statistics.fmean(ratios),
            "ratios": ratios,
            "runs": found,
        }
        if tested := [each for each in found if "predicted" in each]:
            mode["predicted"] = mean(tested, "predicted")
            mode["prediction_error"] = mode["predicted"] / mean(tested, "samples_per_s") - 1
    return modes


def missed(modes: Mapping[str, Any]) -> list[str]:
    """Return the goals that the measurement misses, in words."""
    goals = {mode_name(staleness): ratio for staleness, ratio in GOALS.items()}
    found = []
    for name, mode in modes.items():
        goal = goals.get(name, 0.0)
        if mode["ratio"] < goal:
            found.append(f"{name}: {mode['ratio']:.2f} times the samples per second, the goal is {goal}")
        if abs(mode["accuracy_difference"]) > 2 * mode["difference_standard_error"]:
            found.append(f"{name}: accuracy differs by {mode['accuracy_difference']:+.3f}, more than 2 standard errors")
        if abs(mode.get("prediction_error", 0.0)) > MAX_ERROR:
            found.append(f"{name}: the prediction is off by {mode['prediction_error']:+.0%}, more than {MAX_ERROR:.0%}")
    return found


def measure(options: Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Run every seed in every mode."""
    os.sched_setaffinity(0, options.cores)
    task = options.task or folder / "task"
    common = [*long_tail.make(task), *RUN_FLAGS.split(), *options.flags, "--train_steps", str(options.steps)]
    folder = options.keep or folder
    runs: dict[str, list[dict[str, Any]]] = {}
    synchronous = []
    for seed in options.seeds:
        for staleness in (0, *options.staleness):
            name = mode_name(staleness)
            flags = [*mode_flags(staleness, options.at_update), "--seed", str(seed)]
            found = run([*common, *flags], folder / f"{name}-seed{seed}", options.timeout_s)
            runs.setdefault(name, []).append({"seed": seed, "flags": " ".join(flags), **found})
            progress({"mode": name, "seed": seed, **found})
        synchronous.append(folder / f"{SYNCHRONOUS}-seed{seed}")
        costs = add_predictions(runs, synchronous, options.staleness, options.at_update)
        modes = summary(runs, num_answers=long_tail.task.NUM_HELD_OUT * NUM_ANSWERS)
        yield {
            "environment": environment() | {"cores_used": len(options.cores)},
            "flags": " ".join([RUN_FLAGS, *options.flags]),
            "lengths": long_tail.quantiles(task),
            "costs": asdict(costs),
            "modes": modes,
            "missed": missed(modes),
        }
