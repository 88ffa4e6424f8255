"""Writing beside the work: a run goes on while its files are written."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import BoundedSemaphore

from rlhf_data.errors import RlhfError


def cannot_write(path: object, error: Exception) -> RlhfError:
    """Return the error for a file of a run that cannot be written, such as on a full disk."""
    return RlhfError(f"{path} cannot be written: {error}", hint="free space there, or use another --save_path")


class BackgroundWriter:
    """Calls functions that write to one place, one after the other, on a thread of its own.

    What was submitted is written even when the run ends by an exception or Ctrl-C: `close` waits for it, and without a
    `close` the interpreter waits before it exits. After a failed write nothing more is written, so that a file never
    has a gap in the middle.

    Args:
        describe: from what a failed write raised to the error for the user.
        max_pending: writes that may wait; `submit` waits for room. It bounds the memory of records that wait.
    """

    def __init__(self, describe: Callable[[Exception], RlhfError], *, max_pending: int = 4) -> None:
        self._describe = describe
        # An executor, because the interpreter joins its threads at exit; daemon threads would be killed.
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="writer")
        self._room = BoundedSemaphore(max_pending)
        self._failure: Exception | None = None

    def submit(self, write: Callable[[], None]) -> None:
        """Call `write` after all that was submitted before. Raises what `describe` returns when a write failed."""
        self._check()
        self._room.acquire()
        self._executor.submit(self._run, write)

    def close(self, finish: Callable[[], None]) -> None:
        """Wait until everything is written, then call `finish`, whether or not a write failed. Raises what `describe`
        returns when one did, or `finish`."""
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
