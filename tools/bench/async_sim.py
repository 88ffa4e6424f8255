"""Predict the throughput of layouts of an online run, from measured seconds and lengths.

    python tools/bench/async_sim.py --from RUN_DIR --cards 2 8 64 --out async-sim.json
    python tools/bench/async_sim.py --from RUN_DIR RUN_DIR --measured ASYNC_DIR ASYNC_DIR --out async-sim.json
    python tools/bench/async_sim.py --decode 1:0.006 256:0.014 --train_token_s 2e-5 --length_median 256 --cards 8

`--from` derives all costs and lengths from `metrics.jsonl` and `rollouts.jsonl` of synchronous runs with the same model
and prompts, of one layout or of several, and the options override them. For each number of cards, the table compares
the synchronous run in which all cards take turns with splits into generating and training cards, synchronous and with
each `--max_staleness`.

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

from async_costs import MeasuredRun, log_normal_groups, predicted_step_s, read_checked_run, read_run, with_contention
from async_model import Costs, Layout, Prediction, simulate
from runner import write

_COSTS = (
    *("prefill_token_s", "train_batch_s", "train_token_s", "sync_s", "reward_s", "turn_s"),
    *("slowdown", "train_slowdown"),
)


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
    """Return the costs, with the slowdowns of the first asynchronous run unless they have some, and all runs.

    Each run stands beside its prediction.
    """
    runs = [read_checked_run(folder) for folder in folders]
    overlapping = [run for run in runs if run.layout.max_staleness]
    first = overlapping[0] if overlapping and costs.slowdown == costs.train_slowdown == 1 else None
    if first:
        costs = with_contention(costs, first)
    rows = []
    for folder, run in zip(folders, runs, strict=True):
        step_s = predicted_step_s(costs, run)
        figures = {"step_s": run.step_s, "num_steps": run.num_steps, "predicted_step_s": step_s}
        row = {"run": folder.name, **asdict(run.layout), **figures, "error": step_s / run.step_s - 1}
        rows.append(row | {"gave_slowdowns": run is first})
    return costs, rows


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="runs", type=Path, nargs="+", metavar="RUN_DIR", help="synchronous runs")
    parser.add_argument("--measured", type=Path, nargs="+", metavar="DIR", help="runs to compare with their prediction")
    parser.add_argument("--own_cards", action="store_true", help="the measured runs had cards for each side")
    parser.add_argument("--cards", type=int, nargs="+", default=[2])
    parser.add_argument("--staleness", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--at_update", choices=["drain", "keep", "restart"], default="keep")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch_size", type=int, help="prompts per step; default: 16 per card, or the run's")
    parser.add_argument("--batch_per_card", type=int, help="prompts per step and card, in place of --batch_size")
    parser.add_argument("--samples", type=int, default=8, help="responses per prompt, without --from")
    parser.add_argument("--slots", type=int, help="responses per engine at once; default: 256, or the run's")
    costs = parser.add_argument_group("costs, in seconds; they override those of --from")
    costs.add_argument("--decode", nargs="+", metavar="RUNNING:SECONDS", help="a decode step, by running responses")
    for name in _COSTS:
        costs.add_argument(f"--{name}", type=float)
    lengths = parser.add_argument_group("log-normal response lengths in tokens; they override those of --from")
    lengths.add_argument("--length_median", type=float)
    lengths.add_argument("--length_p99", type=float, help="default: 8 times the median")
    lengths.add_argument("--length_max", type=int, help="default: 16 times the median")
    lengths.add_argument("--prompt_tokens", type=int, default=256)
    parser.add_argument("--out", type=Path)
    return parser


def _batch_size(per_card: int | None, num_cards: int, measured: MeasuredRun | None) -> int:
    """Return the prompts per step without --batch_size."""
    if measured and not per_card:
        return measured.batch_size
    return (per_card or 16) * num_cards


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table of every number of cards, and write the report."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        predict(parser, options)
    except FileNotFoundError as error:
        parser.error(f"there is no {error.filename}\n\nhint: name the --save_path of a run")
    except ValueError as error:
        parser.error(str(error))


def predict(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Print the tables that `options` ask for, and write the report. Raises what reading the runs raises."""
    measured = read_run(*options.runs, fits_decode=not options.decode) if options.runs else None
    if not measured and not (options.decode and options.train_token_s and options.length_median):
        parser.error("without --from, --decode, --train_token_s and --length_median are needed")
    for name, needed in (("measured", "runs"), ("own_cards", "measured")):
        if getattr(options, name) and not getattr(options, needed):
            parser.error(f"--{name} needs --{'from' if needed == 'runs' else needed}")
    if options.batch_size and options.batch_per_card:
        parser.error("--batch_size and --batch_per_card exclude each other")
    given = {name: value for name in _COSTS if (value := getattr(options, name)) is not None}
    if options.decode:
        pairs = (text.split(":") for text in options.decode)
        given["decode_s"] = tuple(sorted((float(running), float(seconds)) for running, seconds in pairs))
    costs = replace(measured.costs, **given) if measured else Costs(**given)
    groups = measured.groups if measured else ()
    if options.length_median:
        groups = log_normal_groups(
            4096,
            len(groups[0].lengths) if groups else options.samples,
            prompt_tokens=options.prompt_tokens,
            median=options.length_median,
            p99=options.length_p99 or 8 * options.length_median,
            longest=options.length_max or round(16 * options.length_median),
        )
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
        base = Layout(
            slots=options.slots or (measured.slots if measured else 256),
            batch_size=options.batch_size or _batch_size(options.batch_per_card, num_cards, measured),
            at_update=options.at_update,
        )
        rows = [
            (each, simulate(costs, each, groups, options.steps)) for each in layouts(num_cards, base, options.staleness)
        ]
        print(f"{num_cards} cards, {base.batch_size} prompts x {len(groups[0].lengths)} responses per step")
        print(table(rows), end="\n\n")
        report["layouts"][str(num_cards)] = [asdict(layout) | found.figures() for layout, found in rows]
    if options.out:
        write(options, "async_sim", report)


if __name__ == "__main__":
    main()
