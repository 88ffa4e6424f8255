"""The folders of Ray's sessions on this machine, and the processes of runs that have ended, which Ray leaves behind."""

import fcntl
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LOCK = "rlhf-run.lock"  # in the session folder of a cluster that a run has started; locked while the run lives


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock on the file `path`, which this creates, for the time of a `with` block or until the process ends."""
    draft = path.with_suffix(".draft")
    with draft.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        draft.rename(path)  # others see the file only when it is locked
        yield


def sweep(folder: Path) -> None:
    """Remove the session folders and processes of runs that have ended: a run holds a lock as long as it lives."""
    for path in folder.glob(f"session_*/{LOCK}"):
        with suppress(OSError), path.open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            kill(_ray_processes_in(path.parent))
            for other in path.parent.iterdir():
                if other.is_dir() and not other.is_symlink():
                    shutil.rmtree(other, ignore_errors=True)
                elif other != path:
                    other.unlink(missing_ok=True)
            if list(path.parent.iterdir()) == [path]:  # else the next sweep finds the rest by the lock
                shutil.rmtree(path.parent, ignore_errors=True)


def _ray_processes_in(session: Path) -> set[int]:
    """Return the ids of Ray's agents, titled `ray::`, with a log in a session folder: they outlive a killed driver."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (process / "cmdline").read_bytes().startswith(b"ray::"):
                for link in (process / "fd").iterdir():
                    with suppress(OSError):  # this file has been closed
                        if link.readlink().is_relative_to(session):
                            found.add(int(process.name))
    return found


def own_sessions() -> set[Path]:
    """Return the session folders of clusters that this process has started."""
    return set(Path(sessions_home(), "ray").glob(f"session_*_{os.getpid()}"))


def sessions_home() -> str:
    """Return the folder in which Ray makes its own for sessions."""
    return os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"


def children() -> set[int]:
    """Return the ids of this process's child processes."""
    return {int(pid) for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()}


def kill(pids: set[int]) -> None:
    """Kill the processes that a failed start of Ray left behind, which would slow the next attempt."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
