"""Throughput of layouts of an online run as the simulator predicts it, from measured seconds and lengths.

    python tools/bench/run.py async_sim --from RUN_DIR --cards 2 8 64 --out async-sim.json
    python tools/bench/run.py async_sim --from RUN_DIR RUN_DIR --measured ASYNC_DIR ASYNC_DIR --out async-sim.json

All costs and lengths come from `metrics.jsonl` and `rollouts.jsonl` of synchronous runs with the same model and
prompts, of one layout or of several. For each number of cards, the report compares the synchronous run in which all
cards take turns with splits into generating and training cards, synchronous and with each `--max_staleness`.

`--measured` names further runs, which stand beside their prediction. By how much generation and training that go on at
the same time are slower is taken from the first asynchronous one, and the others test the prediction. The layouts have
cards for each side: they leave this slowdown out, unless the measured runs had such cards as well (`--own_cards`).
Requests that go on at an update need `--keep_kv`: what it costs to compute their states again is not simulated.
`sim/model.py` says what is.
"""

from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from runner import UsageError, progress
from sim.costs import predicted_step_s, read_checked_run, read_run, with_contention
from sim.model import Costs, Layout, simulate

FLAGS = {
    "from": {"dest": "runs", "type": Path, "nargs": "+", "required": True, "help": "synchronous runs"},
    "measured": {"type": Path, "nargs": "+", "default": [], "help": "runs to compare with their prediction"},
    "own_cards": (False, "the measured runs had cards for each side"),
    "cards": [2],
    "staleness": [1, 4],
    "steps": 100,
    "batch_per_card": (int, "prompts per step and card; default: the prompts per step of the run"),
    "at_update": {"choices": ["drain", "keep", "restart"], "default": "keep"},
}


def layouts(num_cards: int, base: Layout, stalenesses: Sequence[int]) -> list[Layout]:
    """Return the layouts of so many cards: all in turn, and each split into eighths at every staleness.

    `base` gives the slots, the batch size and what happens at an update.
    """
    both = replace(base, num_engines=num_cards, num_trainers=num_cards, max_staleness=0, at_update="drain", shared=True)
    shares = sorted({min(max(round(num_cards * eighth / 8), 1), num_cards - 1) for eighth in range(1, 8)} - {0})
    return [both] + [
        replace(base, num_engines=share, num_trainers=num_cards - share, max_staleness=staleness)
        for share in shares
        for staleness in sorted({0, *stalenesses})
    ]


def check(costs: Costs, folders: Sequence[Path]) -> tuple[Costs, list[dict[str, Any]]]:
    """Return the costs, with the slowdowns of the first asynchronous run, and all runs.

    Each run stands beside its prediction.
    """
    runs = [read_checked_run(folder) for folder in folders]
    overlapping = [run for run in runs if run.layout.max_staleness]
    first = overlapping[0] if overlapping else None
    if first:
        costs = with_contention(costs, first)
    rows = []
    for folder, run in zip(folders, runs, strict=True):
        step_s = predicted_step_s(costs, run)
        figures = {"step_s": run.step_s, "num_steps": run.num_steps, "predicted_step_s": step_s}
        row = {"run": folder.name, **asdict(run.layout), **figures, "error": step_s / run.step_s - 1}
        rows.append(row | {"gave_slowdowns": run is first})
        progress(rows[-1])
    return costs, rows


def measure(options: Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Predict all layouts of every number of cards, and the measured runs."""
    if options.own_cards and not options.measured:
        raise UsageError("--own_cards needs --measured")
    try:
        yield predict(options)
    except FileNotFoundError as error:
        raise UsageError(f"there is no {error.filename}\n\nhint: name the --save_path of a run") from None
    except ValueError as error:
        raise UsageError(str(error)) from None


def predict(options: Namespace) -> dict[str, Any]:
    """Return the report. Raises what reading the runs raises."""
    measured = read_run(*options.runs)
    costs, groups = measured.costs, measured.groups
    overlapping, rows = check(costs, options.measured)
    report: dict[str, Any] = {"layouts": {}}
    if rows:
        report["measured"] = rows
        report["slowdowns"] = {"generation": overlapping.slowdown, "training": overlapping.train_slowdown}
    if options.own_cards:
        costs = overlapping
    report["costs"] = asdict(costs)
    for num_cards in options.cards:
        per_card = options.batch_per_card
        base = Layout(
            slots=measured.slots,
            batch_size=per_card * num_cards if per_card else measured.batch_size,
            at_update=options.at_update,
        )
        found = report["layouts"][str(num_cards)] = []
        for layout in layouts(num_cards, base, options.staleness):
            found.append(asdict(layout) | simulate(costs, layout, groups, options.steps).figures())
            progress({"cards": num_cards} | found[-1])
    return report
