"""Write the page of all options from their declarations."""

import sys
from pathlib import Path
from typing import Literal, NamedTuple, get_args, get_origin

from openrlhf_page import commands_text
from rlhf_cli.main import COMMANDS, command_line
from rlhf_data.options.declare import Option, options
from write import parser, write

PAGE = Path(__file__).resolve().parents[2] / "docs" / "options.md"
TOP = """# Options

`python tools/docs/options_page.py` writes this page from the declarations in the code.

`rlhf COMMAND --help` lists the options of one command. The titles below are the sections of a file for `--config`. An
option with several rows has another default or meaning in each of their commands. `--dry_run`, `--config` and, for ppo,
`--preset` are flags only.

Groups of commands: *offline* is sft, rm, dpo, kto, prm and kd; *training* is ppo and these; *inference* is generate,
score, serve_rm and chat; *all* is all of these and lora_combiner.
"""
_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


class Row(NamedTuple):
    """What commands say about an option, as Markdown. Commands with equal rows share a line."""

    name: str
    values: str
    default: str
    meaning: str


def markdown() -> str:
    """Return the page: a table per section of the configuration, with a line per option and meaning."""
    sections: dict[str, dict[Row, list[str]]] = {}
    for command in COMMANDS:
        for option in options(command_line(command).config):
            rows = sections.setdefault(option.section, {})
            rows.setdefault(_row(option), []).append(command)
    return TOP + "".join(map(_table, sections, sections.values()))


def _table(section: str, rows: dict[Row, list[str]]) -> str:
    lines = ["", f"## {section}", "", "| option | commands | values | default | meaning |", "|---|---|---|---|---|"]
    first = {row.name: number for number, row in reversed(list(enumerate(rows)))}
    for row in sorted(rows, key=lambda row: first[row.name]):
        cells = (row.name, commands_text(rows[row]), row.values, row.default, row.meaning)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _row(option: Option) -> Row:
    default = option.info.get_default()
    words = " ".join(map(str, default)) if isinstance(default, tuple) else str(default)
    shown = f"`{words.lower() if isinstance(default, bool) else words}`" if words else "empty"
    names = ", ".join(f"`{flag}`" for flag in option.flags)
    meaning = (option.info.description or "").replace("|", "\\|").replace("<", "\\<")
    return Row(names, _values(option), shown, meaning)


def _values(option: Option) -> str:
    """Return what an option takes: a list of words, or its type with its bounds."""
    annotation = option.info.annotation
    if option.is_switch:
        return "true, false"
    if option.choices:
        return ", ".join(option.choices)
    if get_origin(annotation) is Literal:
        return ", ".join(get_args(annotation))
    if "..." in str(annotation):
        return "words"
    if option.num_values > 1:
        return f"{option.num_values} {'words' if 'str' in str(annotation) else 'numbers'}"
    kinds = (annotation, *get_args(annotation))
    names = {int: "whole number", float: "number"}
    kind = next((name for kind, name in names.items() if kind in kinds), "text")
    bounds = [f"{word} {bound}" for name, word in _BOUNDS.items() if (bound := _bound(option, name)) is not None]
    return " ".join([kind, " and ".join(bounds)]).strip()


def _bound(option: Option, name: str) -> float | None:
    return next((getattr(item, name) for item in option.info.metadata if hasattr(item, name)), None)


if __name__ == "__main__":
    sys.exit(write(PAGE, lambda old: markdown(), parser(__doc__).parse_args()))
