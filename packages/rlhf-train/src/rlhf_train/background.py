"""Writes files on a thread while the run goes on."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import BoundedSemaphore

from rlhf_data.errors import RlhfError


def cannot_write(path: object, error: Exception) -> RlhfError:
    """Return the error for a file of a run that cannot be written, for example because the disk is full."""
    return RlhfError(f"{path} cannot be written: {error}", hint="free space there, or use another ``save_path``")


class BackgroundWriter:
    """Calls functions that write to one file, one after the other, on a thread of its own.

    Everything submitted is written even when the run ends by an exception or Ctrl-C: `close` waits for it, and without
    `close` the interpreter waits at exit. After a failed write, later ones are skipped, so that the file has no gap in
    the middle.

    Args:
        describe: turns the exception of a failed write into the error for the user.
        max_pending: largest number of waiting writes. `submit` blocks at this number, which bounds the memory that
            waiting records take.
    """

    def __init__(self, describe: Callable[[Exception], RlhfError], *, max_pending: int = 4) -> None:
        self._describe = describe
        # An executor, because the interpreter joins its threads at exit; daemon threads would be killed.
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="writer")
        self._room = BoundedSemaphore(max_pending)
        self._failure: Exception | None = None

    def submit(self, write: Callable[[], None]) -> None:
        """Call `write` after everything submitted earlier.

        Raises the error that `describe` returns when an earlier write failed.
        """
        self._check()
        self._room.acquire()
        self._executor.submit(self._run, write)

    def written(self) -> Future[None]:
        """Return a future that is done once everything submitted so far is written, or has failed."""
        return self._executor.submit(lambda: None)

    def close(self, finish: Callable[[], None]) -> None:
        """Wait until everything is written, then call `finish`, even when a write failed.

        Raises the error that `describe` returns when a write or `finish` failed.
        """
        self._executor.shutdown(wait=True)
        try:
            finish()
        except Exception as error:
            self._failure = self._failure or error
        self._check()

    def _run(self, write: Callable[[], None]) -> None:
        try:
            if self._failure is None:
                write()
        except Exception as error:
            self._failure = error
        finally:
            self._room.release()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._describe(self._failure) from self._failure
