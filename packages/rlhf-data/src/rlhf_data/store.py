"""Pickled objects in a folder, read one by one when they are used, so that a data set may exceed the memory."""

import pickle
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

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
    """A sequence of the items that `write_store` wrote. Each access reads an item from disk."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
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
        return pickle.loads(self._bytes[self._starts[indices] : self._starts[indices + 1]])
