"""Draw two SVG pictures of a run for the README: its terminal output, shortened, and its learning curve.

rlhf ppo --seed 1 --save_path outputs/ppo 2>&1 | tee ppo.log
python tools/bench/pictures.py --log ppo.log --run outputs/ppo --command "rlhf ppo --seed 1" --out docs/images
"""

import argparse
import json
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

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

_ESCAPE = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")
_SPINNER = re.compile(r"[\u2800-\u28ff]")
_STEP = re.compile(r"\s*(\d+)/\d+ ")
_HEADER = re.compile(r"\s*step +reward ")
_LINE_HEIGHT, _CHARACTER_WIDTH = 18, 7.85


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


def terminal_svg(lines: Sequence[str]) -> str:
    """Return an SVG of a terminal with these lines. Results of evaluations stand out."""
    width = 20 + max(map(len, lines)) * _CHARACTER_WIDTH
    height = 20 + len(lines) * _LINE_HEIGHT
    parts = [f'<svg viewBox="0 0 {width:.0f} {height}" xmlns="http://www.w3.org/2000/svg" font-family="monospace">']
    parts.append(f'<rect width="{width:.0f}" height="{height}" rx="6" fill="#1e1e1e"/>')
    parts.append('<g font-size="13" fill="#d4d4d4" xml:space="preserve">')
    for index, line in enumerate(lines):
        style = ' fill="#8fd18f" font-weight="bold"' if "held-out accuracy" in line else ""
        # A fixed length aligns the columns whatever font the reader's browser has.
        length = f'textLength="{len(line) * _CHARACTER_WIDTH:.0f}"'
        parts.append(f'<text x="10" y="{24 + index * _LINE_HEIGHT}" {length}{style}>{escape(line)}</text>')
    return "\n".join([*parts, "</g>", "</svg>\n"])


def curve_svg(rewards: Sequence[tuple[int, float]], held_out: Sequence[tuple[int, float]]) -> str:
    """Return an SVG of the mean training reward per step as a line, and of held-out accuracy as dots."""
    width, height, left, bottom = 640, 300, 50, 40
    last = max(step for step, _ in [*rewards, *held_out])

    def place(step: int, value: float) -> tuple[str, str]:
        x = left + step / last * (width - left - 20)
        y = height - bottom - value * (height - bottom - 20)
        return f"{x:.1f}", f"{y:.1f}"

    parts = [f'<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg" font-family="sans-serif">']
    parts.append(f'<rect width="{width}" height="{height}" fill="white"/>')
    for value in (0.0, 0.25, 0.5, 0.75, 1.0):
        (x0, y), (x1, _) = place(0, value), place(last, value)
        parts.append(f'<line x1="{x0}" y1="{y}" x2="{x1}" y2="{y}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 8}" y="{y}" font-size="12" text-anchor="end" dy="4">{value:g}</text>')
    for step in range(0, last + 1, 10):
        x, _ = place(step, 0.0)
        parts.append(f'<text x="{x}" y="{height - 22}" font-size="12" text-anchor="middle">{step}</text>')
    points = " ".join(",".join(place(step, value)) for step, value in rewards)
    parts.append(f'<polyline points="{points}" fill="none" stroke="#4c78a8" stroke-width="2"/>')
    for step, value in held_out:
        x, y = place(step, value)
        parts.append(f'<circle cx="{x}" cy="{y}" r="5" fill="#e45756"/>')
        parts.append(f'<text x="{x}" y="{y}" font-size="12" text-anchor="middle" dy="20">{value:.2f}</text>')
    title = "step (line: mean training reward; dots: held-out accuracy)"
    parts.append(f'<text x="{width / 2}" y="{height - 5}" font-size="12" text-anchor="middle">{escape(title)}</text>')
    return "\n".join([*parts, "</svg>\n"])


def main(argv: Sequence[str] | None = None) -> None:
    """Write terminal.svg and learning.svg."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--log", type=Path, required=True, help="what the run wrote to the terminal")
    parser.add_argument("--run", type=Path, required=True, help="its --save_path")
    parser.add_argument("--command", required=True, help="what was typed")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    options = parser.parse_args(argv)
    records = [json.loads(line) for line in (options.run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    rewards = [(record["step"], record["rollout/reward"]) for record in records if "rollout/reward" in record]
    held_out = [(record["step"], record["eval/accuracy"]) for record in records if "eval/accuracy" in record]
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "learning.svg").write_text(curve_svg(rewards, held_out), encoding="utf-8")
    lines = [f"$ {options.command}", *shown_lines(options.log.read_text(encoding="utf-8"))]
    (options.out / "terminal.svg").write_text(terminal_svg(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
