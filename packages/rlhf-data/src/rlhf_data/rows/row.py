"""A record of a data set with its origin, and counts of records that cannot be used."""

import base64
import datetime
import hashlib
import json
import math
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import numpy as np

from rlhf_data.errors import DataError, joined, unknown
from rlhf_data.safety import is_utf8

_TOLERATED_FRACTION = 0.01
_NUM_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Row:
    """A record of a data set.

    Attributes:
        values: the record's keys and values.
        source: the file or the name of the data set.
        number: the line where the record begins, counted from 1, or in a data set without lines the row, from 0.
        has_lines: whether `number` is a line.
        short_name: name of the source, unique among those that are read together; "" for its name without the folder.
    """

    values: Mapping[str, Any]
    source: str
    number: int
    has_lines: bool = True
    short_name: str = ""

    @property
    def origin(self) -> str:
        """`file:line` or `name#row`, for messages."""
        return self._numbered(self.source)

    @property
    def row_id(self) -> str:
        """The origin without the folder of the file; unique among the sources that are read together."""
        return self._numbered(self.source_name)

    @property
    def source_name(self) -> str:
        """The short name of the source, or its name without the folder."""
        return self.short_name or self.source.rpartition("/")[2]

    def _numbered(self, name: str) -> str:
        return f"{name}{':' if self.has_lines else '#'}{self.number}"

    @property
    def is_truncated(self) -> bool:
        """Whether `finish_reason` is "length", which `rlhf-rollout generate` writes for answers cut by a length limit.

        No EOS is appended to such an answer, so that the model does not learn to stop there.
        """
        return self.values.get("finish_reason") == "length"

    def digest(self, keys: Iterable[str | None]) -> bytes:
        """Return a digest of what the row holds under `keys`: neither its place nor a chat template changes it."""
        cells = [None if key is None else self.values.get(key) for key in keys]
        # A value that JSON lacks, such as an image, may be written with its address in memory: its type must do.
        text = json.dumps(cells, sort_keys=True, default=lambda value: type(value).__name__)
        return hashlib.blake2b(text.encode(), digest_size=16).digest()

    def cell(self, key: str) -> Any:
        """Return the value of `key`. Raises DataError, which lists the row's keys, if it is missing."""
        if key not in self.values:
            raise DataError(f"{self.origin}: {unknown('key', key, self.values)}")
        return self.values[key]

    def text(self, key: str) -> str:
        """Return the value of `key` as text: a string unchanged, a number as in JSON. Raises DataError for others."""
        value = self.cell(key)
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise DataError(f"{self.origin}: `{key}` must be text or a number, got {kind_of(value)}")
        return self.checked(key, value) if isinstance(value, str) else json.dumps(value)

    def checked(self, key: str, text: str) -> str:
        """Return a text of the cell `key`. Raises DataError if no file can hold it."""
        if not is_utf8(text):
            raise DataError(f"{self.origin}: `{key}` holds half of a surrogate pair, which is no character")
        return text

    def filled(self, key: str) -> str:
        """Return the value of `key` as text. Raises DataError as `text`, and if it is empty."""
        text = self.text(key)
        if not text.strip():
            raise DataError(f"{self.origin}: `{key}` is empty")
        return text

    def decoded(self, key: str) -> Any:
        """Return the value of `key`, or what it holds as JSON if it is text. Raises DataError for other text."""
        value = self.cell(key)
        try:
            return json.loads(value) if isinstance(value, str) else value
        except (ValueError, RecursionError) as error:
            raise DataError(f"{self.origin}: `{key}` is not JSON: {error}") from None

    def plain(self, key: str) -> Any:
        """Return the value of `key`, which may be null. Raises DataError unless it can be written as JSON."""
        value = self.cell(key)
        self.check_json(key, value)
        return value

    def check_json(self, key: str, value: Any) -> None:
        """Raise DataError unless a part of the cell `key` can be written as JSON, which has no NaN."""
        try:
            text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            message = f"{self.origin}: `{key}` cannot be written as JSON: {kind_of(value)}"
            hint = "JSON has texts, finite numbers, true, false, null, lists and objects"
            raise DataError(message, hint=hint) from None
        self.checked(key, text)

    def label(self, key: str) -> str:
        """Return the value of `key` as reward functions receive it: text, or JSON for a boolean, list or object.

        Raises:
            DataError: as `text`, and if the value is null, because a missing answer is an error of the data.
        """
        value = self.cell(key)
        if value is None:
            message = f"{self.origin}: the label `{key}` is null"
            raise DataError(message, hint="remove the row, or write the answer into it")
        if isinstance(value, bool | list | dict):
            return self.checked(key, json.dumps(value, ensure_ascii=False))
        return self.text(key)


@dataclass(slots=True)
class RowErrors:
    """Collects rows that cannot be used: a few are tolerated, many are an error.

    Attributes:
        skip_bad_rows: tolerate any number of them.
        num_bad: how many there are so far.
        first: the messages of the first few.
    """

    skip_bad_rows: bool = False
    num_bad: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, error: DataError | str) -> None:
        """Count one row. The text of the error names its file and line."""
        self.num_bad += 1
        if len(self.first) < _NUM_SHOWN:
            self.first.append(str(error))

    def check(self, num_rows: int) -> None:
        """Raise DataError if all of `num_rows` rows are bad, or more than 1 % without `skip_bad_rows`."""
        is_allowed = self.skip_bad_rows or self.num_bad <= _TOLERATED_FRACTION * num_rows
        if is_allowed and self.num_bad < num_rows:
            return
        hint = "repair them, or leave all of them out with ``skip_bad_rows`` (1 % is tolerated)"
        if self.num_bad == num_rows:
            hint = "repair them, or check the options that say what rows hold, such as keys"
        message = f"{self.num_bad} of {num_rows} rows cannot be used; the first:"
        raise DataError(joined([message, *self.first], "\n", hint))


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers of rows read and left out.

    Attributes:
        num_rows: rows read: rows kept + `num_too_long` + `num_bad`.
        num_too_long: rows left out because a sequence exceeds the token limit.
        num_bad: rows left out because they cannot be used.
        longest_tokens: tokens of the longest sequence, whether kept or left out.
        bad: messages of the first bad rows.
        digest: hash of the cells that were read of the rows kept, in their order; "" if it is not known.
    """

    num_rows: int = 0
    num_too_long: int = 0
    num_bad: int = 0
    longest_tokens: int = 0
    bad: tuple[str, ...] = ()
    digest: str = ""

    def __add__(self, other: "Counts") -> "Counts":
        numbers = (getattr(self, name) + getattr(other, name) for name in ("num_rows", "num_too_long", "num_bad"))
        return Counts(*numbers, max(self.longest_tokens, other.longest_tokens), self.bad + other.bad)

    @property
    def most_is_lost(self) -> str:
        """The first words of a notice if more than half of the rows are too long, with their share; else none."""
        if self.num_too_long <= self.num_rows / 2:
            return ""
        return f"most of the data, {100 * self.num_too_long / self.num_rows:.0f} %, is not used: "

    def summary(self, kept: str) -> str:
        """Return a summary in one line. `kept` says what was kept, such as "5 prompts"."""
        text = f"{kept}, the longest read has {self.longest_tokens} tokens"
        too_long = f"; {self.most_is_lost}{self.num_too_long} of {self.num_rows} left out as too long"
        text += too_long if self.num_too_long else ""
        bad = f"; {self.num_bad} of {self.num_rows} cannot be used, such as {self.bad[0]}" if self.bad else ""
        return text + bad.partition("\n")[0]


def unknown_id(row: Row, token_id: int, tokenizer: Any, num_ids: int) -> str:
    """Return the message for a row with a token that the model's embedding has no row for."""
    token = tokenizer.decode([int(token_id)])
    return f"{row.origin}: the token {token!r} has the id {token_id}, and the model's embedding ends at {num_ids - 1}"


def kind_of(value: Any) -> str:
    """Return the kind of a JSON value, for messages; for any other value the name of its type."""
    names = {dict: "an object", list: "a list", str: "text", bool: "a boolean", type(None): "null"}
    named = names.get(type(value), f"a value of type {type(value).__name__}")
    return "a number" if isinstance(value, int | float) and not isinstance(value, bool) else named


def json_value(value: Any) -> Any:
    """Return the value of a table's cell as JSON knows it, so that it can be compared, written and sent anywhere.

    Dates and times become text by ISO 8601, whole decimals integers, others floating-point numbers, NaN null, bytes
    text if they are UTF-8 and else base64, arrays lists. What has no such form, such as an image, stays as it is.
    """
    if isinstance(value, float | Decimal):
        number = float(value)
        if not math.isfinite(number):
            return None if math.isnan(number) else str(number)
        return int(value) if isinstance(value, Decimal) and value == value.to_integral_value() else number
    if isinstance(value, Mapping):
        return {str(key): json_value(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(part) for part in value]
    if isinstance(value, datetime.date | datetime.time):  # a datetime is a date
        return value.isoformat()
    if isinstance(value, bytes | bytearray | memoryview):
        raw = bytes(value)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return base64.b64encode(raw).decode()
    if isinstance(value, np.ndarray | np.generic):
        return json_value(value.tolist())
    return str(value) if isinstance(value, datetime.timedelta | uuid.UUID) else value
