"""The state of the driver as files: JSON, in which places stand for rollout groups and arrays. Torch-free.

    state.json        order of prompts, counts, coefficients
    waiting.bin       the rollout groups, which wait for training; only if there are any
    unfinished.bin    the arrays, such as the tokens of unfinished groups; only if there are any

As JSON, groups and arrays would all be in memory at once. Both binary files end with a digest of `state.json`.
The file of another checkpoint has another end.
"""

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_data.errors import CheckpointError, DataError
from rlhf_data.records import RolloutGroup
from rlhf_rollout.records_io import read_batches
from rlhf_rollout.unfinished import Written
from rlhf_train.run.saved.arrays import SEAL_BYTES, ArrayReader, ArrayWriter, damaged
from rlhf_train.run.saved.groups import GroupReader, GroupWriter

FORMAT = 4
# 1 has rollout groups as lists of records in state.json; 1 and 2 have arrays there in Base64; 2 and 3 have groups in
# columns; 3 has arrays in a file without a seal.
READ_FORMATS = (1, 2, 3, 4)
_SEALED = 4  # the first format whose files end with a seal
STATE = "state.json"
GROUPS = "waiting.bin"  # in whose place stands {GROUPS: place of the group}
ARRAYS = "unfinished.bin"  # in whose place stands {ARRAYS: place of the array}
COLUMNS = "waiting.columns"  # of formats 2 and 3, in whose place stands {COLUMNS: number of the group, from 0}
UNREADABLE = (OSError, ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError)


def write_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Write a state of JSON values, rollout groups and arrays to a folder that has none."""
    writers: dict[str, Any] = {}

    def place(name: str, kind: type[Any], value: Any) -> dict[str, Any]:
        if name not in writers:
            writers[name] = kind(folder / name)
        return {name: writers[name].write(value)}

    def encode(value: Any) -> dict[str, Any]:
        if isinstance(value, np.ndarray | Written):
            return place(ARRAYS, ArrayWriter, value)
        if isinstance(value, RolloutGroup):
            return place(GROUPS, GroupWriter, value)
        raise TypeError(f"{type(value).__name__} in the state of a run is no JSON value")

    seal = b""
    try:
        text = json.dumps(state, default=encode, allow_nan=True).encode()
        seal = _seal(text)
    finally:
        for writer in writers.values():
            writer.close(seal)
    (folder / STATE).write_bytes(text)


def read_state(folder: Path, version: int = FORMAT) -> dict[str, Any]:
    """Return the state that `write_state` wrote to a folder, or that of an older format `version`.

    Raises CheckpointError when a file cannot be read, or does not belong to the others.
    """
    path = folder / STATE
    try:
        text = path.read_bytes()
        files = _Files(folder, _seal(text) if version >= _SEALED else b"")
        state = dict(json.loads(text, object_hook=files.decode))
    except FileNotFoundError:
        raise damaged(path, "is missing") from None
    except UNREADABLE as error:
        raise damaged(path, f"cannot be read: {error}") from error
    if version < _SEALED:
        files.check_ends()
    return state


class _Files:
    """The files besides `state.json`, opened when the state names them."""

    def __init__(self, folder: Path, seal: bytes) -> None:
        self._folder = folder
        self._num_groups = 0  # in columns
        self._arrays = cache(lambda: ArrayReader(folder / ARRAYS, seal))
        self._groups = cache(lambda: GroupReader(folder / GROUPS, seal))
        self._columns = cache(lambda: _read_columns(folder / COLUMNS))

    def decode(self, value: dict[str, Any]) -> Any:
        """Return what stands at a place, and other values as they are."""
        if value.keys() == {ARRAYS}:
            return self._arrays().read(value[ARRAYS])
        if value.keys() == {GROUPS}:
            return self._groups().read(value[GROUPS])
        if value.keys() == {COLUMNS}:
            self._num_groups += 1
            groups = self._columns()
            number = value[COLUMNS]
            if not 0 <= number < len(groups):
                raise self._other_columns(f"at least {number + 1}")
            return groups[number]
        return value

    def check_ends(self) -> None:
        """Raise CheckpointError if a file without a seal has more than the state names."""
        if self._arrays.cache_info().currsize:
            self._arrays().check_end()
        if self._columns.cache_info().currsize and len(self._columns()) != self._num_groups:
            raise self._other_columns(str(self._num_groups))

    def _other_columns(self, num_groups: str) -> CheckpointError:
        what = f"has {len(self._columns())} rollout groups, not {num_groups}: it belongs to another checkpoint"
        return damaged(self._folder / COLUMNS, what)


def _read_columns(path: Path) -> list[RolloutGroup]:
    if not path.is_file():
        raise damaged(path, "is missing")
    try:
        return [batch.groups[0] for batch in read_batches(path)]
    except DataError as error:
        message, _, _ = str(error).partition("\n\n")
        raise damaged(path, f"is cut off or damaged: {message}") from error


def _seal(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=SEAL_BYTES).digest()
