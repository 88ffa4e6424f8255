"""Rows of JSON and JSONL files, each of which knows the file and line it came from, so that errors can name them."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_data.errors import ConfigError, DataError, missing_file, unknown, with_hint

SUFFIXES = (".json", ".jsonl")
_ONE_A_LINE = "a .jsonl file has one whole JSON object a line, with names and text in double quotes"

_WHITESPACE = re.compile(r"[ \t\n\r]*")


@dataclass(frozen=True, slots=True)
class Row:
    """One record of a data file.

    Attributes:
        values: the record's keys and values.
        path: the file.
        line: where the record begins, counted from 1.
    """

    values: Mapping[str, Any]
    path: Path
    line: int

    @property
    def origin(self) -> str:
        """`file:line`, for messages."""
        return f"{self.path}:{self.line}"

    def cell(self, key: str) -> Any:
        """Return the value of `key`. Raises DataError with the keys there are when it is missing."""
        if key not in self.values:
            raise DataError(f"{self.origin}: {unknown('key', key, self.values)}")
        return self.values[key]

    def text(self, key: str) -> str:
        """Return the cell as text: a string as it is, a number as JSON writes it. Raises DataError for all else."""
        value = self.cell(key)
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise DataError(f"{self.origin}: `{key}` must be text or a number, got {_kind(value)}")
        if isinstance(value, str):
            return _encodable(value, key, self)
        return json.dumps(value)

    def label(self, key: str) -> str:
        """Return the cell as a reward function receives it: text, or JSON for a boolean, a list or an object.

        Raises DataError for null: a missing answer is a broken row, not an empty one.
        """
        value = self.cell(key)
        if value is None:
            raise DataError(
                with_hint(f"{self.origin}: the label `{key}` is null", "remove the row, or write the answer into it")
            )
        if isinstance(value, bool | list | dict):
            return json.dumps(value, ensure_ascii=False)
        return self.text(key)


def read_rows(path: str | Path, *, max_rows: int | None = None) -> list[Row]:
    """Read a data file.

    Args:
        path: `.jsonl` (one object a line; empty lines are skipped) or `.json` (one list of objects), UTF-8.
        max_rows: stop after that many rows.

    Returns:
        The rows in the order of the file, at least one.

    Raises:
        DataError: the file is missing, of another type, not UTF-8, malformed (file and line), or has no rows.
        ConfigError: `max_rows` is not positive.
    """
    path = Path(path)
    if max_rows is not None and max_rows < 1:
        raise ConfigError(f"the number of samples to read must be at least 1, got {max_rows}")
    if not path.is_file():
        raise DataError(missing_file("data file", path))
    if path.suffix.lower() not in SUFFIXES:
        raise DataError(
            with_hint(f"data file {path} ends in `{path.suffix}`; known: {', '.join(SUFFIXES)}", "convert it to .jsonl")
        )
    read = _read_jsonl if path.suffix.lower() == ".jsonl" else _read_json
    rows = []
    for row in read(path):
        rows.append(row)
        if len(rows) == max_rows:
            break
    if not rows:
        raise DataError(
            with_hint(f"data file {path} has no rows", "write one JSON object a line, with the prompt in it")
        )
    return rows


def _read_jsonl(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            text = _decode(raw, path, number).strip()
            if not text:
                continue
            try:
                value = json.loads(text, parse_constant=_refuse_constant)
            except (ValueError, RecursionError) as error:
                raise DataError(with_hint(f"{path}:{number}: malformed JSON: {_reason(error)}", _ONE_A_LINE)) from None
            yield _row(value, path, number)


def _read_json(path: Path) -> Iterator[Row]:
    text = "".join(_decode(raw, path, line) for line, raw in enumerate(path.read_bytes().splitlines(keepends=True), 1))
    decoder = json.JSONDecoder(parse_constant=_refuse_constant)
    position, line, counted = _skip(text, 0), 1, 0
    if text[position : position + 1] != "[":
        one_object = text[position : position + 1] == "{"
        hint = "one object a line belongs into a file that ends in .jsonl" if one_object else None
        raise DataError(with_hint(f"data file {path} is not a JSON list of objects", hint))
    position = _skip(text, position + 1)
    while text[position : position + 1] != "]":
        line, counted = line + text.count("\n", counted, position), position
        try:
            value, end = decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            at = line + text.count("\n", position, getattr(error, "pos", position))
            raise DataError(f"{path}:{at}: malformed JSON: {_reason(error)}") from None
        yield _row(value, path, line)
        position = _skip(text, end)
        found = text[position : position + 1]
        if found == ",":
            position = _skip(text, position + 1)
        if (found == ",") == (text[position : position + 1] == "]"):
            at = line + text.count("\n", counted, position)
            raise DataError(f"{path}:{at}: malformed JSON: a comma, a row or the end of the list is missing")
    rest = _skip(text, position + 1)
    if rest != len(text):
        raise DataError(f"{path}:{1 + text.count(chr(10), 0, rest)}: malformed JSON: text after the end of the list")


def _skip(text: str, position: int) -> int:
    return _WHITESPACE.match(text, position).end()


def _row(value: Any, path: Path, line: int) -> Row:
    if not isinstance(value, dict):
        raise DataError(f"{path}:{line}: a row must be a JSON object, got {_kind(value)}")
    return Row(value, path, line)


def _decode(raw: bytes, path: Path, line: int) -> str:
    try:
        return raw.decode("utf-8-sig" if line == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise DataError(with_hint(f"{path}:{line}: not UTF-8: {error.reason}", "convert the file to UTF-8")) from None


def _encodable(value: str, key: str, row: Row) -> str:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise DataError(f"{row.origin}: `{key}` holds half of a surrogate pair, which is no character") from None
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} (column {error.colno})"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
