"""Write the table of OpenRLHF's flags into its page."""

import sys
from collections.abc import Collection
from pathlib import Path

from rlhf_cli.openrlhf.flags import COMMANDS, Row, table
from write import parser, write

PAGE = Path(__file__).resolve().parents[2] / "docs" / "coming-from-openrlhf.md"
BEGIN, END = "<!-- table: openrlhf flags -->\n", "<!-- end of the table -->\n"


def markdown() -> str:
    """Return the table: a row per flag, with the commands that have it and what it means."""
    lines = ["| flag of OpenRLHF | commands | here |", "|---|---|---|"]
    for row in table():
        names = ", ".join(f"`--{name}`" for name in row.names)
        lines.append(f"| {names} | {commands_text(row.commands)} | {_meaning(row)} |")
    return "\n".join(lines) + "\n"


def with_table(page: str) -> str:
    """Return a page with the table between its two marks. Raises ValueError for a page without them."""
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page needs the lines {BEGIN.strip()} and {END.strip()}")
    return head + begin + markdown() + end + tail


def commands_text(commands: Collection[str]) -> str:
    """Return the names of commands. The largest groups that hold no other command stand for their commands."""
    left = set(commands)
    words = []
    for name in ("all", "training", "offline", "inference"):
        if left >= set(COMMANDS[name]):
            words.append(name)
            left -= set(COMMANDS[name])
    return ", ".join(sorted(left) + words)


def _meaning(row: Row) -> str:
    if row.kind == "option":
        return f"`--{row.text}`"
    if row.kind == "option of all models":
        return f"`--{row.text}`, one for all models"
    if row.kind == "special":
        return row.text
    accepted = f"; accepted with {' or '.join(f'`{word}`' for word in row.unless)}" if row.unless else ""
    return f"{row.kind}: {row.text}{accepted}"


if __name__ == "__main__":
    sys.exit(write(PAGE, with_table, parser(__doc__).parse_args()))
