"""The guard of a worker: starts the worker, forwards its output, and ends all of its processes with it.

`guarded.py` runs this file as a script. It uses the standard library only, so that it takes a few MiB and milliseconds.

Orphans of the worker become children of the guard, also those that have left its session. So the guard ends them all
when the worker ends, when it receives SIGTERM, and some seconds after its own parent is gone.
"""

import codecs
import contextlib
import ctypes
import importlib
import json
import os
import resource
import select
import signal
import socket
import stat
import sys
import time

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PARENT_CHECK_S = 1.0  # between two looks at whether the parent is alive
_CLOSE_TIMEOUT_S = 5.0  # in which a worker whose parent is gone may close what it has open
_KILL_TIMEOUT_S = 5.0
_LOG_BYTES = 10 * 2**20  # size of a log file beyond which output is dropped
_TERMINAL_BYTES = 2**14  # what one worker may write to the terminal


class _Output:
    """Forwards what the worker prints to a log file or, without one, to standard error, up to a limit.

    The limit of a file is its size, since several workers may write to it.
    """

    def __init__(self, log_path: str) -> None:
        self.pipe, self.worker_end = os.pipe()  # the open end of the worker means that reading never meets an end
        os.set_blocking(self.pipe, False)
        self._log_path = log_path
        self._file: int | None = None
        self._num_shown = 0
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def forward(self) -> bool:
        """Copy a piece of what the worker has printed; return False when there is none."""
        try:
            data = os.read(self.pipe, 2**16)
        except BlockingIOError:
            return False
        if self._file is None:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            self._file = os.open(self._log_path, flags, 0o600) if self._log_path else 2
        state = os.fstat(self._file)
        is_file = stat.S_ISREG(state.st_mode)
        room = _LOG_BYTES - state.st_size if is_file else _TERMINAL_BYTES - self._num_shown
        kept = data[: max(room, 0)]
        self._num_shown += len(kept)
        if not is_file:
            # Without escape sequences and other controls: the texts of a model could steer the terminal.
            kept = "".join(char for char in self._decode(kept) if char.isprintable() or char in "\t\n").encode()
        if 0 < room < len(data):
            kept += b"\n[further output is left out]\n"
        with contextlib.suppress(OSError):  # a full disk or a closed terminal must not end the worker
            os.write(self._file, kept)
        return True


def main(connection: int, log_path: str, memory_bytes: int) -> None:
    """Run the worker until it ends or must end. This process then ends in the same way as the worker.

    Args:
        connection: descriptor of the worker's end of the connection.
        log_path: file for what the worker prints; empty for standard error.
        memory_bytes: limit for the data of each process of the worker.
    """
    parent = os.getppid()
    output = _Output(log_path)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    worker = os.fork()
    if not worker:
        _run_worker(connection, output, memory_bytes)
        return
    os.close(connection)
    wake, wake_end = os.pipe()
    os.set_blocking(wake_end, False)
    signal.set_wakeup_fd(wake_end)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    status = _reap(worker)
    deadline = float("inf")
    while status is None and time.monotonic() < deadline:
        if os.getppid() != parent:
            deadline = min(deadline, time.monotonic() + _CLOSE_TIMEOUT_S)
        ready, _, _ = select.select([output.pipe, wake], [], [], _PARENT_CHECK_S)
        if output.pipe in ready:
            output.forward()
        if wake in ready and signal.SIGTERM in os.read(wake, 64):
            break
        status = _reap(worker)
    _kill_all()
    while output.forward():
        pass
    _end_like(status)


def _run_worker(connection: int, output: _Output, memory_bytes: int) -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for descriptor in (1, 2):
        os.dup2(output.worker_end, descriptor)
    os.set_inheritable(connection, False)  # programs that the code starts do not get it
    with contextlib.suppress(ValueError):  # a lower limit is in force already
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    with socket.socket(fileno=connection) as ours:
        with ours.makefile("rb") as lines:
            first = json.loads(lines.readline())
        sys.path[:] = first["path"]
        importlib.import_module(first["program"]).serve(ours, first)


def _reap(worker: int) -> int | None:
    """Collect the children that have ended; return the worker's exit code, or None unless it is among them."""
    code = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == worker:
                code = os.waitstatus_to_exitcode(ended[1])
    return code


def _kill_all() -> None:
    """Kill all children, and the orphans that thereby become children, until there are none."""
    deadline = time.monotonic() + _KILL_TIMEOUT_S
    while time.monotonic() < deadline:
        for child in _children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.005)


def _children() -> list[int]:
    """Return the process ids of this process's children."""
    children = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                # The name of the program comes before the parent's id. It is in parentheses and may hold any byte.
                parent = int(file.read().rpartition(b")")[2].split()[1])
                if parent == os.getpid():
                    children.append(int(name))
    return children


def _end_like(code: int | None) -> None:
    """End with an exit status, or by the signal whose negative number `code` is."""
    if code is not None and code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the worker has dumped its own memory if that is wanted
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code or 0)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
