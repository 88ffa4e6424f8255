"""Exit statuses of commands, and how errors are shown to the user."""

import signal
import sys
from collections.abc import Callable, Sequence

from rlhf_data.errors import ConfigError, DataError, RlhfError
from rlhf_data.safety import visible
from rlhf_rollout.host import wait_passively

SUCCESS, FAILURE, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
_SIGNALLED = 128  # plus the number of a signal: the exit status of a process that the signal ended


def exit_status(command: Callable[[Sequence[str]], int], argv: Sequence[str] | None) -> int:
    """Run `command` and return its exit status: 2 for bad input, 1 for a run that failed, 130 after Ctrl-C, 143
    after SIGTERM.

    An error for the user (`RlhfError`) is printed to stderr without a traceback.

    Args:
        command: takes the words of the command line; returns an exit status.
        argv: those words; None for the process's own.
    """
    wait_passively()
    try:
        return command(sys.argv[1:] if argv is None else argv)
    except RlhfError as error:
        print(visible(f"error: {error}"), file=sys.stderr, flush=True)
        return BAD_INPUT if isinstance(error, ConfigError | DataError) else FAILURE
    except KeyboardInterrupt as interrupt:
        print("\ninterrupted", file=sys.stderr)
        return _SIGNALLED + getattr(interrupt, "signal_number", signal.SIGINT)
