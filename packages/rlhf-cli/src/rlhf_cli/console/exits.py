"""How the commands of `rlhf` end."""

import sys
from collections.abc import Callable, Sequence

from rlhf_data.options import exits
from rlhf_rollout.host import wait_passively

SUCCESS, BAD_INPUT = exits.SUCCESS, exits.BAD_INPUT


def exit_status(command: Callable[[Sequence[str]], int], argv: Sequence[str] | None) -> int:
    """Run `command` and return its exit status; see `rlhf_data.options.exits.exit_status`.

    Args:
        command: takes the words of the command line; returns an exit status.
        argv: those words; None for the process's own.
    """
    wait_passively()
    return exits.exit_status(lambda: command(sys.argv[1:] if argv is None else argv))
