"""How a command ends: its exit status, and errors as a person reads them."""

import sys
from collections.abc import Callable, Sequence

from rlhf_data.errors import ConfigError, DataError, RlhfError
from rlhf_rollout.host import wait_passively

SUCCESS, FAILURE, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130


def exit_status(command: Callable[[Sequence[str]], int], argv: Sequence[str] | None) -> int:
    """Run `command` on `argv`, None for the process's own, and return its exit status.

    2 stands for input that cannot be used, 1 for a run that failed, 130 for Ctrl-C. An error that is meant for the user
    goes to stderr without a traceback.
    """
    wait_passively()
    try:
        return command(sys.argv[1:] if argv is None else argv)
    except RlhfError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return BAD_INPUT if isinstance(error, ConfigError | DataError) else FAILURE
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED
