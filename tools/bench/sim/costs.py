"""The inputs of the simulator: what an online run costs, and how long its responses are."""

import itertools
import re
import statistics
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from runner import read_lines
from sim.model import Costs, Group, Layout, simulate

_LEAST_SPREAD = 1.1  # between the most and the fewest decode steps of a step
_LEAST_PROMPT_SPREAD = 1.5  # between the most and the fewest prompt tokens per response token
WARM_UP = 2  # steps at the start of a run that load and compile
_TURNS = ("offload", "reload", "sleep", "wake")  # phases of a step in which engines and trainers change places
_NOT_TRAINING = ("generate", "reward", "sync", "evaluate", "save", "checkpoint", "step", *_TURNS)


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """What a synchronous run says about its costs.

    Attributes:
        costs: fitted to the seconds of its steps.
        steps: the groups of each step, in the order of the batch.
        num_engines, slots, batch_size: sizes of the run, of the first one if there are several.
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
class CheckedRun:
    """A run that is compared with its prediction.

    Attributes:
        layout: of the run.
        step_s: mean seconds of its steps after the first `WARM_UP` ones.
        num_steps: of the run.
        groups: in the order of admission.
        trained: (tokens, seconds of training) of these steps, without the last one.
    """

    layout: Layout
    step_s: float
    num_steps: int
    groups: tuple[Group, ...]
    trained: tuple[tuple[int, float], ...]


def read_groups(path: Path) -> dict[int, dict[str, Group]]:
    """Return the trained groups of each step by their ids from a `rollouts.jsonl`, in the order of the file."""
    steps: dict[int, dict[str, Group]] = defaultdict(dict)
    for record in read_lines(path):
        if record.get("kept", True):
            asked = sum(span["num_tokens"] for span in record["spans"] if span["source"] == "prompt")
            groups = steps[record["step"]]
            first = groups.get(record["group_id"], Group(asked, ()))
            groups[record["group_id"]] = Group(first.prompt_tokens, (*first.lengths, len(record["token_ids"]) - asked))
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
    unit = Costs(decode_step_s=1.0)
    return simulate(unit, Layout(num_engines=num_engines, slots=slots, batch_size=len(groups)), groups, 1).seconds


def read_layout(folder: Path) -> Layout:
    """Return the layout of the run in a folder. Without a placement there is one trainer.

    No layout is `shared`, because the costs leave out the time in which engines and trainers change places.
    """
    config = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
    placement = config.get("placement", {})
    asynchrony = config.get("asynchrony", {})
    is_asynchronous = asynchrony.get("async_train", False)
    return Layout(
        num_engines=config["engine"]["vllm_num_engines"],
        num_trainers=placement.get("actor_num_nodes", 1) * placement.get("actor_num_gpus_per_node", 1),
        slots=config["engine"]["vllm_max_num_seqs"],
        batch_size=config["rollout"]["rollout_batch_size"],
        max_staleness=asynchrony["max_staleness"] if is_asynchronous else 0,
        at_update=asynchrony["at_update"] if is_asynchronous else "drain",
    )


def read_checked_run(folder: Path) -> CheckedRun:
    """Return what the run whose --save_path is `folder` reached.

    Raises:
        ValueError: it has no step after those that warm up.
    """
    steps = _read_steps(folder)
    if len(steps) <= WARM_UP:
        raise ValueError(
            f"{folder} has {len(steps)} steps; a comparison leaves out the first {WARM_UP}: run more steps"
        )
    by_step = read_groups(folder / "rollouts.jsonl")
    by_id = {group_id: group for found in by_step.values() for group_id, group in found.items()}
    admitted = sorted(by_id, key=lambda group_id: [int(number) for number in re.findall(r"\d+", group_id)])
    used = steps[WARM_UP:]
    return CheckedRun(
        layout=read_layout(folder),
        step_s=statistics.fmean(line["time/step"] for line in used),
        num_steps=len(steps),
        groups=tuple(by_id[group_id] for group_id in admitted),
        # At the last step nothing generates any more.
        trained=tuple((num_tokens(by_step[line["step"]].values()), _training_seconds(line)) for line in used[:-1]),
    )


def predicted_step_s(costs: Costs, run: CheckedRun) -> float:
    """Return the mean seconds of the steps of a run after its first ones, from its lengths and its layout."""
    ends = simulate(costs, run.layout, run.groups, run.num_steps).ends
    return (ends[-1] - ends[WARM_UP - 1]) / (len(ends) - WARM_UP)


def with_contention(costs: Costs, run: CheckedRun) -> Costs:
    """Return the costs with both slowdowns of sides that work at the same time, as an asynchronous run shows them.

    That of training is its seconds over those of `costs`; that of generation is the one from 1 to 3 with which the
    prediction of a step is closest.
    """
    cards = run.layout.num_trainers
    alone = sum(costs.train_batch_s + costs.train_token_s * tokens / cards for tokens, _ in run.trained)
    train_slowdown = max(sum(seconds for _, seconds in run.trained) / alone, 1.0)
    candidates = [
        replace(costs, train_slowdown=train_slowdown, slowdown=1 + hundredths / 100) for hundredths in range(0, 201, 2)
    ]
    return min(candidates, key=lambda candidate: abs(predicted_step_s(candidate, run) - run.step_s))


def read_run(*folders: Path, skip: int = WARM_UP) -> MeasuredRun:
    """Return the costs and lengths of a synchronous run, or of several with the same model and prompts.

    An engine's generation in a step is fitted as a part per prompt token, one per decode step and one per response
    token; all other phases but the weight sync as a constant and a part per token of a trainer. Runs of several layouts
    tell parts apart that grow together in each single one. Where prompt tokens grow with response tokens in all steps,
    they count as part of these.

    Args:
        folders: their --save_path.
        skip: steps at the start of each that warm up and are left out of the fit.

    Raises:
        ValueError: there are too few steps for a fit, their numbers of decode steps hardly differ, or engines have
            different numbers of slots.
    """
    layouts = [read_layout(folder) for folder in folders]
    if len({layout.slots for layout in layouts}) > 1:
        raise ValueError(
            f"the engines have {', '.join(str(layout.slots) for layout in layouts)} slots, and not the same"
        )
    work: list[list[Group]] = []
    used: list[tuple[Layout, list[Group], dict[str, Any]]] = []
    for folder, layout in zip(folders, layouts, strict=True):
        steps = _read_steps(folder)
        found = read_groups(folder / "rollouts.jsonl")
        groups = {step: list(by_id.values()) for step, by_id in found.items()}
        work += [groups[step["step"]] for step in steps if step["step"] in groups]
        used += [(layout, groups[step["step"]], step) for step in steps[skip:] if step["step"] in groups]
    if len(used) < 4:
        raise ValueError(f"{folders[0]} has {len(used)} steps after the first {skip}; a fit needs at least 4")
    # Of one engine and one trainer.
    prompts = [sum(group.prompt_tokens for group in step) / layout.num_engines for layout, step, _ in used]
    answers = [sum(sum(group.lengths) for group in step) / layout.num_engines for layout, step, _ in used]
    tokens = [num_tokens(step) / layout.num_trainers for layout, step, _ in used]
    iterations = [decode_steps(step, layout.num_engines, layout.slots) for layout, step, _ in used]
    if max(iterations) < _LEAST_SPREAD * min(iterations):
        spread = f"{min(iterations):.0f} to {max(iterations):.0f} decode steps per step"
        raise ValueError(
            f"{folders[0]} has {spread}, too little difference to tell the seconds of a decode step from those of a"
            " token: allow longer responses, so that the longest one differs"
        )
    ratios = [prompt / max(answer, 1) for prompt, answer in zip(prompts, answers, strict=True)]
    if max(ratios) < _LEAST_PROMPT_SPREAD * min(ratios):
        prompts = [0.0] * len(used)
    per_prompt_token, per_step, per_token = fit(
        [prompts, iterations, answers], [line["time/generate"] + line.get("time/reward", 0.0) for _, _, line in used]
    )
    per_batch, per_trained_token = fit([[1.0] * len(used), tokens], [_training_seconds(line) for _, _, line in used])
    return MeasuredRun(
        # An engine that decodes n responses makes n tokens in a step.
        costs=Costs(
            decode_step_s=per_step,
            decode_token_s=per_token,
            train_token_s=per_trained_token,
            train_batch_s=per_batch,
            prefill_token_s=per_prompt_token,
            sync_s=statistics.median(line.get("time/sync", 0.0) for _, _, line in used),
        ),
        steps=tuple(tuple(step) for step in work),
        num_engines=layouts[0].num_engines,
        slots=layouts[0].slots,
        batch_size=layouts[0].batch_size,
    )


def _read_steps(folder: Path) -> list[dict[str, Any]]:
    """Return the metrics of a run's steps."""
    return [line for line in read_lines(folder / "metrics.jsonl") if "time/step" in line]


def _training_seconds(step: dict[str, Any]) -> float:
    """Return the seconds of all phases of a step in which the learner would work beside generation."""
    phases = {name.removeprefix("time/"): value for name, value in step.items() if name.startswith("time/")}
    return sum(value for name, value in phases.items() if name not in _NOT_TRAINING)
