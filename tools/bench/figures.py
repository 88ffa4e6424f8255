"""Keep the figures in Markdown pages equal to the committed measurements.

    python tools/bench/figures.py            write the figures into the pages
    python tools/bench/figures.py --check    print the figures that differ, and exit with 1

A figure is a number followed by a comment that says where the number comes from and how to format it:

    0.88 <!-- figure: tools/bench/results/learning-cpu.json mean_after .2f -->

The parts are a JSON file relative to the root of the repository, a value in it, a format specification of Python and,
optionally, a factor such as `x100`. A value is a dotted path of keys and list indices. `*` stands for every element,
and `max(...)`, `min(...)`, `mean(...)` or `sum(...)` reduces them. `A / B` divides two values, and `A / B / C` divides
the quotient again. `%20` stands for a space in a key.
"""

import argparse
import json
import re
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("*.md", *(f"{folder}/**/*.md" for folder in ("docs", "kernels", "packages", "third_party", "tools")))
REDUCTIONS = {"max": max, "mean": statistics.fmean, "min": min, "sum": sum}

# A hyphen after a word character is no sign: the numbers of "6-7" are 6 and 7.
_NUMBER = r"(?:(?<!\w)[-+])?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?"
# Emphasis and a unit may stand between the number and its comment, which may begin the next line. No digit may: the
# comment belongs to the last number before it.
_FIGURE = re.compile(rf"(?P<number>{_NUMBER})(?P<between>[%*`/A-Za-z ]{{0,16}}\s*)<!-- figure: (?P<source>[^>]*?) -->")
_MARKER = re.compile(r"<!-- figure:")


class FigureError(ValueError):
    """A comment that cannot be read, or that names a file or a value that does not exist."""


class Difference(NamedTuple):
    """A figure that differs from its measurement."""

    line: int
    written: str
    measured: str
    source: str


def find(data: Any, path: str) -> list[Any]:
    """Return the values at a dotted path; keys may contain dots. Raises FigureError where the path leads nowhere."""
    if not path:
        return [data]
    head, _, rest = path.partition(".")
    if head == "*" and isinstance(data, list | dict):
        elements = data.values() if isinstance(data, dict) else data
        return [value for element in elements for value in find(element, rest)]
    if isinstance(data, list) and head.isdecimal() and int(head) < len(data):
        return find(data[int(head)], rest)
    if isinstance(data, dict):
        # Keys may contain dots, so several keys can begin the path. The longest one is meant.
        keys = [key for key in data if path == key or path.startswith(f"{key}.")]
        if keys:
            key = max(keys, key=len)
            return find(data[key], path[len(key) + 1 :])
    have = ", ".join(data) if isinstance(data, dict) else f"a {type(data).__name__}"
    raise FigureError(f"no {path!r} in {have}")


def evaluate(data: Any, terms: Sequence[str]) -> float:
    """Return the number that `VALUE`, or `VALUE / VALUE ...` from the left to the right, stands for in `data`."""
    if len(terms) >= 3 and terms[-2] == "/":
        return evaluate(data, terms[:-2]) / evaluate(data, terms[-1:])
    if len(terms) != 1:
        raise FigureError(f"{' '.join(terms)!r} is neither VALUE nor VALUE / VALUE")
    name, bracket, rest = terms[0].partition("(")
    if bracket:
        if name not in REDUCTIONS or not rest.endswith(")"):
            raise FigureError(f"{terms[0]!r} is no reduction; there are {', '.join(REDUCTIONS)}")
        return REDUCTIONS[name](find(data, rest[:-1]))
    values = find(data, terms[0])
    if len(values) != 1 or isinstance(values[0], bool) or not isinstance(values[0], int | float):
        raise FigureError(f"{terms[0]!r} is {values}, which is not one number")
    return values[0]


def render(source: str, root: Path = ROOT) -> str:
    """Return the formatted figure of the comment `FILE VALUE FORMAT [xFACTOR]`."""
    name, *terms = source.split()
    factor = 1.0
    if terms and re.fullmatch(r"x[\d.e+-]+", terms[-1]):
        factor = float(terms.pop()[1:])
    if len(terms) < 2:
        raise FigureError(f"{source!r} is not FILE VALUE FORMAT [xFACTOR]")
    *value, form = [term.replace("%20", " ") for term in terms]
    try:
        data = json.loads((root / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FigureError(f"there is no {name}") from None
    number = evaluate(data, value)
    scaled = number if factor == 1 else number * factor
    try:
        text = format(scaled, form)
    except ValueError as error:
        raise FigureError(f"format {form!r}: {error}") from None
    # 1.4e-4 in place of Python's 1.4e-04
    return re.sub(r"e([-+])0*(\d)", lambda match: f"e{match[1].removeprefix('+')}{match[2]}", text)


def differences(page: str, root: Path = ROOT) -> Iterator[Difference]:
    """Yield the figures of a page's text that differ. Raises FigureError for a marker without a number before it."""
    found = list(_FIGURE.finditer(page))
    if len(found) != len(_MARKER.findall(page)):
        starts = {match.end() for match in found}
        lost = [match for match in re.finditer(r"<!-- figure:.*?(-->|$)", page, re.S) if match.end() not in starts]
        line = page.count("\n", 0, lost[0].start()) + 1
        raise FigureError(f"line {line}: no number stands before the marker {lost[0][0].splitlines()[0]!r}")
    for match in found:
        line = page.count("\n", 0, match.start()) + 1
        try:
            measured = render(match["source"], root)
        except FigureError as error:
            raise FigureError(f"line {line}: {error}") from None
        if measured != match["number"]:
            yield Difference(line, match["number"], measured, match["source"])


def rewrite(page: str, root: Path = ROOT) -> str:
    """Return the text of a page with every figure as measured."""

    def replaced(match: re.Match[str]) -> str:
        return f"{render(match['source'], root)}{match['between']}<!-- figure: {match['source']} -->"

    return _FIGURE.sub(replaced, page)


def pages(root: Path = ROOT) -> list[Path]:
    """Return the Markdown pages of the repository."""
    return sorted(path for pattern in PAGES for path in root.glob(pattern))


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Rewrite or check every page under `root`; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if a figure differs")
    options = parser.parse_args(argv)
    status = 0
    for path in pages(root):
        text = path.read_text(encoding="utf-8")
        name = path.relative_to(root)
        try:
            found = list(differences(text, root))
        except FigureError as error:
            print(f"{name}: {error}", file=sys.stderr)
            status = 1
            continue
        for line, written, measured, source in found:
            print(f"{name}:{line}: {written} is {measured} in {source}")
        if found and options.check:
            status = 1
        elif found:
            path.write_text(rewrite(text, root), encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
