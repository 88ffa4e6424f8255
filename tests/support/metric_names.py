"""The names of metrics that the page of metrics explains, and those that the code logs."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from rlhf_cli.report.metrics import tables

ROOT = Path(__file__).parents[2]
LOGGING = ROOT / "packages/rlhf-train/src"
_EVALUATED = ("rollout", "sft", "rm", "preference", "kto", "prm", "kd")
_NAME = re.compile(r"[a-z]+/[a-z_]+")


def explained() -> list[str]:
    """Return the names that are declared. `<name>` in one stands for any word."""
    return [name for rows in tables() for row in rows for name in row["names"]]


def is_explained(name: str) -> bool:
    """Return whether a row of the page is about this metric. Rows for any `<name>` that people choose do not count.

    An evaluation of fixed examples has the names of the updates, and the end of a run repeats those of evaluations.
    """
    rows = "|".join(re.sub(r"<\w+>", "[^/]+", row) for row in explained() if "<name>" not in row)
    if re.fullmatch(rows, name):
        return True
    prefix, _, word = re.sub("_(before|after)$", "", name).partition("/")
    return prefix == "eval" and any(re.fullmatch(rows, f"{other}/{word}") for other in ("eval", *_EVALUATED))


def logged() -> Iterator[tuple[str, str]]:
    """Yield the file and the name of each metric that the code of training writes as one text."""
    prefixes = {name.partition("/")[0] for name in explained()} - {"eval"}
    for file in sorted(LOGGING.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            if _NAME.fullmatch(text) and text.partition("/")[0] in prefixes:
                yield file.name, text
