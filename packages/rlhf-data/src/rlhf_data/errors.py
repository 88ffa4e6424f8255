"""The errors of all rlhf packages. A message says what is wrong; after a blank line, `hint:` says what to do."""

import difflib
from collections.abc import Collection, Iterable
from pathlib import Path


class RlhfError(Exception):
    """Base of all errors that a user should read. `hint` says what to do about the error."""

    def __init__(self, message: str, *, hint: str | None = None):
        super().__init__(with_hint(message, hint))


class ConfigError(RlhfError, ValueError):
    """An option or a combination of options that cannot work."""


class FeatureError(ConfigError):
    """An option asks for a feature that is not available."""


class DataError(RlhfError, ValueError):
    """A file, row or record that cannot be used."""


class EngineError(RlhfError, RuntimeError):
    """A generation or training engine failed."""


class RewardError(RlhfError, RuntimeError):
    """A reward function cannot be used, or scored nothing."""


class WeightSyncError(RlhfError, RuntimeError):
    """Weights do not fit the generation engine. One that they did not reach raises EngineError."""


class CheckpointError(RlhfError, RuntimeError):
    """A checkpoint or model folder cannot be written or read."""


def with_hint(message: str, hint: str | None = None) -> str:
    """Return `message`, followed by a blank line and `hint: ...` if there is a hint."""
    return f"{message}\n\nhint: {hint}" if hint else message


def installs(requirement: str) -> str:
    """Return the hint that installs a package of this project with an extra, such as `rlhf-data[hf]`.

    The packages are on no index, where anybody could take their names: the hint names the folder in a checkout.
    """
    return f"in a checkout, pip install './packages/{requirement}'"


def first_line(error: BaseException) -> str:
    """Return the type of an error and the first line of its message, such as "RuntimeError: out of memory"."""
    line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {line}"


def joined(messages: Iterable[str], separator: str, hint: str | None = None) -> str:
    """Return several messages as one, with one hint at the end: theirs, each once, and `hint`."""
    apart = [message.partition("\n\nhint: ") for message in messages]
    hints = dict.fromkeys(part for part in (*(theirs for _, _, theirs in apart), hint) if part)
    return with_hint(separator.join(text for text, _, _ in apart), "; ".join(hints))


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name closest to `name`, or None if none is close."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return matches[0] if matches else None


def unknown(kind: str, name: str, known: Iterable[str], *, otherwise: str | None = None) -> str:
    """Return the message for an unknown name, with the known names; the hint is the nearest of them, or `otherwise`."""
    known = sorted(known)
    guess = nearest(name, known)
    hint = f"did you mean `{guess}`?" if guess else otherwise
    return with_hint(f"unknown {kind} `{name}`; known: {', '.join(known)}", hint)


def check_name(kind: str, name: str, known: Collection[str]) -> None:
    """Raise ConfigError for a name that is not among the `known` ones."""
    if name not in known:
        raise ConfigError(unknown(kind, name, known))


def missing_file(kind: str, path: str | Path) -> str:
    """Return the message for a missing file, with the most similar name in its folder as the hint."""
    path = Path(path)
    if path.is_dir():
        return with_hint(f"{kind} {path} is a folder, not a file", "name a file in it")
    if path.is_symlink():
        return with_hint(f"{kind} {path} does not exist", f"it is a link to {path.readlink()}, which is missing")
    folder = path.parent
    if not folder.is_dir():
        return with_hint(f"{kind} {path} does not exist", f"there is no folder {folder.absolute()}")
    guess = nearest(path.name, (entry.name for entry in folder.iterdir()))
    hint = f"did you mean {folder / guess}?" if guess else f"`ls {folder.absolute()}` shows what is there"
    return with_hint(f"{kind} {path} does not exist", hint)
