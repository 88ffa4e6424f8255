"""Predict the throughput of layouts of an online run, from measured seconds and lengths.

    python tools/bench/async_sim.py --from RUN_DIR --cards 2 8 64 --out async-sim.json
    python tools/bench/async_sim.py --from RUN_DIR RUN_DIR --measured ASYNC_DIR ASYNC_DIR --out async-sim.json

All costs and lengths come from `metrics.jsonl` and `rollouts.jsonl` of synchronous runs with the same model and
prompts, of one layout or of several. For each number of cards, the table compares the synchronous run in which all
cards take turns with splits into generating and training cards, synchronous and with each `--max_staleness`.

`--measured` names further runs, which stand beside their prediction. By how much generation and training that go on at
the same time are slower is taken from the first asynchronous one, and the others test the prediction. The table has
cards for each side: it leaves this slowdown out, unless the measured runs had such cards as well (`--own_cards`).
Requests that go on at an update need `--keep_kv`: what it costs to compute their states again is not simulated.
`async_model.py` says what is.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from async_costs import predicted_step_s, read_checked_run, read_run, with_contention
from async_model import Costs, Layout, Prediction, simulate
from runner import arguments, write


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


def table(predictions: Sequence[tuple[Layout, Prediction]]) -> str:
    """Return lines of text, one per layout, with the throughput relative to the best synchronous layout."""
    best = max(prediction.samples_per_s for layout, prediction in predictions if not layout.max_staleness)
    lines = ["generate  train  staleness  samples/s  x sync  s/step  idle: generate  train  mean staleness"]
    for layout, found in predictions:
        cards = f"{'in turn':>8} {layout.num_trainers:6}" if layout.shared else None
        cards = cards or f"{layout.num_engines:8} {layout.num_trainers:6}"
        idle = f"{found.generation_idle:13.0%} {found.training_idle:7.0%}"
        rate = f"{found.samples_per_s:10.2f} {found.samples_per_s / best:7.2f} {found.step_s:7.2f}"
        lines.append(f"{cards} {layout.max_staleness:10} {rate} {idle:>20} {found.staleness_mean:15.2f}")
    return "\n".join(lines)


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
    return costs, rows


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table of every number of cards, and write the report."""
    parser = arguments(
        __doc__,
        own_cards=(False, "the measured runs had cards for each side"),
        cards=[2],
        staleness=[1, 4],
        steps=100,
        batch_per_card=(int, "prompts per step and card; default: the prompts per step of the run"),
    )
    parser.add_argument("--from", dest="runs", type=Path, nargs="+", required=True, help="synchronous runs")
    parser.add_argument("--measured", type=Path, nargs="+", help="runs to compare with their prediction")
    parser.add_argument("--at_update", choices=["drain", "keep", "restart"], default="keep")
    options = parser.parse_args(argv)
    if options.own_cards and not options.measured:
        parser.error("--own_cards needs --measured")
    try:
        predict(options)
    except FileNotFoundError as error:
        parser.error(f"there is no {error.filename}\n\nhint: name the --save_path of a run")
    except ValueError as error:
        parser.error(str(error))


def predict(options: argparse.Namespace) -> None:
    """Print the tables that `options` ask for, and write the report. Raises what reading the runs raises."""
    measured = read_run(*options.runs)
    costs, groups = measured.costs, measured.groups
    report: dict[str, Any] = {"layouts": {}}
    if options.measured:
        overlapping, report["measured"] = check(costs, options.measured)
        report["slowdowns"] = {"generation": overlapping.slowdown, "training": overlapping.train_slowdown}
        if options.own_cards:
            costs = overlapping
        for row in report["measured"]:
            print(
                f"{row['run']}: {row['step_s']:.2f} s per step, predicted {row['predicted_step_s']:.2f} s"
                f" ({row['error']:+.0%})"
            )
    report["costs"] = asdict(costs)
    for num_cards in options.cards:
        per_card = options.batch_per_card
        base = Layout(
            slots=measured.slots,
            batch_size=per_card * num_cards if per_card else measured.batch_size,
            at_update=options.at_update,
        )
        rows = [
            (each, simulate(costs, each, groups, options.steps)) for each in layouts(num_cards, base, options.staleness)
        ]
        print(f"{num_cards} cards, {base.batch_size} prompts x {len(groups[0].lengths)} responses per step")
        print(table(rows), end="\n\n")
        report["layouts"][str(num_cards)] = [asdict(layout) | found.figures() for layout, found in rows]
    write(options, "async_sim", report)


if __name__ == "__main__":
    main()
