"""How a command ends: its exit status, and errors as a person reads them."""

import sys
from collections.abc import Callable

from rlhf_data.errors import ConfigError, DataError, RlhfError

SUCCESS, FAILURE, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130


def exit_status(command: Callable[[], int]) -> int:
    """Run `command` and return its exit status; an error that is meant for the user goes to stderr without a traceback.

    2 stands for input that cannot be used, 1 for a run that failed, 130 for Ctrl-C.
    """
    try:
        return command()
    except (ConfigError, DataError) as error:
        _show(error)
        return BAD_INPUT
    except RlhfError as error:
        _show(error)
        return FAILURE
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED


def _show(error: RlhfError) -> None:
    print(f"error: {error}", file=sys.stderr, flush=True)
