"""The inputs of `async_sim`: what an online run costs, and how long its responses are."""

import itertools
import json
import math
import random
import re
import statistics
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from async_model import AtUpdate, Costs, Group, Layout, simulate

_LEAST_SPREAD = 1.1  # between the most and the fewest decode steps of a step
WARM_UP = 2  # steps at the start of a run that load and compile
_NOT_TRAINING = ("generate", "reward", "sync", "evaluate", "save", "checkpoint", "step")  # phases of a step


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """What a synchronous run says about its costs.

    Attributes:
        costs: fitted to the seconds of its steps.
        steps: the groups of each step, in the order of the batch.
        num_engines, slots, batch_size: sizes of the run.
    """

    costs: Costs
    steps: tuple[tuple[Group, ...], ...]
    num_engines: int
    slots: int
    batch_size: int

    @property
    def groups(self) -> list[Group]:
        """The groups of all steps."""
        return list(itertools.chain.from_iterable(self.steps))


@dataclass(frozen=True, slots=True)
class AsyncRun:
    """What an asynchronous run reached, and by which rules.

    Attributes:
        step_s: mean seconds of its steps after the first `WARM_UP` ones.
        num_steps, max_staleness, at_update: of the run.
        groups: in the order of admission.
        trained: (tokens, seconds of training) of these steps, without the last one.
    """

    step_s: float
    num_steps: int
    max_staleness: int
    at_update: AtUpdate
    groups: tuple[Group, ...]
    trained: tuple[tuple[int, float], ...]


def log_normal_groups(
    number: int, samples: int, *, prompt_tokens: int, median: float, p99: float, longest: int, seed: int = 0
) -> list[Group]:
    """Return groups whose response lengths in tokens are log-normal, up to `longest`, each drawn by itself."""
    rng = random.Random(seed)
    sigma = math.log(p99 / median) / statistics.NormalDist().inv_cdf(0.99)

    def length() -> int:
        return min(max(round(rng.lognormvariate(math.log(median), sigma)), 1), longest)

    return [Group(prompt_tokens, tuple(length() for _ in range(samples))) for _ in range(number)]


def read_groups(path: Path) -> dict[int, dict[str, Group]]:
    """Return the trained groups of each step by their ids from a `rollouts.jsonl`, in the order of the file."""
    lengths: dict[tuple[int, str], list[tuple[int, int]]] = defaultdict(list)
    with path.open(encoding="utf-8") as lines:
        for record in map(json.loads, lines):
            if record.get("kept", True):
                asked = sum(span["num_tokens"] for span in record["spans"] if span["source"] == "prompt")
                lengths[record["step"], record["group_id"]].append((asked, len(record["token_ids"]) - asked))
    steps: dict[int, dict[str, Group]] = defaultdict(dict)
    for (step, group_id), pairs in lengths.items():
        steps[step][group_id] = Group(pairs[0][0], tuple(answered for _, answered in pairs))
    return dict(steps)


def num_tokens(groups: Iterable[Group]) -> int:
    """Return the tokens of all prompts and responses, with a prompt for each response."""
    return sum(len(group.lengths) * group.prompt_tokens + sum(group.lengths) for group in groups)


def fit(columns: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Return the coefficients, none of them negative, with which the columns come closest to `seconds`.

    Least squares over every choice of columns; a column that is left out has the coefficient 0.
    """
    x, y = np.array(columns, dtype=float).T, np.array(seconds, dtype=float)
    best = [0.0] * x.shape[1]
    best_error = float(y @ y)
    for size in range(1, x.shape[1] + 1):
        for chosen in itertools.combinations(range(x.shape[1]), size):
            found = np.linalg.lstsq(x[:, chosen], y, rcond=None)[0]
            error = float(((x[:, chosen] @ found - y) ** 2).sum())
            if min(found) >= 0 and error < best_error * (1 - 1e-9):
                best_error = error
                best = [0.0] * x.shape[1]
                for column, value in zip(chosen, found, strict=True):
                    best[column] = float(value)
    return best


def decode_steps(groups: Sequence[Group], num_engines: int, slots: int) -> float:
    """Return how many decode steps the slowest engine makes for these groups, which all wait at the start."""
    unit = Costs(decode_s=((1, 1.0),), train_token_s=0.0)
    return simulate(unit, Layout(num_engines=num_engines, slots=slots, batch_size=len(groups)), groups, 1).seconds


def read_async_run(folder: Path) -> AsyncRun:
    """Return what the run whose --save_path is `folder` reached."""
    config = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))["asynchrony"]
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [line for line in map(json.loads, lines) if "time/step" in line]
    by_step = read_groups(folder / "rollouts.jsonl")
    by_id = {group_id: group for found in by_step.values() for group_id, group in found.items()}
    admitted = sorted(by_id, key=lambda group_id: [int(number) for number in re.findall(r"\d+", group_id)])
    used = steps[WARM_UP:]
    return AsyncRun(
        step_s=statistics.fmean(line["time/step"] for line in used),
        num_steps=len(steps),
        max_staleness=config["max_staleness"],
        at_update=config["at_update"],
        groups=tuple(by_id[group_id] for group_id in admitted),
        # At the last step nothing generates any more.
        trained=tuple((num_tokens(by_step[line["step"]].values()), _training_seconds(line)) for line in used[:-1]),
    )


def predicted_step_s(costs: Costs, run: MeasuredRun, other: AsyncRun) -> float:
    """Return the mean seconds of the steps of `other` after its first ones, from its lengths and the sizes of `run`."""
    layout = Layout(
        num_engines=run.num_engines, slots=run.slots, batch_size=run.batch_size,
        max_staleness=other.max_staleness, at_update=other.at_update,
    )  # fmt: skip
    ends = simulate(costs, layout, other.groups, other.num_steps).ends
    return (ends[-1] - ends[WARM_UP - 1]) / (len(ends) - WARM_UP)


def with_contention(costs: Costs, run: MeasuredRun, other: AsyncRun) -> Costs:
    """Return the costs with both slowdowns of sides that share a card, as `other` shows them.

    That of training is its seconds over those of `costs`; that of generation is the one from 1 to 3 with which the
    prediction of a step is closest.
    """
    alone = sum(costs.train_batch_s + costs.train_token_s * tokens for tokens, _ in other.trained)
    train_slowdown = max(sum(seconds for _, seconds in other.trained) / alone, 1.0)
    candidates = [
        replace(costs, train_slowdown=train_slowdown, slowdown=1 + hundredths / 100) for hundredths in range(0, 201, 2)
    ]
    return min(candidates, key=lambda candidate: abs(predicted_step_s(candidate, run, other) - other.step_s))


def read_run(*folders: Path, skip: int = WARM_UP, fits_decode: bool = True) -> MeasuredRun:
    """Return the costs and lengths of a synchronous run, or of several with the same sizes.

    A step's generation is fitted as a part per prompt token, one per decode step and one per response token; all other
    phases but the weight sync as a constant and a part per token of the batch.

    Args:
        folders: their --save_path.
        skip: steps at the start of each that warm up and are left out of the fit.
        fits_decode: whether the seconds of decode steps are needed from the fit.

    Raises:
        ValueError: there are too few steps for a fit, or their numbers of decode steps hardly differ.
    """
    config = tomllib.loads((folders[0] / "config.toml").read_text(encoding="utf-8"))
    num_engines, slots = config["engine"]["vllm_num_engines"], config["engine"]["vllm_max_num_seqs"]
    work: list[list[Group]] = []
    used: list[tuple[list[Group], dict[str, Any]]] = []
    for folder in folders:
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        steps = [line for line in map(json.loads, lines) if "time/step" in line]
        found = read_groups(folder / "rollouts.jsonl")
        groups = {step: list(by_id.values()) for step, by_id in found.items()}
        work += [groups[step["step"]] for step in steps if step["step"] in groups]
        used += [(groups[step["step"]], step) for step in steps[skip:] if step["step"] in groups]
    if len(used) < 4:
        raise ValueError(f"{folders[0]} has {len(used)} steps after the first {skip}; a fit needs at least 4")
    prompts = [sum(group.prompt_tokens for group in step) for step, _ in used]
    answers = [sum(sum(group.lengths) for group in step) for step, _ in used]
    tokens = [num_tokens(step) for step, _ in used]
    iterations = [decode_steps(step, num_engines, slots) for step, _ in used]
    if fits_decode and max(iterations) < _LEAST_SPREAD * min(iterations):
        spread = f"{min(iterations):.0f} to {max(iterations):.0f} decode steps per step"
        raise ValueError(
            f"{folders[0]} has {spread}, too little difference to tell the seconds of a decode step from those of a"
            " token: allow longer responses, so that the longest one differs, or measure decode steps and give --decode"
        )
    per_prompt_token, per_step, per_token = fit(
        [prompts, iterations, answers], [line["time/generate"] + line.get("time/reward", 0.0) for _, line in used]
    )
    per_batch, per_trained_token = fit([[1.0] * len(used), tokens], [_training_seconds(line) for _, line in used])
    # An engine that decodes n responses makes n tokens in a step.
    per_token *= num_engines
    return MeasuredRun(
        costs=Costs(
            decode_s=((1, per_step + per_token), (slots, per_step + per_token * slots)),
            train_token_s=per_trained_token,
            train_batch_s=per_batch,
            prefill_token_s=per_prompt_token * num_engines,
            sync_s=statistics.median(line.get("time/sync", 0.0) for _, line in used),
        ),
        steps=tuple(tuple(step) for step in work),
        num_engines=num_engines,
        slots=slots,
        batch_size=config["rollout"]["rollout_batch_size"],
    )


def _training_seconds(step: dict[str, Any]) -> float:
    """Return the seconds of all phases of a step in which the learner would work beside generation."""
    phases = {name.removeprefix("time/"): value for name, value in step.items() if name.startswith("time/")}
    return sum(value for name, value in phases.items() if name not in _NOT_TRAINING)
