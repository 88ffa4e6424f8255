"""Every option of every command against a table of defaults and bounds: changing one means changing its line here."""

import math
import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from rlhf_cli.main import COMMANDS, command_line
from rlhf_data.options.declare import options

TABLE = Path(__file__).parent / "option_table.txt"


def rows() -> list[tuple[str, str, str, str]]:
    """The table's lines: commands, option, default, interval of values or -."""
    lines = [line for line in TABLE.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    return [tuple(part.strip() for part in line.split("|")) for line in lines]


def section_of(command: str, name: str):
    config = command_line(command).config
    [section] = [option.section for option in options(config) if option.name == name]
    return config.model_fields[section].annotation


def takes(command: str, name: str, value: float) -> bool:
    try:
        section_of(command, name).model_validate({name: value})
    except ValidationError:
        return False
    return True


def test_table_has_every_option_of_every_command_once():
    listed = [(command, row[1]) for row in rows() for command in row[0].split()]
    assert len(listed) == len(set(listed))
    assert set(listed) == {(name, option.name) for name in COMMANDS for option in options(command_line(name).config)}


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row[0].split()[0]}-{row[1]}")
def test_default_is_that_of_the_table(row):
    for command in row[0].split():
        assert repr(section_of(command, row[1]).model_fields[row[1]].default) == row[2]


@pytest.mark.parametrize(
    "row", [row for row in rows() if row[3] != "-"], ids=lambda row: f"{row[0].split()[0]}-{row[1]}"
)
def test_values_end_where_the_table_says(row):
    commands, name, _, interval = row
    opening, low, high, closing = re.fullmatch(r"([\[(])(\S+), (\S+)([\])])", interval).groups()
    for command in commands.split():
        annotation = section_of(command, name).model_fields[name].annotation
        step = 1e-6 if "float" in str(annotation) else 1
        for bound, inward, is_closed in ((low, step, opening == "["), (high, -step, closing == "]")):
            if math.isinf(float(bound)):
                assert takes(command, name, math.copysign(10**6, -inward) if step < 1 else -inward * 10**6)
                continue
            at = float(bound) if step < 1 else int(bound)
            assert takes(command, name, at) is is_closed
            assert takes(command, name, at + inward)
            assert not takes(command, name, at - inward)
