"""Finds and ends what dead runs have left on this machine: processes of users' code whose guard died with the run.

Every guarded process and all that it starts have the variable `MARK` in their environment. It names the process that
started them, the owner, so that /proc shows which of them have outlived it. Linux only.
"""

import contextlib
import logging
import os
import signal
import time

MARK = "RLHF_STARTED_BY"
# In this time the guards of a run that has just died let its environments close, and end its processes themselves.
GUARDS_S = 15.0
_KILL_S = 5.0
_LOGGER = logging.getLogger(__name__)


def own_mark() -> str:
    """Return the value of `MARK` for what this process starts; empty without /proc."""
    try:
        return f"{os.getpid()}:{_start_of(os.getpid())}:{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def sweep() -> dict[int, str]:
    """End processes of this user whose owner is gone, with a warning; return their command lines by process id.

    Blocks for up to 20 s if there are any. The processes of an owner that lives, or that other namespaces of process
    ids have numbered, are left alone. So are those of the owner that started this process itself.
    """
    deadline = time.monotonic() + GUARDS_S
    while _leftovers() and time.monotonic() < deadline:
        time.sleep(0.1)
    deadline = time.monotonic() + _KILL_S
    ended: dict[int, str] = {}
    while (found := _leftovers()) and time.monotonic() < deadline:
        for process_id in found:
            with contextlib.suppress(OSError):  # it has ended by itself
                ended[process_id] = _end(process_id) or ended.get(process_id, "")
        time.sleep(0.05)  # they are gone, or have started others before they were ended
    if any(ended.values()):
        names = "; ".join(f"{process_id} ({command})" for process_id, command in ended.items())
        _LOGGER.warning("ended processes that an earlier run had left on this machine: %s", names)
    return ended


def _leftovers() -> list[int]:
    """Return the ids of processes that have outlived their owner."""
    found = []
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        # It has ended, this user may not read its environment, or somebody else has written the mark.
        with contextlib.suppress(OSError, OverflowError):
            if name.isdigit() and _is_left(int(name)):
                found.append(int(name))
    return found


def _is_left(process_id: int) -> bool:
    if os.stat(f"/proc/{process_id}").st_uid != os.getuid():
        return False
    prefix = f"{MARK}=".encode()
    mark = next((part for part in _read(process_id, "environ").split(b"\0") if part.startswith(prefix)), prefix)
    owner, _, rest = os.fsdecode(mark.removeprefix(prefix)).partition(":")
    start, _, namespace = rest.partition(":")
    if not owner.isdigit() or namespace != os.readlink("/proc/self/ns/pid"):
        return False
    return os.fsdecode(mark) != f"{MARK}={os.environ.get(MARK)}" and _start_of(int(owner)) != start


def _end(process_id: int) -> str:
    """Kill a process that has outlived its owner and return its command line; empty if it is none, or none any more."""
    descriptor = os.pidfd_open(process_id)  # the process that is looked at is the one that is killed
    try:
        if not _is_left(process_id):
            return ""
        command = _read(process_id, "cmdline").replace(b"\0", b" ").decode(errors="replace")
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        return "".join(filter(str.isprintable, command))[:80].strip() or "?"
    finally:
        os.close(descriptor)


def _start_of(process_id: int) -> str:
    """Return when a process started, in clock ticks since the machine did; empty if it has ended."""
    try:
        os.kill(process_id, 0)  # another user's process, which /proc may hide, raises PermissionError: it lives
        # The name of the program, in parentheses, may hold any byte. The state is the first value after it.
        values = _read(process_id, "stat").rpartition(b")")[2].split()
    except (ProcessLookupError, FileNotFoundError):
        return ""
    return "" if values[0] in (b"Z", b"X") else values[19].decode()


def _read(process_id: int, name: str) -> bytes:
    with open(f"/proc/{process_id}/{name}", "rb") as file:
        return file.read()
