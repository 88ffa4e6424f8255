"""The command `rlhf-rollout`: generates, scores, serves a reward, and chats, with any engine and any reward."""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from rlhf_data.command_line import CommandLine, to_toml
from rlhf_data.errors import RlhfError, unknown
from rlhf_data.options import Config
from rlhf_data.safety import visible
from rlhf_rollout.commands.configs import ChatConfig, GenerateConfig, ScoreConfig, ServeConfig
from rlhf_rollout.commands.terminal import TERMINAL, log_file
from rlhf_rollout.host import wait_passively

SUCCESS, BAD_INPUT, INTERRUPTED = 0, 2, 130


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutCommand:
    """One command. Its module in this folder has `make_job(config)`, and `run(job)`, which returns the exit status.

    Attributes:
        name: the word that calls it, and its module's name.
        title: one line for the list of commands.
        config: the class of its configuration.
    """

    name: str
    title: str
    config: type[Config]

    def command_line(self, prog: str, **options: Any) -> CommandLine[Any]:
        """Return the command line that follows `prog`; `options` are further attributes of `CommandLine`."""
        description = f"{self.title[0].upper()}{self.title[1:]}."
        return CommandLine(config=self.config, prog=f"{prog} {self.name}", description=description, **options)

    def run(
        self, line: CommandLine[Any], argv: Sequence[str], complete: Callable[[Any], Any] = lambda config: config
    ) -> int:
        """Run the command; return its exit status: 0, or 1 when some prompts failed.

        `complete` may replace names in the configuration, such as those of files that ship with the caller. Raises
        RlhfError when the command cannot run.
        """
        parsed = line.parse(argv)
        for notice in parsed.notices:
            print(f"notice: {notice}", file=sys.stderr)
        if parsed.dry_run:
            print(to_toml(parsed.config))
            for title, errors in (("cannot run yet", parsed.unavailable), ("still missing", parsed.missing)):
                for error in errors:
                    print(f"{title}: {error}".replace("\n\n", "\n"), file=sys.stderr)
        if parsed.missing or parsed.unavailable:
            return SUCCESS
        config = complete(parsed.config)
        if parsed.dry_run:
            self._module().make_job(config)
            return SUCCESS
        output_path = config.output.output_path if "output" in type(config).model_fields else None
        # Captured from here on, because importing the command's module loads libraries that write to the terminal.
        with TERMINAL.captured(log_file(self.name, output_path)):
            with TERMINAL.progress.doing("loading libraries"):
                module = self._module()
                job = module.make_job(config)
            return module.run(job)

    def _module(self) -> Any:
        return importlib.import_module(f"rlhf_rollout.commands.{self.name}")


COMMANDS: Mapping[str, RolloutCommand] = MappingProxyType(
    {
        command.name: command
        for command in (
            RolloutCommand(
                name="generate",
                title="sample responses to prompts, and make training data of them",
                config=GenerateConfig,
            ),
            RolloutCommand(name="score", title="score the answers in a file", config=ScoreConfig),
            RolloutCommand(
                name="serve_rm", title="serve a reward, such as a reward model, over HTTP", config=ServeConfig
            ),
            RolloutCommand(name="chat", title="talk to a model in the terminal", config=ChatConfig),
        )
    }
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its status: 0, 1 when some prompts failed, 2 when it cannot run, 130 after Ctrl-C."""
    wait_passively()
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        width = max(map(len, COMMANDS))
        lines = "\n".join(f"  {name.ljust(width)}  {command.title}" for name, command in COMMANDS.items())
        print(
            f"usage: rlhf-rollout COMMAND [flags]\n\n{lines}\n\n`rlhf-rollout COMMAND --help` lists a command's flags."
        )
        return SUCCESS
    try:
        if words[0] not in COMMANDS:
            print(visible(f"error: {unknown('command', words[0], COMMANDS)}"), file=sys.stderr)
            return BAD_INPUT
        command = COMMANDS[words[0]]
        return command.run(command.command_line("rlhf-rollout"), words[1:])
    except RlhfError as error:
        print(visible(f"error: {error}"), file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
