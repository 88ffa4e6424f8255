"""A user's code: how it is named, found and imported, and how its errors are told."""

import ast
import importlib
import importlib.util
import os
import re
import sys
import traceback
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_data.errors import ConfigError, missing_file

_MAX_LINE = 1000
_MAX_DETAIL = 500  # length of an error's text, before its place in the file
_IN_FILE = re.compile(r"(?P<path>.+\.py)(?::(?P<name>\w+))?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Target:
    """Where a user's code is.

    Attributes:
        module: its name, the absolute path of a Python file, or the command line of a program.
        name: name of a function or class in it; "" where the code has a choice of names.
        argument: for a function that returns a reward function, its argument; else None.
    """

    module: str
    name: str = ""
    argument: str | None = None

    @property
    def is_file(self) -> bool:
        """Whether the module is a Python file."""
        return self.module.endswith(".py")


def parse_target(text: str, what: str, *, other: str = "", hint: str) -> Target:
    """Return the target of `FILE.py`, `FILE.py:NAME`, `module` or `module:NAME`. Nothing is imported.

    Args:
        text: what the user has written.
        what: names the user's code in messages, such as "reward".
        other: ends the message about a text that has none of these forms.
        hint: the hint of that message.

    Raises:
        ConfigError: the text has none of these forms, or there is no such file.
    """
    if in_file := _IN_FILE.fullmatch(text):
        path = Path(in_file["path"]).expanduser()
        if not path.is_file():
            raise ConfigError(missing_file(f"{what} file", path))
        return Target(str(path.absolute()), in_file["name"] or "")
    module, colon, name = text.partition(":")
    if not all(part.isidentifier() for part in [*module.split("."), name if colon else "x"]):
        raise ConfigError(f"{what} `{text}` is neither a Python file nor a module{other}", hint=hint)
    return Target(module, name)


def bound_names(path: Path, what: str) -> set[str]:
    """Return the names that a Python file binds, "*" among them if it imports all of a module.

    Raises ConfigError when it is not Python; `what` names the file in the message.
    """
    try:
        body = ast.parse(path.read_bytes(), str(path)).body
    except (SyntaxError, ValueError) as error:
        message = f"{what} {path} is not Python: {error}"
        raise ConfigError(message, hint=f"`python {path}` shows the place") from None
    return set(_bound_names(body))


def _bound_names(body: list[ast.stmt]) -> Iterator[str]:
    for part in (part for node in body for part in ast.walk(node)):
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield part.name
        elif isinstance(part, ast.Name):
            yield part.id
        elif isinstance(part, ast.alias):
            yield part.asname or part.name


def import_target(target: Target) -> Any:
    """Import the module of a target and return it. A file can import others from its folder."""
    if not target.is_file:
        return importlib.import_module(target.module)
    path = Path(target.module)
    # Behind the standard library, so that a file of the folder cannot take the place of one of its modules.
    library = os.path.dirname(os.__file__)
    places = [index for index, entry in enumerate(sys.path) if entry in (library, f"{library}/lib-dynload")]
    sys.path.insert(max(places, default=-1) + 1, str(path.parent))
    # The file must not replace a module that is imported under the same name.
    name = path.stem if path.stem.isidentifier() and path.stem not in sys.modules else f"rlhf_reward_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[name] = loaded
    spec.loader.exec_module(loaded)
    return loaded


def provide(name: str, **contents: Any) -> None:
    """Let `from NAME import ...` of users' files find `contents` in a module of OpenRLHF, such as `openrlhf.utils`."""
    for package in ("openrlhf", "openrlhf.utils"):
        if package not in sys.modules:
            sys.modules[package] = types.ModuleType(package)
            sys.modules[package].__path__ = []
    module = sys.modules.setdefault(name, types.ModuleType(name))
    vars(module).update(contents)


def one_line(text: str) -> str:
    """Return a text from outside as one line of at most 1,000 characters, in which unprintable ones are escaped."""
    plain = " ".join(text[: 4 * _MAX_LINE].replace("\n\nhint: ", "; hint: ").split())
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in plain)[:_MAX_LINE]


def explain(error: BaseException, target: Target) -> str:
    """Return a user's error as one line of some 500 characters, with the last line of their file in its traceback."""
    text = one_line(f"{type(error).__name__}: {error}")[:_MAX_DETAIL]
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == target.module]
    return f"{text} ({os.path.basename(target.module)}:{frames[-1].lineno})" if frames else text
