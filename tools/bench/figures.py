"""Keep the figures in Markdown pages equal to the committed measurements.

    python tools/bench/figures.py            write the figures into the pages
    python tools/bench/figures.py --check    print the lines that differ, and exit with 1

A table between two comments is written from its entry in `tables.toml`:

    <!-- table: steps -->
    ...
    <!-- end of the table -->

The figures of a paragraph are listed in a comment that follows its last line, each as the number that the paragraph
has and the source of this number:

    Accuracy rises from 0.26 to 0.99.
    <!-- figures
    0.26 = learning-cpu.json mean_before .2f
    0.99 = learning-cpu.json mean_after .2f
    -->

The parts of a source are a report in `RESULTS`, a value in it, a format specification of Python and, optionally, a
factor such as `x100`. A value is a dotted path of keys and list indices. `*` stands for every element, and `max(...)`,
`min(...)`, `mean(...)` or `sum(...)` reduces them. `A / B` divides two values, and `A / B / C` divides the quotient
again. `%20` stands for a space in a key.
"""

import argparse
import difflib
import functools
import json
import re
import statistics
import sys
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TABLES = "tools/bench/tables.toml"
RESULTS = ("tools/bench/results", "kernels/bench/results")
PAGES = ("*.md", *(f"{folder}/**/*.md" for folder in ("docs", "kernels", "packages", "third_party", "tools")))
REDUCTIONS = {"max": max, "mean": statistics.fmean, "min": min, "sum": sum}

_TABLE = re.compile(r"<!-- table: (?P<name>.*?) -->\n.*?<!-- end of the table -->", re.S)
# A paragraph begins after an empty line, another comment or the beginning of a list's item.
_FIGURES = re.compile(r"^(?P<indent> *)<!-- figures\n(?P<list>[^>]*?)^ *-->", re.M)
_BEGIN = re.compile(r"\n\n|-->\n|^ *(?:[-*]|\d+\.) ", re.M)
# A hyphen after a word character is no sign: the numbers of "6-7" are 6 and 7.
_NUMBER = re.compile(r"(?<![\w.,])(?:(?<!\w)[-+])?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?(?![\w])")


class FigureError(ValueError):
    """A mark that cannot be read, or that names a report, a value or a number that does not exist."""


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
    """Return the formatted figure of `REPORT VALUE FORMAT [xFACTOR]`."""
    name, *terms = source.split()
    factor = 1.0
    if terms and re.fullmatch(r"x[\d.e+-]+", terms[-1]):
        factor = float(terms.pop()[1:])
    if len(terms) < 2:
        raise FigureError(f"{source!r} is not REPORT VALUE FORMAT [xFACTOR]")
    *value, form = [term.replace("%20", " ") for term in terms]
    number = evaluate(_report(name, root), value)
    scaled = number if factor == 1 else number * factor
    try:
        text = format(scaled, form)
    except ValueError as error:
        raise FigureError(f"format {form!r}: {error}") from None
    # 1.4e-4 in place of Python's 1.4e-04
    return re.sub(r"e([-+])0*(\d)", lambda match: f"e{match[1].removeprefix('+')}{match[2]}", text)


@functools.cache
def _report(name: str, root: Path) -> Any:
    for folder in RESULTS:
        if (root / folder / name).is_file():
            return json.loads((root / folder / name).read_text(encoding="utf-8"))
    raise FigureError(f"there is no {name} in {' and '.join(RESULTS)}")


def table(entry: Mapping[str, Any], root: Path = ROOT) -> str:
    """Return the Markdown of an entry of `tables.toml`, whose first lines explain its keys."""
    head, columns = entry["head"], entry.get("columns")
    lines = [head]
    for first, *rest in entry["rows"]:
        places = columns or [entry.get("report", "")] * (len(head) - 1)
        cells = rest
        if columns:
            cells = rest * len(columns) if len(rest) == 1 else rest
        elif "cells" in entry:
            cells = entry["cells"]
            places = rest * len(cells)
        lines.append([_cell(text, place, root) for text, place in zip([first, *cells], ["", *places], strict=True)])
    first, *others = ("|" + "".join(f" {cell} |" if cell else " |" for cell in line) for line in lines)
    return "\n".join([first, "|---" * len(head) + "|", *others])


def _cell(text: str, place: str, root: Path) -> str:
    """Return a cell whose sources in braces are rendered; `@` in them stands for `place`."""
    return re.sub(r"\{(.*?)\}", lambda match: render(match[1].replace("@", place), root), text)


def paragraph(text: str, figures: Sequence[tuple[str, str]], root: Path = ROOT) -> tuple[str, list[str]]:
    """Return a paragraph with the figures as measured, and these.

    Args:
        text: the paragraph.
        figures: (number that the paragraph has, its source); equal numbers in their order in the paragraph.
        root: the root of the repository.
    """
    there = Counter(_NUMBER.findall(text))
    for number, count in Counter(number for number, _ in figures).items():
        if there[number] != count:
            raise FigureError(f"the paragraph has {number} {there[number]} times, its list of figures {count} times")
    measured = [render(source, root) for _, source in figures]
    waiting = {
        number: iter([new for (old, _), new in zip(figures, measured, strict=True) if old == number])
        for number, _ in figures
    }
    renewed = _NUMBER.sub(lambda match: next(waiting[match[0]]) if match[0] in waiting else match[0], text)
    return renewed, measured


def renew(page: str, tables: Mapping[str, Any], root: Path = ROOT) -> str:
    """Return the text of a page with every table and figure as measured. Raises FigureError for an unreadable mark."""
    tables_renewed = _TABLE.sub(
        lambda match: (
            f"<!-- table: {match['name']} -->\n{table(tables[match['name']], root)}\n<!-- end of the table -->"
            if match["name"] in tables
            else match[0]
        ),
        page,
    )
    lists = list(_FIGURES.finditer(tables_renewed))
    if len(lists) != tables_renewed.count("<!-- figure"):
        raise FigureError("a comment that begins with `<!-- figure` is not a list of figures after a paragraph")
    parts = []
    done = 0
    for match in lists:
        begin = max((each.end() for each in _BEGIN.finditer(tables_renewed, done, match.start())), default=done)
        figures = [tuple(line.strip().split(" = ", 1)) for line in match["list"].splitlines()]
        if not all(len(figure) == 2 for figure in figures):
            raise FigureError(f"{match['list']!r} is not a list of `NUMBER = SOURCE`")
        text, measured = paragraph(tables_renewed[begin : match.start()], figures, root)
        indent = match["indent"]
        listed = [f"{indent}{new} = {source}\n" for new, (_, source) in zip(measured, figures, strict=True)]
        parts += [tables_renewed[done:begin], text, f"{indent}<!-- figures\n", *listed, f"{indent}-->"]
        done = match.end()
    return "".join([*parts, tables_renewed[done:]])


def pages(root: Path = ROOT) -> list[Path]:
    """Return the Markdown pages of the repository."""
    return sorted(path for pattern in PAGES for path in root.glob(pattern))


def read_tables(root: Path = ROOT) -> dict[str, Any]:
    """Return the entries of `tables.toml` by name."""
    return tomllib.loads((root / TABLES).read_text(encoding="utf-8"))


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Rewrite or check every page under `root`; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if a page differs")
    options = parser.parse_args(argv)
    tables = read_tables(root)
    status = 0
    for path in pages(root):
        text = path.read_text(encoding="utf-8")
        name = str(path.relative_to(root))
        try:
            renewed = renew(text, tables, root)
        except FigureError as error:
            print(f"{name}: {error}", file=sys.stderr)
            status = 1
            continue
        sys.stdout.writelines(
            f"{line}\n"
            for line in difflib.unified_diff(
                text.splitlines(), renewed.splitlines(), name, "measured", lineterm="", n=0
            )
        )
        if renewed != text and options.check:
            status = 1
        elif renewed != text:
            path.write_text(renewed, encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
