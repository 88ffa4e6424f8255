"""Draw the SVG pictures of the pages.

    rlhf ppo --seed 1 --save_path outputs/ppo 2>&1 | tee ppo.log
    python tools/bench/pictures.py --log ppo.log --run outputs/ppo --command "rlhf ppo --seed 1" --out docs/images
    python tools/bench/pictures.py --two_sides tools/bench/results/two-sides-cpu.json --out docs/images

`--log` and `--command` give the terminal's output, shortened, `--run` the learning curve, and `--two_sides` what
generation and learner do at each moment. Each picture is drawn if its input is given.
"""

import argparse
import io
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from rich.console import Console
from rich.text import Text

from runner import read_lines

SHOWN_STEPS = (1, 2, 3, 4, 5, 10, 20, 30, 40)
# Beginnings of lines that the picture leaves out: samples, notices and progress.
LEFT_OUT = (
    "Held-out samples",
    "  1.",
    "  2.",
    "  3.",
    "     prompt",
    "     response",
    "notice:",
    "checking",
    "starting",
)
COLORS = {"generating": "#4c78a8", "training": "#e45756", "weights": "#54a24b", "other": "#bab0ac"}
SIDES = ("generation", "learner")
WINDOW_S = 8.0  # of each run that `--two_sides` shows

_ESCAPE = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")
_SPINNER = re.compile(r"[\u2800-\u28ff]")
_STEP = re.compile(r"\s*(\d+)/\d+ ")
_HEADER = re.compile(r"\s*step +reward ")
# The SVG of a terminal without a window around it, and without rich's fonts, which a page would load from elsewhere.
_TERMINAL = """\
<svg viewBox="0 0 {terminal_width} {terminal_height}" xmlns="http://www.w3.org/2000/svg">
<style>.{unique_id}-matrix {{ font-family: monospace; font-size: {char_height}px; }}
{styles}</style>
<defs>{lines}</defs>
<rect width="100%" height="100%" fill="#1e1e1e"/>
{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g>
</svg>
"""


def shown_lines(log: str) -> list[str]:
    """Return the lines of a terminal log that the picture shows: no spinners, no samples, and only `SHOWN_STEPS`."""
    lines: list[str] = []
    for raw in log.splitlines():
        # A live line is written again and again after a carriage return; only what was written last remains visible.
        parts = [part for part in _ESCAPE.sub("", raw).split("\r") if part.strip() and not _SPINNER.match(part)]
        line = parts[-1].rstrip() if parts else ""
        step = _STEP.match(line)
        is_repeated_header = _HEADER.match(line) and any(_HEADER.match(shown) for shown in lines)
        if not line or line.startswith(LEFT_OUT) or is_repeated_header:
            continue
        if step is None or int(step[1]) in SHOWN_STEPS:
            lines.append(line)
    return lines


def terminal(lines: Sequence[str]) -> str:
    """Return a picture of a terminal with these lines. Results of evaluations stand out."""
    console = Console(record=True, file=io.StringIO(), width=max(map(len, lines)), color_system="truecolor")
    for line in lines:
        console.print(Text(line, "bold green" if "held-out accuracy" in line else ""))
    return console.export_svg(code_format=_TERMINAL, unique_id="terminal")


def curve(rewards: Sequence[tuple[int, float]], held_out: Sequence[tuple[int, float]]) -> Figure:
    """Return a picture of the mean training reward per step as a line, and of held-out accuracy as dots."""
    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.plot(*zip(*rewards, strict=True), color="#4c78a8", label="mean training reward")
    axes.plot(*zip(*held_out, strict=True), "o", color="#e45756", label="held-out accuracy")
    for step, value in held_out:
        axes.annotate(f"{value:.2f}", (step, value), (0, -14), textcoords="offset points", ha="center")
    axes.set(xlabel="step", ylim=(0, 1.05))
    axes.grid(axis="y", alpha=0.4)
    axes.legend(loc="lower right")
    return figure


def two_sides(runs: Sequence[Mapping[str, Any]]) -> Figure:
    """Return a picture with two lanes per run, generation and learner, over its first `WINDOW_S` seconds."""
    figure = Figure(figsize=(8.2, 0.6 + 1.2 * len(runs)), layout="constrained")
    for axes, run in zip(figure.subplots(len(runs), sharex=True, squeeze=False)[:, 0], runs, strict=True):
        axes.set_title(run["name"], loc="left", fontsize=10)
        axes.set(xlim=(0, WINDOW_S), ylim=(2, 0), yticks=[0.5, 1.5], yticklabels=SIDES)
        for lane, side in enumerate(SIDES):
            for what, color in COLORS.items():
                spans = [(begin, end - begin) for begin, end, kind in run[side] if kind == what]
                axes.broken_barh(spans, (lane + 0.05, 0.9), color=color)
        axes.vlines(run["steps"], 0, 2, color="black", linewidth=1)
    axes.set_xlabel("seconds")
    figure.legend(
        [Patch(color=color) for color in COLORS.values()], COLORS, loc="outside upper right", ncols=len(COLORS)
    )
    return figure


def as_svg(figure: Figure) -> str:
    """Return a figure as SVG, with its texts as text, and without the date."""
    written = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "pictures", "font.family": "sans-serif"}):
        figure.savefig(written, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return "".join(f"{line.rstrip()}\n" for line in written.getvalue().splitlines())


def main(argv: Sequence[str] | None = None) -> None:
    """Draw what the flags ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--log", type=Path, help="what a run wrote to the terminal")
    parser.add_argument("--command", default="rlhf ppo", help="what was typed for it")
    parser.add_argument("--run", type=Path, help="its --save_path")
    parser.add_argument("--two_sides", type=Path, metavar="REPORT", help="report of the benchmark of this name")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    options = parser.parse_args(argv)
    pictures = {}
    if options.log:
        lines = shown_lines(options.log.read_text(encoding="utf-8"))
        pictures["terminal"] = terminal([f"$ {options.command}", *lines])
    if options.run:
        records = read_lines(options.run / "metrics.jsonl")
        rewards = [(record["step"], record["rollout/reward"]) for record in records if "rollout/reward" in record]
        held_out = [(record["step"], record["eval/accuracy"]) for record in records if "eval/accuracy" in record]
        pictures["learning"] = as_svg(curve(rewards, held_out))
    if options.two_sides:
        runs = json.loads(options.two_sides.read_text(encoding="utf-8"))["runs"]
        pictures["two-sides"] = as_svg(two_sides(runs))
    options.out.mkdir(parents=True, exist_ok=True)
    for name, picture in pictures.items():
        (options.out / f"{name}.svg").write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
