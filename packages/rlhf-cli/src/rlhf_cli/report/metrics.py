"""What metrics mean, by `metrics.toml`: the page of metrics and the report say it."""

import re
import tomllib
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

_LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")


def tables() -> list[list[dict[str, Any]]]:
    """Return the tables of the page: rows with `names`, `unit`, `meaning` with its formula, and OpenRLHF's name."""
    text = (Path(__file__).parent / "metrics.toml").read_text(encoding="utf-8")
    return [table["rows"] for table in tomllib.loads(text)["tables"]]


def meanings(names: Iterable[str]) -> dict[str, str]:
    """Return unit and meaning of metrics by name, without those that nothing is known of."""
    rows = [
        (name, row["units"][at], row)
        for row in map(_by_name, chain.from_iterable(tables()))
        for at, name in enumerate(row["names"])
    ]
    rows.sort(key=lambda found: found[0].count("<"))  # a name of its own comes before one that fits many
    patterns = [(re.compile(re.sub(r"<\w+>", "[^/]+", name)), f"{row['meaning']} ({unit})") for name, unit, row in rows]
    found = {name: next((text for pattern, text in patterns if pattern.fullmatch(name)), "") for name in names}
    return {name: _LINK.sub(r"\1", text).replace("`", "") for name, text in found.items() if text}


def _by_name(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with the unit of each of its names: of several, the last one counts for those that follow."""
    units = row["unit"].removesuffix(" each").split("; ")
    return {**row, "units": [*units, *[units[-1]] * len(row["names"])]}
