"""Rows of data files and data sets: JSON, JSONL, CSV and all that the `datasets` library reads, one or several."""

import csv
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_data.errors import ConfigError, DataError, missing_file, with_hint
from rlhf_data.rows import Row, RowErrors, kind_of

SUFFIXES = (".json", ".jsonl", ".csv", ".parquet", ".arrow", ".py")
_ONE_A_LINE = "a .jsonl file has one whole JSON object a line, with names and text in double quotes"

_WHITESPACE = re.compile(r"[ \t\n\r]*")
_UNDECODABLE = re.compile("[\udc80-\udcff]")  # what `surrogateescape` makes of a byte that is not UTF-8


class _Strict(RowErrors):
    def add(self, error: DataError | str) -> None:
        raise error if isinstance(error, DataError) else DataError(error)


@dataclass(frozen=True, slots=True)
class Source:
    """One file or data set: its name, how its rows are read, and what says whether it is still the same."""

    name: str
    read: Callable[[RowErrors], Iterator[Row]]
    fingerprint: Callable[[], str | None]


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one or several sources, read anew, row by row, at every iteration. Made by `open_sources`.

    Attributes:
        sources: where the rows come from.
        probs: of each source; None: one source after the other.
        seed: of the interleaving.
        max_samples: rows of each source at most.
    """

    sources: tuple[Source, ...]
    probs: tuple[float, ...] | None = None
    seed: int = 0
    max_samples: int | None = None

    @property
    def name(self) -> str:
        """The sources' names, with commas."""
        return ", ".join(source.name for source in self.sources)

    def __iter__(self) -> Iterator[Row]:
        return self.read()

    def read(self, errors: RowErrors | None = None) -> Iterator[Row]:
        """Yield the rows; those that are broken go to `errors`, or are raised without it.

        Raises:
            DataError: a source has no usable row, or is broken as a whole.
        """
        errors = _Strict() if errors is None else errors
        if self.probs is None:
            for source in self.sources:
                yield from self._read(source, errors)
            return
        generator = np.random.default_rng(self.seed)
        streams = [self._read(source, errors) for source in self.sources]
        unfinished = set(range(len(streams)))
        while unfinished:
            index = int(generator.choice(len(streams), p=self.probs))
            row = next(streams[index], None)
            if row is None:
                unfinished.discard(index)
                streams[index] = self._read(self.sources[index], errors)
                row = next(streams[index]) if unfinished else None
            if row is not None:
                yield row

    def fingerprint(self) -> str | None:
        """Return a text that changes when the rows do; None when a source cannot tell without being read."""
        prints = [source.fingerprint() for source in self.sources]
        return None if None in prints else repr((prints, self.probs, self.seed, self.max_samples))

    def _read(self, source: Source, errors: RowErrors) -> Iterator[Row]:
        row, num_bad = None, errors.num_bad
        for row in itertools.islice(source.read(errors), self.max_samples):
            yield row
        if row is None and errors.num_bad > num_bad:
            raise DataError(f"no row of {source.name} can be read; the first that cannot:\n" + "\n".join(errors.first))
        if row is None:
            raise DataError(
                with_hint(f"{source.name} has no rows", "write one JSON object a line, with the prompt in it")
            )


def open_sources(
    text: str | Path,
    *,
    probs: Sequence[float] | None = None,
    seed: int = 0,
    max_samples: int | None = None,
    streaming: bool = False,
    split: str = "train",
) -> Rows:
    """Open data files and data sets.

    JSON, JSONL and CSV need nothing; the others need the extra `rlhf-data[datasets]`.

    Args:
        text: a list with commas of `.json` (one list of objects), `.jsonl` (one object a line; empty lines are
            skipped), `.csv` (with a header; every cell is text), `.parquet` and `.arrow` files, folders that
            `save_to_disk` wrote, hub names, and `.py` files with one builder class of the `datasets` library. A folder,
            a hub name and a script may end in `@subset`. A Path is one source. Text is UTF-8.
        probs: a probability for each source. The source of every next row is drawn with them; a source that ends
            begins again, until each has ended at least once. None: one source after the other.
        seed: of that drawing.
        max_samples: rows of each source at most.
        streaming: read data sets of the `datasets` library as their rows are used, without a copy in its cache. Files
            of text are always read that way.
        split: of data sets that have splits.

    Raises:
        DataError: a file is missing or of an unknown type, or the `datasets` library refuses a data set.
        ConfigError: no source, an option out of range, or the `datasets` library is missing.
    """
    names = [text] if isinstance(text, Path) else [part.strip() for part in text.split(",") if part.strip()]
    if not names:
        raise ConfigError("no data is named")
    if max_samples is not None and max_samples < 1:
        raise ConfigError(f"the number of samples to read must be at least 1, got {max_samples}")
    if probs is not None:
        if len(probs) != len(names):
            raise ConfigError(f"{len(names)} data sources need as many probabilities, got {len(probs)}")
        if not all(0 < prob < float("inf") for prob in probs):
            raise ConfigError(f"the probabilities of data sources must be above 0, got {list(probs)}")
        probs = tuple(prob / sum(probs) for prob in probs)
    return Rows(tuple(_open(name, streaming, split) for name in names), probs, seed, max_samples)


def read_rows(path: str | Path, *, max_rows: int | None = None) -> list[Row]:
    """Return the rows of one source, see `open_sources`; the first broken one is raised."""
    return list(open_sources(Path(path), max_samples=max_rows))


def _open(name: str | Path, streaming: bool, split: str) -> Source:
    path, subset = Path(name), None
    if not path.exists() and "@" in path.name:
        name, _, subset = str(name).rpartition("@")
        path = Path(name)
    is_path = isinstance(name, Path) or path.exists() or path.suffix.lower() in SUFFIXES or str(name)[0] in "./~"
    if is_path and not path.exists():
        raise DataError(missing_file("data file", path))
    if path.is_file() and path.suffix.lower() not in SUFFIXES:
        message = f"data file {path} ends in `{path.suffix}`; known: {', '.join(SUFFIXES)}"
        raise DataError(with_hint(message, "convert it to .jsonl"))
    if subset is not None and path.is_file() and path.suffix.lower() != ".py":
        raise ConfigError(f"data file {path} has no subsets, got `@{subset}`")
    if path.is_file() and (read := _READERS.get(path.suffix.lower())):
        return Source(str(path), partial(read, path), partial(_digest, path))
    from rlhf_data.hub import open_dataset

    table, fingerprint = open_dataset(str(name), subset, split=split, streaming=streaming)
    full_name = str(name) if subset is None else f"{name}@{subset}"
    return Source(full_name, partial(_read_table, full_name, table), lambda: fingerprint)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_table(name: str, table: Iterable[dict[str, Any]], errors: RowErrors) -> Iterator[Row]:
    numbered = enumerate(table)
    while True:
        try:
            number, values = next(numbered)
        except StopIteration:
            return
        except Exception as error:  # the library's readers raise whatever the file's format does
            raise DataError(f"{name} cannot be read: {error}") from error
        yield Row(values, name, number, has_lines=False)


class _Lines:
    """Decoded lines of a file; goes on after a line that cannot be decoded."""

    def __init__(self, file: Iterable[bytes], path: Path) -> None:
        self.path, self.number, self._file = path, 0, iter(file)

    def __iter__(self) -> "_Lines":
        return self

    def __next__(self) -> str:
        raw = next(self._file)
        self.number += 1
        return _decode(raw, self.path, self.number)


def _read_csv(path: Path, errors: RowErrors) -> Iterator[Row]:
    csv.field_size_limit(2**31 - 1)
    with path.open("rb") as file:
        lines, header = _Lines(file, path), None
        cells = csv.reader(lines, strict=True)
        while True:
            line = lines.number + 1
            try:
                values = next(cells)
                if values and header and len(values) != len(header):
                    raise DataError(f"{path}:{line}: {len(values)} cells in a table of {len(header)} columns")
            except StopIteration:
                return
            except csv.Error as error:
                errors.add(DataError(f"{path}:{line}: malformed CSV: {error}"))
            except DataError as error:
                errors.add(error)
            else:
                if values and header is not None:
                    yield Row(dict(zip(header, values, strict=True)), str(path), line)
                header = header or values
            if header is None:
                raise DataError(f"{path}:{line}: the header of the table cannot be read")


def _read_jsonl(path: Path, errors: RowErrors) -> Iterator[Row]:
    with path.open("rb") as file:
        lines = _Lines(file, path)
        while True:
            try:
                text = next(lines).strip()
                row = _jsonl_row(text, path, lines.number) if text else None
            except StopIteration:
                return
            except DataError as error:
                errors.add(error)
            else:
                if row is not None:
                    yield row


def _jsonl_row(text: str, path: Path, line: int) -> Row:
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise DataError(with_hint(f"{path}:{line}: malformed JSON: {_reason(error)}", _ONE_A_LINE)) from None
    return _row(value, path, line)


def _read_json(path: Path, errors: RowErrors) -> Iterator[Row]:
    text = path.read_bytes().decode("utf-8-sig", errors="surrogateescape")
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
        try:
            if _UNDECODABLE.search(text, position, end):
                raise DataError(_not_utf8(path, line))
            row = _row(value, path, line)
        except DataError as error:
            errors.add(error)
        else:
            yield row
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
        raise DataError(f"{path}:{line}: a row must be a JSON object, got {kind_of(value)}")
    return Row(value, str(path), line)


def _decode(raw: bytes, path: Path, line: int) -> str:
    try:
        return raw.decode("utf-8-sig" if line == 1 else "utf-8")
    except UnicodeDecodeError:
        raise DataError(_not_utf8(path, line)) from None


def _not_utf8(path: Path, line: int) -> str:
    return with_hint(f"{path}:{line}: not UTF-8", "convert the file to UTF-8")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} (column {error.colno})"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


_READERS = {".json": _read_json, ".jsonl": _read_jsonl, ".csv": _read_csv}
