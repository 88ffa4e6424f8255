"""Rows of one or several data sources: JSON, JSONL and CSV files, and data sets of the `datasets` library."""

import bisect
import csv
import gzip
import hashlib
import itertools
import json
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_data.errors import ConfigError, DataError, joined, missing_file, unknown
from rlhf_data.rows.presets import PRESETS
from rlhf_data.rows.row import Row, RowErrors, json_value, kind_of
from rlhf_data.safety import is_utf8

_PATTERN_SIGNS = "*?["
_SEPARATOR = re.compile(r"[;\t|]")  # what separates columns in tables whose name says .csv, besides commas
SUFFIXES = (".json", ".jsonl", ".csv", ".json.gz", ".jsonl.gz", ".csv.gz", ".parquet", ".arrow", ".py")
_ONE_A_LINE = "a .jsonl file has one whole JSON object per line, with names and text in double quotes"

_WHITESPACE = re.compile(r"[ \t\n\r]*")
_NOT_UTF8 = DataError("not UTF-8", hint="convert the file to UTF-8")


class _Strict(RowErrors):
    def add(self, error: DataError | str) -> None:
        raise error if isinstance(error, DataError) else DataError(error)


@dataclass(frozen=True, slots=True)
class Source:
    """One file or data set: its name, a function that reads its rows, and one that returns its fingerprint."""

    name: str
    read: Callable[[RowErrors], Iterator[Row]]
    fingerprint: Callable[[], str | None]
    short_name: str = ""  # see `Row.short_name`


def _told_apart(sources: Sequence[Source]) -> tuple[Source, ...]:
    """Return the sources with short names that differ: the file names, with folders where file names are equal.

    A short name has as few folders as possible; a source that is named twice also has a number.
    """
    parts = [source.name.split("/") for source in sources]
    names = [own[-1] for own in parts]
    for length in range(2, max(map(len, parts)) + 1):
        counts = Counter(names)
        names = ["/".join(own[-length:]) if counts[name] > 1 else name for own, name in zip(parts, names, strict=True)]
    seen: Counter[str] = Counter()
    told = []
    for source, own, name in zip(sources, parts, names, strict=True):
        seen[name] += 1
        unique = name if seen[name] == 1 else f"{name}({seen[name]})"
        told.append(source if unique == own[-1] else replace(source, short_name=unique))
    return tuple(told)


def parse_probs(option: str, text: str | None) -> tuple[float, ...] | None:
    """Parse a comma-separated list of probabilities. Raises ConfigError for anything but numbers."""
    try:
        return None if text is None else tuple(float(part) for part in text.split(","))
    except ValueError:
        message = f"``{option}`` is {text}; it must be numbers separated by commas"
        raise ConfigError(message, hint="write one per data source, such as 0.7,0.3") from None


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one or several sources. Each iteration reads them again, row by row. Build it with `open_sources`.

    Attributes:
        sources: the sources, in order.
        probs: probability per source of drawing the next row from it; None reads one source after the other.
        seed: seed of these draws.
        max_samples: largest number of rows per source.
        preset: the name in `PRESETS` of the data set whose form the rows have; None leaves them as they are.
        skip_samples: number of rows to leave out at the start of each source; `max_samples` counts those after them.
    """

    sources: tuple[Source, ...]
    probs: tuple[float, ...] | None = None
    seed: int = 0
    max_samples: int | None = None
    preset: str | None = None
    skip_samples: int = 0

    @property
    def name(self) -> str:
        """The names of the sources, joined by commas."""
        return ", ".join(source.name for source in self.sources)

    def __iter__(self) -> Iterator[Row]:
        return self.read()

    def read(self, errors: RowErrors | None = None) -> Iterator[Row]:
        """Yield the rows. Broken rows go to `errors`; without it they are raised.

        Raises:
            DataError: a source has no usable row, or cannot be read at all.
        """
        errors = _Strict() if errors is None else errors
        if self.probs is None:
            for source in self.sources:
                yield from self._read(source, errors)
            return
        # A source that ends before the others starts again, so that the proportions hold until every source was read
        # whole at least once.
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
        """Return a text that changes whenever the rows do, or None if a source is streamed and has no fingerprint."""
        prints = [source.fingerprint() for source in self.sources]
        if None in prints:
            return None
        return repr((prints, self.probs, self.seed, self.max_samples, self.preset, self.skip_samples))

    def _read(self, source: Source, errors: RowErrors) -> Iterator[Row]:
        row = None
        num_bad = errors.num_bad
        end = None if self.max_samples is None else self.skip_samples + self.max_samples
        for read in itertools.islice(source.read(errors), self.skip_samples, end):
            try:
                named = replace(read, short_name=source.short_name) if source.short_name else read
                row = named if self.preset is None else PRESETS[self.preset].convert(named)
            except DataError as error:
                errors.add(error)
                continue
            yield row
        if row is None and errors.num_bad > num_bad:
            message = f"no row of {source.name} can be read; the first that cannot:"
            raise DataError(joined([message, *errors.first], "\n"))
        if row is None and self.skip_samples:
            raise DataError(f"{source.name} has no rows behind the first {self.skip_samples}", hint="skip fewer rows")
        if row is None:
            raise DataError(f"{source.name} has no rows", hint="write one JSON object per line, with the prompt in it")


def open_sources(
    text: str | Path,
    *,
    probs: Sequence[float] | None = None,
    seed: int = 0,
    max_samples: int | None = None,
    streaming: bool = False,
    split: str = "train",
    preset: str | None = None,
) -> Rows:
    """Open data files and data sets.

    JSON, JSONL and CSV need no extra; the others need `rlhf-data[datasets]`.

    Args:
        text: a comma-separated list of sources, or a Path for one source. A source is a `.json` file (a list of
            objects), a `.jsonl` file (one object per line; empty lines are skipped), a `.csv` file (with a header; all
            cells are text), one of these compressed (`.jsonl.gz`), a `.parquet` or `.arrow` file, a folder written by
            `save_to_disk`, a hub name, or a `.py` file with one builder class of the `datasets` library. A folder, hub
            name or script may end in `@subset`. Text must be UTF-8.
        probs: probability per source of drawing the next row from it. A source that ends starts again, until each has
            ended at least once. None reads one source after the other.
        seed: seed of these draws.
        max_samples: largest number of rows per source.
        streaming: read data sets of the `datasets` library row by row, without copying them into its cache. Text files
            are always read this way.
        split: split to read from data sets that have splits.
        preset: the name in `PRESETS` of the data set whose form the rows have, which then get the usual keys.

    Raises:
        DataError: a file is missing or of an unknown type, or the `datasets` library refuses a data set.
        ConfigError: no source, an option out of range, or the `datasets` library is missing.
    """
    names = [text] if isinstance(text, Path) else split_sources(text)
    if not names:
        raise ConfigError("no data source is named")
    if preset is not None and preset not in PRESETS:
        raise ConfigError(unknown("data preset", preset, PRESETS))
    if max_samples is not None and max_samples < 1:
        raise ConfigError(f"the number of samples to read must be at least 1, got {max_samples}")
    if probs is not None:
        if len(probs) != len(names):
            message = f"{len(names)} data sources need as many probabilities, got {len(probs)}"
            raise ConfigError(message, hint=f"{','.join('1' for _ in names)} draws from all alike")
        if not all(0 < prob < float("inf") for prob in probs):
            message = f"the probabilities of data sources must be above 0, got {list(probs)}"
            raise ConfigError(message, hint="leave out the source that is not to be drawn from")
        probs = tuple(prob / sum(probs) for prob in probs)
    sources = _told_apart([_open(name, streaming, split) for name in names])
    return Rows(sources, probs, seed, max_samples, preset)


def split_sources(text: str, folder: Path = Path()) -> list[str]:
    """Return the names in a comma-separated list of sources. Paths are relative to `folder`.

    Raises:
        ConfigError: a file's name has a comma.
    """
    names = text.split(",")
    for start, end in itertools.combinations(range(len(names) + 1), 2):
        joint = ",".join(names[start:end]).strip()
        if end > start + 1 and os.path.isfile(folder / joint):
            message = f"the name of the data file {joint} has a comma, and a comma separates sources"
            raise ConfigError(message, hint="rename the file")
    return [name.strip() for name in names if name.strip()]


def may_be_on_hub(name: str) -> bool:
    """Return whether a source of `open_sources` is no file or folder of this machine, so that it names a data set."""
    return not _is_path(name, Path(name)) and not ("@" in name and Path(name.rpartition("@")[0]).exists())


def _is_path(name: str | Path, path: Path) -> bool:
    is_known = path.name.lower().endswith(SUFFIXES)
    return isinstance(name, Path) or path.exists() or is_known or str(name)[0] in "./~"


def _open(name: str | Path, streaming: bool, split: str) -> Source:
    path = Path(name)
    subset = None
    if not path.exists() and "@" in path.name:
        name, _, subset = str(name).rpartition("@")
        path = Path(name)
    is_known = path.name.lower().endswith(SUFFIXES)
    if not path.exists() and any(sign in str(name) for sign in _PATTERN_SIGNS):
        hint = "name its files, separated by commas, or the folder that holds them alone"
        raise DataError(f"data source {name} is a pattern, and patterns are not read", hint=hint)
    if _is_path(name, path) and not path.exists():
        raise DataError(missing_file("data file", path))
    if path.is_file() and not is_known:
        message = f"data file {path} ends in `{path.suffix}`; known: {', '.join(SUFFIXES)}"
        raise DataError(message, hint="convert it to .jsonl")
    if subset is not None and path.is_file() and path.suffix.lower() != ".py":
        raise ConfigError(f"data file {path} has no subsets, got `@{subset}`", hint=f"drop @{subset}")
    parse = _PARSERS.get(Path(path.name.lower().removesuffix(".gz")).suffix)
    if path.is_file() and parse is not None:
        return Source(str(path), partial(_read_text, parse, path), partial(sha256, path))
    from rlhf_data.rows.hub import open_dataset

    table, fingerprint = open_dataset(str(name), subset, split=split, streaming=streaming)
    full_name = str(name) if subset is None else f"{name}@{subset}"
    return Source(full_name, partial(_read_table, full_name, table), lambda: fingerprint)


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_table(name: str, table: Iterable[dict[str, Any]], errors: RowErrors) -> Iterator[Row]:
    try:
        for number, values in enumerate(table):
            yield Row(json_value(values), name, number, has_lines=False)
    except Exception as error:  # the library's readers pass on errors of their file formats
        raise DataError(f"{name} cannot be read: {error}") from error


def _read_text(parse: Callable[[Path], Iterator[tuple[int, Any]]], path: Path, errors: RowErrors) -> Iterator[Row]:
    for line, value in parse(path):
        if isinstance(value, dict):
            yield Row(value, str(path), line)
        elif isinstance(value, DataError):
            errors.add(f"{path}:{line}: {value}")
        else:
            errors.add(f"{path}:{line}: a row must be a JSON object, got {kind_of(value)}")


def _lines(path: Path) -> Iterator[str]:
    """Yield the lines of a file, decompressed. Bytes that are not UTF-8 become lone surrogates; see `is_utf8`."""
    try:
        with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file):
                yield line.decode("utf-8" if number else "utf-8-sig", errors="surrogateescape")
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"data file {path} cannot be decompressed: {error}", hint="copy it again, whole") from None


def _csv_values(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield for each record after the header its line, with its cells by column name or with its error."""
    csv.field_size_limit(2**31 - 1)
    cells = csv.reader(_lines(path), strict=True)
    header = None
    while True:
        line = cells.line_num + 1
        problem = None
        values = []
        try:
            values = next(cells)
        except StopIteration:
            return
        except csv.Error as error:
            problem = DataError(f"malformed CSV: {error}")
        if not is_utf8("".join(values)):
            problem = _NOT_UTF8
        elif values and header and len(values) != len(header):
            problem = DataError(f"{len(values)} cells in a table of {len(header)} columns")
        if header is None and problem:
            raise DataError(f"{path}:{line}: the header of the table cannot be read: {problem}")
        if header is None and len(values) == 1 and (found := _SEPARATOR.search(values[0])):
            hint = f"write commas in the place of {found[0]!r} between its columns, or convert it to .jsonl"
            raise DataError(f"{path}:{line}: the header of the table has one column, {values[0]!r}", hint=hint)
        if header and (values or problem):
            yield line, problem or dict(zip(header, values, strict=True))
        header = header or values or None


def _jsonl_values(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield for each line that is not empty its number, with its JSON value or with its error."""
    for line, text in enumerate(_lines(path), start=1):
        if not is_utf8(text):
            yield line, _NOT_UTF8
        elif text := text.strip():
            try:
                value = json.loads(text, parse_constant=_refuse_constant)
            except (ValueError, RecursionError) as error:
                value = DataError(f"malformed JSON: {_reason(error)}", hint=_ONE_A_LINE)
            yield line, value


def _json_values(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield for each item of the list the line where it begins, with the item or with its error."""
    text = "".join(_lines(path))
    decoder = json.JSONDecoder(parse_constant=_refuse_constant)
    newlines = [match.start() for match in re.finditer("\n", text)]

    def line_at(position: int) -> int:
        return 1 + bisect.bisect_left(newlines, position)

    def malformed(position: int, what: str) -> DataError:
        return DataError(f"{path}:{line_at(position)}: malformed JSON: {what}")

    position = _skip(text, 0)
    if not text.startswith("[", position):
        raise DataError(f"data file {path} is not a JSON list of objects", hint=_list_hint(path, text, position))
    position = _skip(text, position + 1)
    while not text.startswith("]", position):
        try:
            value, end = decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            raise malformed(getattr(error, "pos", position), _reason(error)) from None
        yield line_at(position), value if is_utf8(text[position:end]) else _NOT_UTF8
        position = _skip(text, end)
        if has_comma := text.startswith(",", position):
            position = _skip(text, position + 1)
        if has_comma == text.startswith("]", position):
            raise malformed(position, "a comma, a row or the end of the list is missing")
    rest = _skip(text, position + 1)
    if rest != len(text):
        raise malformed(rest, "text after the end of the list")


def _list_hint(path: Path, text: str, position: int) -> str | None:
    """Return what to do with a .json file that does not begin with a list."""
    if not text.startswith("{", position):
        return None
    try:
        lists = [key for key, value in json.loads(text).items() if isinstance(value, list)]
    except (ValueError, RecursionError):  # several objects
        lists = []
    if not lists:
        return "one object per line belongs into a file that ends in .jsonl"
    key = json.dumps(lists[0])
    return f"its rows must be the list alone: `jq '.[{key}]' {path.name} > rows.json` writes the one of {key}"


def _skip(text: str, position: int) -> int:
    return _WHITESPACE.match(text, position).end()


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} (column {error.colno})"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


_PARSERS = {".json": _json_values, ".jsonl": _jsonl_values, ".csv": _csv_values}
