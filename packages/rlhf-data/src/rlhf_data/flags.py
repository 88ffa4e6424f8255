"""argparse whose errors are ours, for every command of the packages."""

import argparse
from collections.abc import Iterable
from typing import NoReturn

from rlhf_data.errors import ConfigError, unknown


class Parser(argparse.ArgumentParser):
    """An argument parser that raises ConfigError."""

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError with the message of argparse."""
        raise ConfigError(message, hint=f"`{self.prog} --help` lists the flags")

    @property
    def flags(self) -> list[str]:
        """All flags, as in `--name`."""
        return [name for action in self._actions for name in action.option_strings if name.startswith("--")]

    def check_flags(self, arguments: Iterable[str]) -> None:
        """Raise ConfigError, with the nearest one as its hint, for a flag that there is not."""
        for argument in arguments:
            flag = argument.partition("=")[0]
            if flag.startswith("--") and flag not in self.flags:
                raise ConfigError(unknown("option", flag, self.flags))
