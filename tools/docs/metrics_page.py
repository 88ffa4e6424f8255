"""Write the tables of the page of metrics from what the product says of them."""

import re
import sys
from pathlib import Path
from typing import Any

from rlhf_cli.report.metrics import tables
from write import parser, write

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
HEAD = "| metric | unit | meaning | OpenRLHF |\n|---|---|---|---|\n"
_TABLE = re.compile(r"\| metric \|.*\n(?:\|.*\n)*")


def markdown(page: str) -> str:
    """Return the page with its tables of metrics renewed. Raises StopIteration if it has another number of them."""
    rest = iter(tables())
    renewed = _TABLE.sub(lambda _: HEAD + "".join(map(_line, next(rest))), page)
    assert next(rest, None) is None, "the page has too few tables"
    return renewed


def _line(row: dict[str, Any]) -> str:
    names = ", ".join(f"`{name}`" for name in row["names"])
    return f"| {names} | {row['unit']} | {row['meaning']} | {row['openrlhf']} |\n"


if __name__ == "__main__":
    sys.exit(write(PAGE, markdown, parser(__doc__ or "").parse_args()))
