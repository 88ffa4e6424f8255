"""Exit statuses of commands, how errors are shown to the user, and the choice of a command."""

import atexit
import errno
import gc
import os
import re
import select
import signal
import sys
from collections.abc import Callable, Mapping, Sequence

from rlhf_data.errors import ConfigError, DataError, RlhfError, unknown
from rlhf_data.options.flag_names import FLAGS_OF_FIELDS
from rlhf_data.safety import visible

SUCCESS, FAILURE, BAD_INPUT = 0, 1, 2
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SIGNALLED = 128  # plus the number of a signal: the exit status of a process that the signal ended

_FIELD = re.compile(r"``([A-Za-z][\w./]*(?:=[^`\n]*)?)``")


def with_flags(text: str) -> str:
    """Return `text` with flags in place of the fields that libraries name in it, as ``field`` or ``field=value``."""

    def flag(found: re.Match[str]) -> str:
        name, _, value = found[1].partition("=")
        return FLAGS_OF_FIELDS.get(found[1]) or f"{FLAGS_OF_FIELDS.get(name, f'--{name}')} {value}".rstrip()

    return _FIELD.sub(flag, text)


def exit_status(command: Callable[[], int], *, failure: int = FAILURE) -> int:
    """Run `command` and return its exit status: 2 for bad input, `failure` for a run that failed, 130 after Ctrl-C, 143
    after SIGTERM, 141 when nobody reads stdout any more, as after `| head`.

    An error for the user (`RlhfError`) is printed to stderr without a traceback, and with flags for fields. So is that
    of a full disk, a quota or a limit of a file's size.
    """
    # The end of the process would search all that was imported for garbage, for up to a second.
    atexit.register(gc.freeze)
    try:
        status = command()
        if sys.stdout is not None:  # as after `>&-`
            sys.stdout.flush()  # the interpreter's own flush, at its end, would report a closed pipe
        return status
    except BrokenPipeError:
        if not _lets_go_of_closed_stdout():
            raise
        return _SIGNALLED + signal.SIGPIPE
    except RlhfError as error:
        print(with_flags(visible(f"error: {error}")), file=sys.stderr, flush=True)
        return BAD_INPUT if isinstance(error, ConfigError | DataError) else failure
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        text = f"{error.filename or 'a file'} cannot be written: {error.strerror}"
        hint = "free space where the command writes, or name another folder; commands with --resume go on with it"
        print(visible(f"error: {text}\n\nhint: {hint}"), file=sys.stderr, flush=True)
        return failure
    except KeyboardInterrupt as interrupt:
        print("\ninterrupted", file=sys.stderr)
        return _SIGNALLED + getattr(interrupt, "signal_number", signal.SIGINT)


def _lets_go_of_closed_stdout() -> bool:
    """Return whether nobody reads stdout any more; what is still written to it then goes nowhere."""
    poll = select.poll()
    try:
        poll.register(sys.stdout.fileno(), 0)
    except (OSError, ValueError, AttributeError):  # it was replaced by a stream without a descriptor, or closed
        return False
    if not poll.poll(0):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def run_command(
    prog: str, titles: Mapping[str, str], argv: Sequence[str] | None, run: Callable[[str, list[str]], int]
) -> int:
    """Run one of a program's commands; return its status: 2 when it cannot run, 130 after Ctrl-C, else its own.

    Args:
        prog: the program's name.
        titles: name of a command to one line about it, for the list that is printed when no command is given.
        argv: the words of the command line; None for the process's own.
        run: takes the name of a command and the words after it; returns an exit status.
    """
    words = list(sys.argv[1:] if argv is None else argv)

    def command() -> int:
        if not words or words[0] in ("-h", "--help"):
            width = max(map(len, titles))
            lines = "\n".join(f"  {name.ljust(width)}  {title}" for name, title in titles.items())
            print(f"usage: {prog} COMMAND [flags]\n\n{lines}\n\n`{prog} COMMAND --help` lists a command's flags.")
            return SUCCESS
        name, *flags = words
        if name not in titles:
            message = unknown("command", name, titles, otherwise=f"`{prog} --help` says what they do")
            print(visible(f"error: {message}"), file=sys.stderr)
            return BAD_INPUT
        return run(name, flags)

    return exit_status(command, failure=BAD_INPUT)
