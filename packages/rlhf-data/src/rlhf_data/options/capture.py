"""Keeps what libraries write away from the terminal, in a log file."""

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Thread
from typing import TextIO

_logs: list[int] = []  # descriptors of the logs of the `captured` blocks in which this process is


def keep(text: str) -> None:
    """Append what the user is told, as one line, to the log of the `captured` block around; to none without a block."""
    if _logs:
        _append(_logs[-1], text)


def keep_later(text: Callable[[], str]) -> None:
    """Append what `text` returns to the log of the `captured` block around; to none without a block.

    `text` is called on a thread, because nothing waits for it. Its line reaches that log even if the block has ended.
    """
    if not _logs:
        return
    log = os.dup(_logs[-1])

    def append() -> None:
        try:
            _append(log, text())
        finally:
            os.close(log)

    Thread(target=append, daemon=True).start()


def _append(log: int, text: str) -> None:
    os.write(log, (" ".join(text.split()) + "\n").encode("utf-8", "backslashreplace"))


@contextmanager
def captured(log: Path) -> Iterator[tuple[TextIO, TextIO]]:
    """Append what this process and its children write to the file `log`, for the time of a `with` block.

    The file descriptors of stdout and stderr are redirected, so that the file receives what libraries in C write, too,
    besides Python's warnings and logging. What `rlhf_rollout` itself logs is for the user and goes to the terminal.
    Yields streams for stdout and stderr that still reach the user. Several processes may append to one file. Raises
    OSError when the file or its folder cannot be created.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        file = stack.enter_context(log.open("ab"))
        out = stack.enter_context(_redirected(sys.stdout, 1, file.fileno()))
        err = stack.enter_context(_redirected(sys.stderr, 2, file.fileno()))
        stack.enter_context(_warnings_shown(err))
        _logs.append(file.fileno())
        stack.callback(_logs.pop)
        yield out, err


@contextmanager
def released(out: TextIO, err: TextIO) -> Iterator[None]:
    """Give stdout and stderr back to the user for the time of a `with` block inside one of `captured`.

    `out` and `err` are the streams that `captured` yielded. `input` needs this: it edits the line on descriptor 1.
    """
    with ExitStack() as stack:
        for stream, descriptor, user in ((sys.stdout, 1, out), (sys.stderr, 2, err)):
            if user is not stream:
                stack.enter_context(_redirected(stream, descriptor, user.fileno()))
        yield


@contextmanager
def _warnings_shown(err: TextIO) -> Iterator[None]:
    """Write what `rlhf_rollout` logs as a warning to `err`: it tells the user what a program waits for."""
    handler = logging.StreamHandler(err)
    handler.setFormatter(logging.Formatter("warning: %(message)s"))
    logger = logging.getLogger("rlhf_rollout")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


@contextmanager
def _redirected(stream: TextIO, descriptor: int, target: int) -> Iterator[TextIO]:
    """Make `descriptor` a copy of `target`; yield a stream that writes where `stream` wrote before."""
    # Text that is still buffered was written before the change, so it must reach the old destination.
    stream.flush()
    kept = os.dup(descriptor)
    os.dup2(target, descriptor)
    try:
        if _descriptor_of(stream) == descriptor:
            with open(kept, "w", encoding=stream.encoding, errors=stream.errors, buffering=1, closefd=False) as user:
                yield user
        else:  # sys.stdout was replaced, by a test for example: what is written to it does not pass the descriptor
            yield stream
    finally:
        stream.flush()
        os.dup2(kept, descriptor)
        os.close(kept)


def _descriptor_of(stream: TextIO) -> int | None:
    try:
        return stream.fileno()
    except (OSError, ValueError, AttributeError):
        return None
