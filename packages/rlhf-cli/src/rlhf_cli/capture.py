"""What libraries write is kept from the terminal, in a log file of the run."""

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TextIO

from rlhf_cli.paths import LOG_FILE
from rlhf_data.errors import RlhfError


@contextmanager
def captured(folder: Path) -> Iterator[tuple[TextIO, TextIO]]:
    """Send what this process and those that it starts write to `folder`/log.txt, for the time of a `with` block.

    The file descriptors of stdout and stderr are redirected, so that libraries in C, Python's warnings and logging all
    land there. Yields streams for stdout and stderr that still reach the user. Several ranks append to one file. A
    folder that nothing else was written to is removed at the end, unless an unexpected error ended the block.
    """
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with ExitStack() as stack:
            log = stack.enter_context((folder / LOG_FILE).open("ab"))
            out = stack.enter_context(_redirected(sys.stdout, 1, log.fileno()))
            yield out, stack.enter_context(_redirected(sys.stderr, 2, log.fileno()))
    except (RlhfError, KeyboardInterrupt):
        _remove_unused(folder, is_new)
        raise
    else:
        _remove_unused(folder, is_new)


def _remove_unused(folder: Path, is_new: bool) -> None:
    if [path.name for path in folder.iterdir()] == [LOG_FILE]:
        (folder / LOG_FILE).unlink(missing_ok=True)
        if is_new:
            folder.rmdir()


@contextmanager
def _redirected(stream: TextIO, descriptor: int, target: int) -> Iterator[TextIO]:
    """Let a file descriptor be `target`; yield a stream that writes where `stream` wrote before."""
    stream.flush()
    kept = os.dup(descriptor)
    os.dup2(target, descriptor)
    try:
        if _descriptor_of(stream) == descriptor:
            with open(kept, "w", encoding=stream.encoding, errors=stream.errors, buffering=1, closefd=False) as user:
                yield user
        else:  # somebody replaced sys.stdout: what is written to it does not pass the descriptor
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
