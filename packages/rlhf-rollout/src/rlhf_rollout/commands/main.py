"""The command `rlhf-rollout`: generates, scores, serves, measures and chats, with any engine and any reward."""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from rlhf_data.errors import ConfigError, installs
from rlhf_data.options.command_line import CommandLine, show_parsed
from rlhf_data.options.declare import Config, options
from rlhf_data.options.exits import SUCCESS, run_command
from rlhf_data.pretrained import check_code
from rlhf_rollout.commands.configs import (
    WITH_MODEL,
    BenchConfig,
    ChatConfig,
    EngineServerConfig,
    GenerateConfig,
    ScoreConfig,
    ServeConfig,
)
from rlhf_rollout.commands.terminal import TERMINAL, log_file
from rlhf_rollout.host import wait_passively


@dataclass(frozen=True, slots=True)
class RolloutCommand:
    """One command. Its module in this folder has `run(config)`, which returns the exit status.

    A module with data has `check_data(config)` for dry runs.

    Attributes:
        name: the word that calls it, and its module's name.
        title: one line for the list of commands.
        config: the class of its configuration.
        extra: the extra of this package that its module needs.
    """

    name: str
    title: str
    config: type[Config]
    extra: str | None = None

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
        show_parsed(parsed)
        if parsed.missing or parsed.unavailable:
            return SUCCESS
        config = complete(parsed.config)
        if parsed.dry_run:
            module = self._module()
            self._check_code(config)
            if hasattr(module, "check_data"):
                module.check_data(config)
            return SUCCESS
        output_path = config.output.output_path if "output" in type(config).model_fields else None
        # Captured from here on, because importing the command's module loads libraries that write to the terminal.
        with TERMINAL.captured(log_file(self.name, output_path)):
            with TERMINAL.progress.doing("loading libraries"):
                module = self._module()
            return module.run(config)

    def _check_code(self, config: Config) -> None:
        """Raise ConfigError if a model in a folder needs code of its own, which may not run."""
        kind = config.engine.engine if "engine" in type(config).model_fields else "vllm"
        for option in options(type(config)):
            name = getattr(getattr(config, option.section), option.name)
            # The other kinds of engines load no model.
            if option.names_model and name and (option.name != "pretrain" or kind in WITH_MODEL):
                check_code(name)

    def _module(self) -> Any:
        try:
            return importlib.import_module(f"rlhf_rollout.commands.{self.name}")
        except ModuleNotFoundError as error:
            if self.extra is None or (error.name or "").startswith("rlhf_"):
                raise
            message = f"{self.name} needs the module {error.name}, which is not installed"
            raise ConfigError(message, hint=installs(f"rlhf-rollout[{self.extra}]")) from None


_ALL = (
    RolloutCommand("generate", "sample responses to prompts, and make training data of them", GenerateConfig),
    RolloutCommand("score", "score the answers in a file", ScoreConfig),
    RolloutCommand("serve", "serve an engine over HTTP", EngineServerConfig, extra="server"),
    RolloutCommand("serve_rm", "serve a reward, such as a reward model, over HTTP", ServeConfig, extra="server"),
    RolloutCommand("bench", "measure an engine: tokens per second, latency, lengths", BenchConfig),
    RolloutCommand("chat", "talk to a model in the terminal", ChatConfig),
)
COMMANDS: Mapping[str, RolloutCommand] = MappingProxyType({command.name: command for command in _ALL})


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its status: 0, 1 when some prompts failed, 2 when it cannot run, 130 after Ctrl-C."""
    wait_passively()
    titles = {name: command.title for name, command in COMMANDS.items()}

    def run(name: str, words: list[str]) -> int:
        return COMMANDS[name].run(COMMANDS[name].command_line("rlhf-rollout"), words)

    return run_command("rlhf-rollout", titles, argv, run)


if __name__ == "__main__":
    sys.exit(main())
