"""Pickled objects in a folder, read one by one when they are used, so that a data set may exceed the memory."""

import pickle
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from rlhf_data.errors import DataError

Item = TypeVar("Item")


def write_store(folder: Path, items: Iterable[Any]) -> None:
    """Write pickled items end to end into a new folder, with an index of where each begins."""
    folder.mkdir()
    starts = [0]
    with (folder / "items.bin").open("wb") as file:
        for item in items:
            starts.append(starts[-1] + file.write(pickle.dumps(item)))
    np.save(folder / "starts.npy", np.array(starts))


class Store(Sequence[Item]):
    """A sequence of the items that `write_store` wrote. Each access reads an item from disk.

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
        return Store, (self._folder,)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, index: int | slice) -> Any:
        indices = range(len(self))[index]
        if isinstance(indices, range):
            return [self[i] for i in indices]
        with _clear_errors(self._folder):
            return pickle.loads(self._bytes[self._starts[indices] : self._starts[indices + 1]])


def read_item(file: Path) -> Any:
    """Return what is pickled in a file beside a store. Raises as `Store`."""
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
