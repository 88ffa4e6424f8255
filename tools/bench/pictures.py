"""Draw the SVG pictures of the pages.

    rlhf ppo --seed 1 --save_path outputs/ppo 2>&1 | tee ppo.log
    python tools/bench/pictures.py --log ppo.log --run outputs/ppo --command "rlhf ppo --seed 1" --out docs/images
    python tools/bench/pictures.py --two_sides tools/bench/results/two-sides-cpu.json --out docs/images

`--log` and `--command` give the terminal's output, shortened, `--run` the learning curve, and `--two_sides` what
generation and learner do at each moment. Each picture is drawn if its input is given.
"""

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

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
WINDOW_S = 8.0  # of each run that `--two_sides` shows

_ESCAPE = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")
_SPINNER = re.compile(r"[\u2800-\u28ff]")
_STEP = re.compile(r"\s*(\d+)/\d+ ")
_HEADER = re.compile(r"\s*step +reward ")
_LINE_HEIGHT, _CHARACTER_WIDTH = 18, 7.85


class Svg:
    """A picture that grows. Attributes of elements have `_` in place of `-`; numbers get one decimal."""

    def __init__(self, width: float, height: float, font: str = "sans-serif", background: str = "white") -> None:
        self._parts: list[str] = []
        self._size = f'viewBox="0 0 {width:.0f} {height:.0f}"'
        self._font = font
        self.add("rect", width=width, height=height, fill=background)

    def add(self, tag: str, content: str | None = None, **attributes: Any) -> None:
        """Add an element, with text in it if `content` is given."""
        shown = {name: f"{value:.1f}" if isinstance(value, float) else value for name, value in attributes.items()}
        words = " ".join([tag, *(f'{name.replace("_", "-")}="{value}"' for name, value in shown.items())])
        self._parts.append(f"<{words}/>" if content is None else f"<{words}>{escape(content)}</{tag}>")

    def text(self, x: float, y: float, content: str, size: int = 12, **attributes: Any) -> None:
        """Add a text at its left end, or elsewhere by `text_anchor`."""
        self.add("text", content, x=x, y=y, font_size=size, **attributes)

    def __str__(self) -> str:
        head = f'<svg {self._size} xmlns="http://www.w3.org/2000/svg" font-family="{self._font}">'
        return "\n".join([head, *self._parts, "</svg>\n"])


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
    width = 20 + max(map(len, lines)) * _CHARACTER_WIDTH
    svg = Svg(width, 20 + len(lines) * _LINE_HEIGHT, "monospace", "#1e1e1e")
    for index, line in enumerate(lines):
        style = {"fill": "#d4d4d4"}
        if "held-out accuracy" in line:
            style = {"fill": "#8fd18f", "font_weight": "bold"}
        # A fixed length aligns the columns whatever font the reader's browser has.
        length = len(line) * _CHARACTER_WIDTH
        svg.text(10, 24 + index * _LINE_HEIGHT, line, 13, textLength=length, **{"xml:space": "preserve"}, **style)
    return str(svg)


def curve(rewards: Sequence[tuple[int, float]], held_out: Sequence[tuple[int, float]]) -> str:
    """Return a picture of the mean training reward per step as a line, and of held-out accuracy as dots."""
    width, height, left, bottom = 640, 300, 50, 40
    last = max(step for step, _ in [*rewards, *held_out])
    svg = Svg(width, height)

    def x(step: float) -> float:
        return left + step / last * (width - left - 20)

    def y(value: float) -> float:
        return height - bottom - value * (height - bottom - 20)

    for value in (0.0, 0.25, 0.5, 0.75, 1.0):
        svg.add("line", x1=x(0), y1=y(value), x2=x(last), y2=y(value), stroke="#ddd")
        svg.text(left - 8, y(value), f"{value:g}", text_anchor="end", dy=4)
    for step in range(0, last + 1, 10):
        svg.text(x(step), height - 22, str(step), text_anchor="middle")
    points = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in rewards)
    svg.add("polyline", points=points, fill="none", stroke="#4c78a8", stroke_width=2)
    for step, value in held_out:
        svg.add("circle", cx=x(step), cy=y(value), r=5, fill="#e45756")
        svg.text(x(step), y(value), f"{value:.2f}", text_anchor="middle", dy=20)
    svg.text(width / 2, height - 5, "step (line: mean training reward; dots: held-out accuracy)", text_anchor="middle")
    return str(svg)


def two_sides(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return a picture with two lanes per run, generation and learner, over its first `WINDOW_S` seconds."""
    left, width, lane, gap = 90, 820, 22, 34
    height = 60 + len(runs) * (2 * lane + gap) + 30
    scale = (width - left - 10) / WINDOW_S
    svg = Svg(width, height)
    for index, (name, color) in enumerate(COLORS.items()):
        svg.add("rect", x=left + 130 * index, y=10, width=14, height=14, fill=color)
        svg.text(left + 130 * index + 20, 22, name, 13)
    for number, run in enumerate(runs):
        top = 56 + number * (2 * lane + gap)
        svg.text(left, top - 6, run["name"], 13, font_weight="bold")
        for y, side in ((top, "generation"), (top + lane, "learner")):
            svg.add("rect", x=left, y=y, width=width - left - 10, height=lane - 3, fill="#f2f2f2")
            svg.text(left - 8, y + 14, side, 11, text_anchor="end")
            for begin, end, what in run[side]:
                if begin < WINDOW_S:
                    shown = max((min(end, WINDOW_S) - begin) * scale, 0.5)
                    svg.add("rect", x=left + begin * scale, y=y, width=shown, height=lane - 3, fill=COLORS[what])
        for x in [left + moment * scale for moment in run["steps"] if moment < WINDOW_S]:
            svg.add("line", x1=x, y1=top - 3, x2=x, y2=top + 2 * lane, stroke="black")
    for second in range(int(WINDOW_S) + 1):
        svg.text(left + second * scale, height - 10, f"{second} s", text_anchor="middle")
    return str(svg)


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
        pictures["learning"] = curve(rewards, held_out)
    if options.two_sides:
        pictures["two-sides"] = two_sides(json.loads(options.two_sides.read_text(encoding="utf-8"))["runs"])
    options.out.mkdir(parents=True, exist_ok=True)
    for name, picture in pictures.items():
        (options.out / f"{name}.svg").write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
