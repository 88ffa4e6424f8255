"""argparse with this project's errors, flags of options, and flags of another program that are accepted beside them."""

import argparse
import difflib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NoReturn, get_args

from rlhf_data.errors import ConfigError, FeatureError, unknown, with_hint
from rlhf_data.options.declare import Option
from rlhf_data.options.flag_names import FLAGS_FOR_TRL

# Values by name of option. Those from a command line are text, which the schema converts.
Values = dict[str, Any]

# Words after a flag that switch its feature off.
UNASKED = ("0", "-1", "false", "None", "none")

_TRUE = "true"
_SIMILAR = 0.55  # share of common letters from which flags with a common word count as similar
_SAME_BUT_FOR_A_SLIP = 0.8  # likewise without a common word: probably a typing error


class Parser(argparse.ArgumentParser):
    """An argument parser that raises ConfigError."""

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError with the message of argparse."""
        raise ConfigError(message, hint=f"`{self.prog} --help` lists the flags")

    @property
    def flags(self) -> list[str]:
        """All flags that --help shows, each as `--name`."""
        shown = (action for action in self._actions if action.help != argparse.SUPPRESS)
        return [name for action in shown for name in action.option_strings if name.startswith("--")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """A flag of another program that a command accepts beside its own.

    Attributes:
        options: names of the options that it may set. A command that lacks one of them does not accept the flag.
        read: takes the flag and the words after it; returns values of options, and a notice or "". Raises ConfigError
            for words that are not valid, and FeatureError for a feature that is not available. None if the flag is just
            another spelling of the one option in `options`.
    """

    options: Collection[str] = ()
    read: Callable[[str, Sequence[str]], tuple[Values, str]] | None = None


def renamed(option: str) -> Foreign:
    """Return a flag that is another spelling of an option."""
    return Foreign(options=(option,))


def sets(notice: str = "", **values: Any) -> Foreign:
    """Return a switch that sets options to `values`. With the word `false` after it, it does nothing."""

    def read(flag: str, words: Sequence[str]) -> tuple[Values, str]:
        return (dict(values), notice) if is_on(flag, words) else ({}, "")

    return Foreign(options=tuple(values), read=read)


def mapped(meanings: Mapping[str, Values]) -> Foreign:
    """Return a flag with one word after it. `meanings` has the words, each with the values of options it stands for."""

    def read(flag: str, words: Sequence[str]) -> tuple[Values, str]:
        word = " ".join(words)
        if word not in meanings:
            raise ConfigError(f"{flag}: {unknown('value', word, meanings)}")
        return dict(meanings[word]), ""

    return Foreign(options=tuple({name for values in meanings.values() for name in values}), read=read)


def moot(why: str) -> Foreign:
    """Return a flag that is accepted and has no effect. A notice gives the reason, `why`."""
    return Foreign(read=lambda flag, words: ({}, f"{flag} has no effect: {why}"))


def absent(feature: str, *, hint: str | None = None, unless: Collection[str] = UNASKED) -> Foreign:
    """Return a flag for a feature that is not available. It is an error unless the words after it switch the feature
    off; `unless` lists those words."""

    def read(flag: str, words: Sequence[str]) -> tuple[Values, str]:
        if " ".join(words) in unless:
            return {}, ""
        raise FeatureError(f"not available: {feature} ({' '.join([flag, *words])})", hint=hint)

    return Foreign(read=read)


def is_on(flag: str, words: Sequence[str]) -> bool:
    """Return whether a switch is on, which it is unless `false` follows it.

    Raises:
        ConfigError: a word other than true or false follows it.
    """
    word = " ".join(words).lower()
    if word not in ("", "true", "false"):
        raise ConfigError(f"{flag} is {' '.join(words)}; it must be true or false")
    return word != "false"


def add_option(group: argparse._ArgumentGroup, option: Option) -> None:
    """Add the flags of an option. argparse keeps values as text, and the schema converts and checks them."""
    group.add_argument(*option.flags, dest=option.name, help=_help(option), **_shape(option))


def add_foreign(parser: Parser, known: Mapping[str, Option], foreign: Mapping[str, Foreign]) -> None:
    """Add the flags of another program, without showing them in --help.

    Left out are flags that the parser has already, and flags that set an option which the command does not have.
    """
    own = set(parser.flags)
    for name, meaning in foreign.items():
        if f"--{name}" in own or not known.keys() >= set(meaning.options):
            continue
        if meaning.read is None:
            [option] = meaning.options
            shape = _shape(known[option]) | {"dest": option}
        else:
            # "append" keeps every use of the flag, so that two contradictory uses can be reported.
            shape = {"dest": _FOREIGN + name, "nargs": "*", "action": "append"}
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS, **shape)


_FOREIGN = "foreign:"


@dataclass(frozen=True, slots=True)
class Words:
    """The parsed flags of a command line.

    Attributes:
        values: values by name of option.
        notices: notices about flags of another program, one sentence each.
        unavailable: one error per flag that asks for a feature that is not available.
        is_foreign: whether at least one flag of another program was given.
    """

    values: Values
    notices: tuple[str, ...]
    unavailable: tuple[FeatureError, ...]
    is_foreign: bool


def read_flags(
    parser: Parser,
    argv: Sequence[str],
    foreign: Mapping[str, Foreign],
) -> Words:
    """Parse a command line.

    Args:
        parser: has the flags of all options, and those of `foreign`.
        argv: the words of the command line.
        foreign: flags of another program, by name without `--`.

    Raises:
        ConfigError: an unknown flag, with the most similar ones as the hint, or two flags that set one option to
            different values.
    """
    names = parser.flags
    # argparse takes `-1,2` for a flag, because only a plain negative number counts as a value. Its own message would
    # say that the flag before it lacks its value.
    for flag, value in pairwise(argv):
        if flag in names and re.match(r"-[\d.][^ ,]*,", value):
            raise ConfigError(f"{flag}: `{value}` begins with `-`, as a flag does", hint=f"write {flag}={value}")
    namespace, rest = parser.parse_known_args(list(argv))
    if rest:
        raise ConfigError(_unknown_flags(rest, names, parser.prog))
    typed = {word.partition("=")[0].removeprefix("--") for word in argv if word.startswith("--")}
    words = _read_foreign(vars(namespace), foreign)
    return replace(words, is_foreign=any(name in foreign and f"--{name}" not in names for name in typed))


def _read_foreign(found: Mapping[str, Any], foreign: Mapping[str, Foreign]) -> Words:
    values = {name: value for name, value in found.items() if not name.startswith(_FOREIGN)}
    notices: list[str] = []
    unavailable: list[FeatureError] = []
    said_by = {name: f"--{name}" for name in values}
    uses = [(name, words) for name in found if name.startswith(_FOREIGN) for words in found[name]]
    for name, words in ((name.removeprefix(_FOREIGN), words) for name, words in uses):
        try:
            meant, notice = foreign[name].read(f"--{name}", words)
        except FeatureError as error:
            unavailable.append(error)
            continue
        for option, value in meant.items():
            if option in values and values[option] != value:
                message = f"{said_by[option]} and --{name} set --{option} to {values[option]} and to {value}"
                raise ConfigError(message, hint="give one of them")
            said_by.setdefault(option, f"--{name}")
        values |= meant
        notices += [notice] if notice else []
    return Words(values, tuple(dict.fromkeys(notices)), tuple(unavailable), is_foreign=False)


def _unknown_flags(rest: Sequence[str], names: Sequence[str], prog: str) -> str:
    wrong = list(dict.fromkeys(word.split("=")[0] for word in rest if word.startswith("--")))
    if not wrong:
        return with_hint(
            f"`{rest[0]}` belongs to no flag",
            f"write its flag before it, and quote a value that has spaces; `{prog} --help` lists the flags",
        )
    message = f"unknown flag{'s' if len(wrong) > 1 else ''} {', '.join(f'`{flag}`' for flag in wrong)}"
    hints = ""
    for flag in wrong:
        if guess := nearest_flag(flag, names):
            hints += f"nearest to `{flag}` is `{guess}`; " if len(wrong) > 1 else f"did you mean `{guess}`? "
    return with_hint(message, f"{hints}`{prog} --help` lists the flags")


def nearest_flag(flag: str, names: Sequence[str]) -> str | None:
    """Return the flag that was probably meant: one that replaces an argument of TRL, or shares a word or nearly all
    letters. None if there is none."""
    name = flag.lstrip("-").replace("-", "_")
    if name in FLAGS_FOR_TRL:
        return next((f"--{known}" for known in FLAGS_FOR_TRL[name] if f"--{known}" in names), None)
    words = set(name.split("_"))
    for guess in difflib.get_close_matches(name, [known.lstrip("-") for known in names], n=5, cutoff=_SIMILAR):
        if words & set(guess.split("_")) or difflib.SequenceMatcher(None, guess, name).ratio() >= _SAME_BUT_FOR_A_SLIP:
            return f"--{guess}"
    return None


def _shape(option: Option) -> dict[str, Any]:
    if option.is_switch:
        return {"nargs": "?", "const": _TRUE, "metavar": "true|false"}
    if option.num_values > 1:
        # With "+", the single word None is accepted, too. The schema checks the number of other values.
        return {"nargs": "+" if option.optional else option.num_values, "metavar": "X"}
    if option.choices:
        return {"metavar": "{" + ",".join(option.choices) + "}"}
    kinds = (option.info.annotation, *get_args(option.info.annotation))
    return {"metavar": "N" if int in kinds else "X" if float in kinds else "TEXT"}


def default_words(option: Option) -> str | None:
    """Return the default of an option as it is typed; None if there is none, and for a switch that is off."""
    default = option.info.get_default()
    if default is None or default is False:
        return None
    if default is True:
        return _TRUE
    return " ".join(map(str, default)) if isinstance(default, tuple) else str(default)


def _help(option: Option) -> str:
    text = (option.info.description or "").replace("%", "%%")
    default = default_words(option)
    return text if default is None else f"{text} (default: {default})"
