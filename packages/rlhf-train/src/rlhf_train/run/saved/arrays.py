"""Arrays in a binary file, one behind the other, which ends with a seal. Torch-free."""

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_data.errors import CheckpointError
from rlhf_rollout.unfinished import Written

SEAL_BYTES = 16
_BUFFER_BYTES = 2**20
_DAMAGED = "copy all files of this checkpoint again; or remove its folder, and the run continues from the one before"


class ArrayWriter:
    """Writes arrays into a new file.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=_BUFFER_BYTES)
        self._size = 0

    def write(self, values: np.ndarray | Written) -> list[Any]:
        """Append an array and return where it is, as JSON values for `ArrayReader.read`."""
        found = values.copy() if isinstance(values, Written) else np.ascontiguousarray(values)
        name, on_disk = _types(found.dtype)
        if gap := -self._size % found.itemsize:  # numbers in mapped memory must be aligned
            self._append(bytes(gap), gap)
        place = [self._size, name, list(found.shape)]
        self._append(found.astype(on_disk, copy=False), found.nbytes)
        return place

    def write_bytes(self, data: bytes) -> list[Any]:
        """Append bytes as an array of uint8."""
        place = [self._size, "uint8", [len(data)]]
        self._append(data, len(data))
        return place

    def close(self, seal: bytes = b"") -> None:
        """Close the file behind its seal: `SEAL_BYTES` bytes that tell which state it belongs to, or none if that
        state is not complete."""
        try:
            self._file.write(seal)
        finally:
            self._file.close()

    def _append(self, data: bytes | np.ndarray, size: int) -> None:
        self._file.write(data)
        self._size += size


class ArrayReader:
    """Reads what `ArrayWriter` wrote. Arrays are copies: NFS removes no file that a process has mapped.

    Args:
        path: of the file.
        seal: which it must end with; b"" for a file of a version that wrote none.

    Raises:
        CheckpointError: the file is missing, cannot be read, or has another seal.
    """

    def __init__(self, path: Path, seal: bytes) -> None:
        self._path = path
        try:
            size = path.stat().st_size
            # No memory can be mapped to an empty file.
            found = np.memmap(path, mode="r").view(np.ndarray) if size else np.zeros(0, np.uint8)
        except FileNotFoundError:
            raise damaged(path, "is missing") from None
        except OSError as error:
            raise damaged(path, f"cannot be read: {error.strerror}") from error
        if seal and not size:
            raise damaged(path, "is empty")
        self._bytes = found[: size - len(seal)]
        if found[size - len(seal) :].tobytes() != seal:
            raise damaged(path, "is cut off, or belongs to another checkpoint")
        self._end = 0

    def read(self, place: Sequence[Any]) -> np.ndarray:
        """Return an array, which is read-only. Raises CheckpointError for a place where there is none."""
        start, name, shape = place
        dtype = np.dtype(name).newbyteorder("<")
        end = start + math.prod(shape) * dtype.itemsize
        if min(start, *shape) < 0 or end > len(self._bytes):
            what = f"has {len(self._bytes)} bytes, and no array at {place}"
            raise damaged(self._path, f"{what}: it is cut off, or belongs to another checkpoint")
        self._end = max(self._end, end)
        array = self._bytes[start:end].view(dtype).reshape(shape).copy()
        array.flags.writeable = False
        return array

    def check_end(self) -> None:
        """Raise CheckpointError unless the file ends with the last array that was read."""
        if self._end != len(self._bytes):
            what = f"has {len(self._bytes)} bytes, not {self._end}: it belongs to another checkpoint"
            raise damaged(self._path, what)


def damaged(path: Path, what: str) -> CheckpointError:
    """Return the error for a file of a checkpoint that is not as it was written."""
    return CheckpointError(f"{path} {what}", hint=_DAMAGED)


@cache
def _types(dtype: np.dtype) -> tuple[str, np.dtype]:
    """Return the name of a type and its little-endian form; numpy takes longer for both than for a small array."""
    return dtype.name, dtype.newbyteorder("<")
