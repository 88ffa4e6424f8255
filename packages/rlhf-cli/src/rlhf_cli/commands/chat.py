"""`chat`: talk to a model in the terminal."""

import sys
from collections.abc import Sequence

from rlhf_cli.tools import run_tool


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    return run_tool("chat", sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
