"""Encoding of rows into training examples: in several processes, with a cache on disk, and with bad rows counted."""

import hashlib
import os
import pickle
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from rlhf_data.chat.template import template_dates
from rlhf_data.errors import ConfigError, DataError
from rlhf_data.examples.preference import PreferenceEncoder, PreferenceExample, ProcessEncoder, UnpairedEncoder
from rlhf_data.examples.sft import SftEncoder
from rlhf_data.options.declare import Section, matching
from rlhf_data.rows.row import Counts, Row, RowErrors, unknown_id
from rlhf_data.rows.sources import Rows

_CHUNK = 256  # rows per task of a worker
_FORMAT = 5  # version of the cache; raise it when rows give other tokens or the files have another layout

Example = TypeVar("Example")
Result = tuple[Any, str | bytes]  # an example and the digest of its row, or None and the reason why there is none


class Encoder(Protocol[Example]):
    """Turns a row into an example or raises DataError. Must be a frozen dataclass that can be pickled."""

    tokenizer: Any

    def __call__(self, row: Row) -> Example:
        """Return the example of a row."""


def make_encoder(kind: str, options: Section, tokenizer: Any) -> Any:
    """Return the encoder of examples of a kind.

    Args:
        kind: "sft", "preference", "unpaired" or "process".
        options: the section with the keys and templates that the encoder takes.
        tokenizer: the model's tokenizer, loaded.

    Raises:
        ConfigError: options that exclude each other or do not suit the tokenizer.
    """
    if kind == "preference":
        return PreferenceEncoder(tokenizer=tokenizer, **matching(PreferenceEncoder, options))
    if kind == "process":
        steps = matching(ProcessEncoder, options)
        return ProcessEncoder(tokenizer=tokenizer, placeholder=options.placeholder_token, **steps)
    encoder = UnpairedEncoder if kind == "unpaired" else SftEncoder
    pretrain = getattr(options, "pretrain_mode", False)
    return encoder(tokenizer=tokenizer, pretrain=pretrain, **matching(encoder, options))


@dataclass(frozen=True, slots=True)
class ExampleSet(Generic[Example]):
    """The usable examples, in the order of their rows, and counts of those left out."""

    examples: Sequence[Example]
    counts: Counts

    @property
    def summary(self) -> str:
        """One line for people."""
        return self.counts.summary(f"{len(self.examples)} examples")


def load_examples(
    rows: Rows,
    encoder: Encoder[Example],
    *,
    max_len: int = 2048,
    num_ids: int | None = None,
    skip_bad_rows: bool = False,
    num_workers: int = 0,
    progress: Callable[[int], None] = lambda num_rows: None,
    cache_dir: str | Path | None = None,
) -> ExampleSet[Example]:
    """Encode rows.

    Args:
        rows: see `rlhf_data.rows.sources.open_sources`.
        encoder: such as `rlhf_data.examples.sft.SftEncoder`.
        max_len: largest number of tokens per sequence. Longer examples are left out and counted, never cut.
        num_ids: number of token ids that the model knows; a row with another one cannot be used. None: it knows all.
        skip_bad_rows: leave out any number of rows that cannot be used. Otherwise more than 1 % is an error.
        num_workers: number of encoding processes; 0 encodes in this process. They are spawned, so a script must keep
            its own work under `if __name__ == "__main__"`.
        progress: called from time to time with the number of rows done.
        cache_dir: folder in which examples are stored. Later calls with the same rows, tokenizer and options read them
            from there, as they are used. None keeps them in memory.

    Raises:
        DataError: a source is broken; more than 1 % of the rows cannot be used; no example is left.
        ConfigError: an option out of range; a cache for data that has no fingerprint.
    """
    if max_len < 2:
        raise ConfigError(f"max_len must be at least 2 (a prompt and an EOS), got {max_len}")
    if num_workers < 0:
        raise ConfigError(f"num_workers must be at least 0, got {num_workers}")
    work = _Work(rows, encoder, max_len, num_ids, num_workers, progress)
    examples, counts = work.cached(Path(cache_dir)) if cache_dir is not None else (tuple(work.encode()), work.counts)
    RowErrors(skip_bad_rows, counts.num_bad, list(counts.bad)).check(counts.num_rows)
    if not examples:
        message = f"all {counts.num_too_long} examples of {rows.name} are longer than ``max_len={max_len}``"
        raise DataError(message, hint=f"the longest has {counts.longest_tokens} tokens: raise ``max_len``")
    return ExampleSet(examples, counts)


@dataclass(slots=True)
class _Work:
    rows: Rows
    encoder: Encoder
    max_len: int
    num_ids: int | None
    num_workers: int
    progress: Callable[[int], None]
    counts: Counts = field(default_factory=Counts)  # set when `encode` has yielded everything

    def encode(self) -> Iterator[Any]:
        errors = RowErrors()  # the caller judges whether they are too many
        digest = hashlib.blake2b(digest_size=8)
        num_encoded = num_too_long = longest = 0
        for example, told in self._results(self.rows.read(errors)):
            if isinstance(told, str):
                errors.add(told)
                continue
            num_encoded += 1
            length = max(part.num_tokens for part in _sequences(example))
            longest = max(longest, length)
            if length <= self.max_len:
                digest.update(told)
                yield example
            else:
                num_too_long += 1
            if num_encoded % _CHUNK == 0:
                self.progress(num_encoded + errors.num_bad)
        num_rows = num_encoded + errors.num_bad
        self.progress(num_rows)
        numbers = (num_rows, num_too_long, errors.num_bad, longest)
        self.counts = Counts(*numbers, tuple(errors.first), digest.hexdigest())

    def cached(self, cache_dir: Path) -> tuple[Sequence[Any], Counts]:
        data = self.rows.fingerprint()
        if data is None:
            message = f"{self.rows.name} is streamed and cannot be cached"
            raise ConfigError(message, hint="leave out the cache, or streaming")
        folder = cache_dir / _key(data, self.encoder, (self.max_len, self.num_ids))
        if not folder.exists():
            cache_dir.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".draft-", dir=cache_dir) as scratch:
                draft = Path(scratch) / "set"
                _write_store(draft, self.encode())
                (draft / "counts.pickle").write_bytes(pickle.dumps(self.counts))
                try:
                    draft.rename(folder)
                except OSError:  # another process may have written the same cache in the meantime
                    if not folder.exists():
                        raise
        return _Store(folder), _read_item(folder / "counts.pickle")

    def _results(self, rows: Iterator[Row]) -> Iterator[Result]:
        attempt = _Attempt(self.encoder, _keys_of(self.encoder), self.num_ids)
        if not self.num_workers:
            yield from map(attempt, rows)
            return
        # Spawn, because this process may have threads (of the tokenizer or torch), which forking would break.
        context = get_context("spawn")
        with ProcessPoolExecutor(self.num_workers, context, _start_worker, (attempt,)) as pool:
            waiting: deque[Future[list[Result]]] = deque()
            while chunk := list(islice(rows, _CHUNK)):
                waiting.append(pool.submit(_encode_chunk, chunk))
                if len(waiting) > 2 * self.num_workers:  # bounds how far rows are read ahead
                    yield from waiting.popleft().result()
            for future in waiting:
                yield from future.result()


@dataclass(frozen=True, slots=True)
class _Attempt:
    """Encodes a row, and says why if that is not possible or gives token ids beyond the `num_ids` of a model."""

    encoder: Encoder
    keys: Sequence[str | None]  # the keys of the cells that the encoder reads
    num_ids: int | None

    def __call__(self, row: Row) -> Result:
        try:
            example = self.encoder(row)
        except DataError as error:
            return None, str(error)
        largest = max(int(part.token_ids.max()) for part in _sequences(example))
        if self.num_ids is not None and largest >= self.num_ids:
            return None, unknown_id(row, largest, self.encoder.tokenizer, self.num_ids)
        return example, row.digest(self.keys)


_worker_attempt: Any = None


def _start_worker(attempt: _Attempt) -> None:
    global _worker_attempt
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads would compete with the other workers
    _worker_attempt = attempt


def _encode_chunk(rows: Iterable[Row]) -> list[Result]:
    return [*map(_worker_attempt, rows)]


def _keys_of(encoder: Any) -> list[str | None]:
    """Return the keys of the cells that an encoder reads."""
    keys = [getattr(encoder, part.name) for part in fields(encoder) if part.name.endswith("_key")]
    return ["finish_reason", *keys]  # see `Row.is_truncated`


def _sequences(example: Any) -> Sequence[Any]:
    """Return the sequences of an example: two of a pair."""
    return (example.chosen, example.rejected) if isinstance(example, PreferenceExample) else (example,)


def _key(data: str, encoder: Any, limits: tuple[int, int | None]) -> str:
    tokenizer = encoder.tokenizer
    # Pickles of a Hugging Face tokenizer differ between processes; the text form of its Rust part does not.
    backend = getattr(tokenizer, "backend_tokenizer", None)
    words = pickle.dumps(tokenizer) if backend is None else backend.to_str().encode()
    ends = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.chat_template, *template_dates(tokenizer))
    # The repr of an encoder has all of its options except the tokenizer.
    parts = repr((_FORMAT, data, encoder, limits, ends)).encode()
    return hashlib.sha256(parts + words).hexdigest()[:24]


def _write_store(folder: Path, items: Iterable[Any]) -> None:
    """Write pickled items end to end into a new folder, with an index of where each begins."""
    folder.mkdir()
    starts = [0]
    with (folder / "items.bin").open("wb") as file:
        for item in items:
            starts.append(starts[-1] + file.write(pickle.dumps(item)))
    np.save(folder / "starts.npy", np.array(starts))


class _Store(Sequence[Any]):
    """A sequence of the items that `_write_store` wrote. Each access reads an item from disk, so that they may
    exceed the memory.

    Raises:
        DataError: the files cannot be read, or hold what another version wrote.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()  # for processes with another working directory
        with _clear_errors(folder):
            self._starts = np.load(folder / "starts.npy", mmap_mode="r")
            # An empty file cannot be mapped.
            self._bytes = np.memmap(folder / "items.bin", np.uint8, "r") if len(self) else b""

    def __reduce__(self) -> tuple[Any, ...]:
        return _Store, (self._folder,)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, index: int | slice) -> Any:
        indices = range(len(self))[index]
        if isinstance(indices, range):
            return [self[i] for i in indices]
        with _clear_errors(self._folder):
            return pickle.loads(self._bytes[self._starts[indices] : self._starts[indices + 1]])


def _read_item(file: Path) -> Any:
    """Return what is pickled in a file beside a store. Raises as `_Store`."""
    with _clear_errors(file.parent):
        return pickle.loads(file.read_bytes())


@contextmanager
def _clear_errors(folder: Path) -> Iterator[None]:
    """Turn any error of reading a store, such as unpickling what another version wrote, into a DataError."""
    try:
        yield
    except Exception as error:  # unpickling runs code of classes, which may raise anything
        message = f"{folder} cannot be read: it is damaged, or of another version ({type(error).__name__}: {error})"
        raise DataError(message, hint=f"remove it, which encodes the data again: rm -r {folder}") from error
