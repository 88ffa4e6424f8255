"""Run one of the benchmarks in `workloads/`, and write its report.

    python tools/bench/run.py                       list the benchmarks
    python tools/bench/run.py NAME --help           what a benchmark measures, against what, and its flags
    python tools/bench/run.py NAME --out REPORT     measure

A benchmark is a file with a docstring, `FLAGS` (see `runner.arguments`) and `measure(options, folder)`, which yields
its report, several times if it grows. The entry "missed" of a report lists the goals that were not reached: if there
are any, the exit status is 1.
"""

import ast
import importlib
import json
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runner import UsageError, arguments, write

HERE = Path(__file__).parent


def workloads() -> dict[str, Path]:
    """Return the file of each benchmark by its name."""
    paths = sorted((HERE / "workloads").glob("*/*.py"))
    return {path.stem: path for path in paths if "\ndef measure(" in path.read_text(encoding="utf-8")}


def listed() -> str:
    """Return a line per benchmark: its name, and the first line of its docstring."""
    lines = []
    for name, path in workloads().items():
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        lines.append(f"    {name:<18}{docstring.splitlines()[0]}")
    return "\n".join(lines)


def shown(value: Any) -> Any:
    """Return a part of a report for the terminal: short numbers, and no lists of more than four."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: shown(part) for key, part in value.items() if not isinstance(part, list) or len(part) <= 4}
    return [shown(part) for part in value] if isinstance(value, list) else value


def main(argv: Sequence[str] | None = None) -> int:
    """Run a benchmark; return the exit status, 1 if a goal was missed."""
    name, *words = [*(sys.argv[1:] if argv is None else argv)] or ["--help"]
    path = workloads().get(name)
    if path is None:
        print(f"{__doc__}\nBenchmarks:\n\n{listed()}")
        return 0 if name in ("-h", "--help") else 2
    module = importlib.import_module(f"workloads.{path.parent.name}.{name}")
    parser = arguments(module.__doc__, **module.FLAGS)
    options = parser.parse_args(words)
    report: Mapping[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for report in module.measure(options, Path(folder)):
                write(options, name, report)
        except UsageError as error:
            parser.error(str(error))
    print(json.dumps(shown(report), indent=1, default=str))
    for text in report.get("missed", ()):
        print(f"MISSED {text}")
    return int(bool(report.get("missed")))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # processes end with the benchmark
    sys.exit(main())
