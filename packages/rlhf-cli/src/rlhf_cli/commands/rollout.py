"""The commands of `rlhf-rollout` as part of `rlhf`, where they also accept `builtin`, the model and data that ship."""

from collections.abc import Sequence
from typing import Any

from rlhf_cli.console.exits import exit_status
from rlhf_cli.openrlhf.flags import adapt, flags_of
from rlhf_cli.paths import run_folder_notices, user_path, with_full_paths
from rlhf_data.options.command_line import CommandLine
from rlhf_data.options.declare import Config
from rlhf_rollout.commands.main import COMMANDS
from rlhf_rollout.commands.terminal import TERMINAL


def command_line(name: str) -> CommandLine[Any]:
    """Return the command line of the command called `name`."""
    return COMMANDS[name].command_line("rlhf", resolve=user_path, foreign=flags_of(name), adapt=adapt)


def main(name: str, argv: Sequence[str] | None = None) -> int:
    """Run the command called `name`; return its exit status."""
    return exit_status(lambda words: COMMANDS[name].run(command_line(name), words, _complete), argv)


def _complete(config: Config) -> Config:
    for notice in run_folder_notices(config):
        TERMINAL.say(f"notice: {notice}")
    return with_full_paths(config, keep_builtin=False)
