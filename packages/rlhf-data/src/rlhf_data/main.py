"""The command `rlhf-data`: shows what data files contain and which tokens a model would be trained on."""

import sys
from collections.abc import Sequence

from rlhf_data.inspection import InspectConfig, run
from rlhf_data.options.command_line import CommandLine, show_parsed
from rlhf_data.options.exits import SUCCESS, run_command
from rlhf_data.pretrained import check_code

COMMANDS = {"inspect": "count, measure and show the rows of data files"}
COMMAND_LINE = CommandLine(
    config=InspectConfig,
    prog="rlhf-data inspect",
    description="Count the rows of data files, measure them in tokens, and show one as a model is trained on it.",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, or 2 when it cannot run."""
    return run_command("rlhf-data", COMMANDS, argv, lambda name, words: _inspect(words))


def _inspect(words: Sequence[str]) -> int:
    parsed = COMMAND_LINE.parse(words)
    show_parsed(parsed)
    if not parsed.dry_run:
        return run(parsed.config)
    check_code(parsed.config.inspection.tokenizer or "")
    return SUCCESS


if __name__ == "__main__":
    sys.exit(main())
