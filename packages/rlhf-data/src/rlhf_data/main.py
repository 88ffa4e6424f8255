"""The command `rlhf-data`: shows what data files contain and which tokens a model would be trained on."""

import sys
from collections.abc import Sequence

from rlhf_data.command_line import CommandLine, to_toml
from rlhf_data.errors import RlhfError, unknown
from rlhf_data.inspection import InspectConfig, run
from rlhf_data.safety import visible

SUCCESS, BAD_INPUT, INTERRUPTED = 0, 2, 130
COMMANDS = {"inspect": "count, measure and show the rows of data files"}
COMMAND_LINE = CommandLine(
    config=InspectConfig,
    prog="rlhf-data inspect",
    description="Count the rows of data files, measure them in tokens, and show one as a model is trained on it.",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, or 2 when it cannot run."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        lines = "\n".join(f"  {name}  {title}" for name, title in COMMANDS.items())
        print(f"usage: rlhf-data COMMAND [flags]\n\n{lines}\n\n`rlhf-data COMMAND --help` lists a command's flags.")
        return SUCCESS
    try:
        if words[0] not in COMMANDS:
            print(visible(f"error: {unknown('command', words[0], COMMANDS)}"), file=sys.stderr)
            return BAD_INPUT
        return _inspect(words[1:])
    except RlhfError as error:
        print(visible(f"error: {error}"), file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED


def _inspect(argv: Sequence[str]) -> int:
    parsed = COMMAND_LINE.parse(argv)
    for notice in parsed.notices:
        print(f"notice: {notice}", file=sys.stderr)
    if not parsed.dry_run:
        return run(parsed.config)
    print(to_toml(parsed.config))
    for error in parsed.missing:
        print(f"still missing: {error}".replace("\n\n", "\n"), file=sys.stderr)
    return SUCCESS


if __name__ == "__main__":
    sys.exit(main())
