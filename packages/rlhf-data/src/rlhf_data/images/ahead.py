"""Arrays that are read in threads, also before they are needed, and kept while there is room."""

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any

import numpy as np

MAX_KEPT_BYTES = 1 << 29  # per process
# Ranks share a host. Pillow and numpy work without the GIL, but what is around them does not.
_MAX_THREADS = 8

Arrays = Mapping[str, np.ndarray]


class ReadAhead:
    """Arrays by key, each read once in a thread and kept until others need its room. For use by any thread.

    Args:
        read: makes the arrays of a key.
        max_bytes: of all arrays that are kept; those that were not asked for the longest go first. Those that are
            being read come on top, at most one per thread.
    """

    def __init__(self, read: Callable[[Any], Arrays], max_bytes: int = MAX_KEPT_BYTES) -> None:
        self._read = read
        self._max_bytes = max_bytes
        self.clear()
        os.register_at_fork(after_in_child=self.clear)  # threads stay in the parent

    def clear(self) -> None:
        """Forget all arrays."""
        self._num_bytes = 0
        self._lock = threading.Lock()
        self._running: dict[Any, Future[Arrays]] = {}
        self._kept: OrderedDict[Any, tuple[int, Future[Arrays]]] = OrderedDict()  # with their bytes
        self._threads = ThreadPoolExecutor(min(_MAX_THREADS, len(os.sched_getaffinity(0))), "images")

    def start(self, keys: Iterable[Any]) -> None:
        """Begin to read keys, in their order, as far as half of the room goes. Errors are left to `get`."""
        with self._lock:
            mean_bytes = self._num_bytes // max(len(self._kept), 1)
        for key in islice(dict.fromkeys(keys), self._max_bytes // 2 // max(mean_bytes, 1)):
            self._future(key)

    def get(self, keys: Sequence[Any]) -> list[Arrays]:
        """Return the arrays of keys. Raises what reading the first one raised that could not be read."""
        return [future.result() for future in [self._future(key) for key in keys]]

    def run(self, function: Callable[..., Any], *arguments: Sequence[Any]) -> None:
        """Call a function with each of the arguments in turn, as `map` does, in the threads."""
        list(self._threads.map(function, *arguments))

    def _future(self, key: Any) -> "Future[Arrays]":
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key][1]
            if key not in self._running:
                self._running[key] = self._threads.submit(self._run, key)
            return self._running[key]

    def _run(self, key: Any) -> Arrays:
        try:
            arrays = self._read(key)
        except BaseException:
            with self._lock:
                del self._running[key]  # the next one who asks tries again
            raise
        num_bytes = sum(array.nbytes for array in arrays.values())
        with self._lock:
            self._kept[key] = num_bytes, self._running.pop(key)
            self._num_bytes += num_bytes
            while self._num_bytes > self._max_bytes:
                self._num_bytes -= self._kept.popitem(last=False)[1][0]
        return arrays
