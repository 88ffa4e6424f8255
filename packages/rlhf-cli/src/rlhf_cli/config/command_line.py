"""From defaults, recipe, TOML file and flags to a checked configuration: one thin layer over argparse and pydantic."""

import argparse
import difflib
import json
import re
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, TypeVar, get_args

from pydantic import ValidationError

from rlhf_cli.config.base import Config, Option, options
from rlhf_cli.config.elsewhere import known_elsewhere
from rlhf_data.errors import ConfigError, missing_file, nearest, unknown, with_hint
from rlhf_data.flags import Parser

AnyConfig = TypeVar("AnyConfig", bound=Config)
Values = dict[str, Any]  # by the options' names

NONE = "None"
"""What stands for no value, on the command line and in TOML, which has none of its own."""

_TRUE = "true"
_SIMILAR, _SAME_BUT_FOR_A_SLIP = 0.55, 0.8  # shares of letters in common


@dataclass(frozen=True, slots=True)
class Parsed(Generic[AnyConfig]):
    """A command line, understood.

    Attributes:
        config: checked, everything filled in.
        notices: options without effect, a sentence each.
        given: names of the options that somebody set, by flag or by file, to something else than the default.
        dry_run: only show what would be done.
    """

    config: AnyConfig
    notices: tuple[str, ...]
    given: frozenset[str]
    dry_run: bool


def parse(
    config_class: type[AnyConfig],
    argv: Sequence[str],
    *,
    prog: str,
    description: str,
    resolve: Callable[[str], Path],
    recipe: Callable[[Values], Path | None] = lambda values: None,
    presets: Mapping[str, Path] = MappingProxyType({}),
) -> Parsed[AnyConfig]:
    """Return the configuration that `argv` describes; defaults < recipe < preset < TOML file < flags.

    `resolve` turns a path that a user typed into one that can be opened, `recipe` what was given into a TOML file that
    fills in the rest, or None; `presets` are what --preset may be, and the TOML files that stand for that.

    Raises:
        ConfigError: an unknown flag, section, key or value, or options that cannot work together.
        SystemExit: --help was asked for.
    """
    known = {option.name: option for option in options(config_class)}
    flags = _read_flags(make_parser(config_class, prog=prog, description=description, presets=presets), argv)
    file, preset, dry_run = _single("config", flags), _single("preset", flags), flags.pop("dry_run", False)
    if preset is not None and preset not in presets:
        raise ConfigError(f"--preset: {unknown('value', preset, presets)}")
    in_file = read_toml(resolve(file), config_class) if file else {}
    in_preset = read_toml(presets[preset], config_class) if preset else {}
    named = _over(in_file, flags, known)
    values = _over(in_preset, named, known)
    if (path := recipe(values)) is not None:
        values = _over(read_toml(path, config_class), values, known)
    config = _validate(config_class, known, values)
    given = frozenset(name for name in named if not _is_default(known[name], config))
    notices = config.check(given)
    left = _over(in_preset, in_file, known)
    if beaten := [name for name, value in in_preset.items() if left.get(name) != value]:
        count = f"{len(beaten)} of the {len(in_preset)} keys of --preset {preset}"
        notices.insert(0, f"--config {file} overrides {count}: {', '.join(beaten)}")
    return Parsed(config, tuple(notices), given, dry_run)


def make_parser(config_class: type[Config], *, prog: str, description: str, presets: Collection[str] = ()) -> Parser:
    """Return an argparse parser with one group a section. Values stay text: the schema knows their types."""
    parser = Parser(
        prog=prog,
        usage=f"{prog} {'[--preset NAME] ' if presets else ''}[--config FILE.toml] [--dry_run] [flags]",
        description=description,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=110),
    )
    if presets:
        text = "an algorithm's settings as its paper has them, over which --config and flags go"
        parser.add_argument("--preset", action="append", metavar="{" + ",".join(presets) + "}", help=text)
    text = "take options from a TOML file with these sections"
    parser.add_argument("--config", action="append", metavar="FILE.toml", help=text)
    parser.add_argument(
        "--dry_run", action="store_true", help="show configuration, placement and arithmetic; start nothing"
    )
    sections = config_class.model_fields.items()
    groups = {name: parser.add_argument_group(info.annotation.model_config["title"]) for name, info in sections}
    for option in options(config_class):
        groups[option.section].add_argument(*option.flags, dest=option.name, help=_help(option), **_shape(option))
    return parser


def read_toml(path: Path, config_class: type[Config]) -> Values:
    """Return the values of a TOML file. Raises ConfigError when there is none, it is not TOML, or it has a section or a
    key that does not exist."""
    if not path.is_file():
        raise ConfigError(missing_file("configuration file", path))
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    home = {option.name: option.section for option in options(config_class)}
    sections = list(config_class.model_fields)
    for section, table in content.items():
        if section not in sections:
            text = f"{path}: unknown section `{section}`"
            raise ConfigError(text, hint=_place(section, sections, home, "[{}]", "[{}]"))
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: `{section}` must be a section", hint=f"write [{section}] with its keys below")
        for key in table:
            if home.get(key) != section:
                text = f"{path}: unknown key `{key}` in [{section}]"
                keys = [name for name in home if home[name] == section]
                raise ConfigError(text, hint=_place(key, keys, home, "`{}`", "{}"))
    return {name: value for table in content.values() for name, value in table.items()}


def _place(name: str, known: Sequence[str], home: Mapping[str, str], one: str, each: str) -> str:
    """Return where a name belongs, the nearest of the known ones, or all of these; `one` and `each` format them."""
    if name in home:
        return f"`{name}` is a key of the section [{home[name]}]"
    guess = nearest(name, known)
    return f"did you mean {one.format(guess)}?" if guess else f"there are {', '.join(map(each.format, known))}"


def to_toml(config: Config) -> str:
    """Return a configuration as the TOML file that --config would read, without what is None by default."""
    lines = []
    for section, table in config.model_dump(mode="json").items():
        fields = type(getattr(config, section)).model_fields
        said = {name: value for name, value in table.items() if value is not None or fields[name].default is not None}
        values = ((name, NONE if value is None else value) for name, value in said.items())
        # TOML writes numbers, lists and basic strings as JSON does.
        lines += [f"[{section}]", *(f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in values), ""]
    return "\n".join(lines)


def _read_flags(parser: Parser, argv: Sequence[str]) -> Values:
    names = parser.flags
    for flag, value in pairwise(argv):
        if flag in names and re.match(r"-[\d.][^ ,]*,", value):
            raise ConfigError(f"{flag}: `{value}` begins as a flag does", hint=f"write {flag}={value}")
    namespace, rest = parser.parse_known_args(list(argv))
    if rest:
        raise ConfigError(_unknown_flags(rest, names, parser.prog))
    return vars(namespace)


def _unknown_flags(rest: Sequence[str], names: Sequence[str], prog: str) -> str:
    wrong = list(dict.fromkeys(word.split("=")[0] for word in rest if word.startswith("--")))
    if not wrong:
        return with_hint(f"`{rest[0]}` belongs to no flag", "quote a value that has spaces")
    message = f"unknown flag{'s' if len(wrong) > 1 else ''} {', '.join(f'`{flag}`' for flag in wrong)}"
    hints = ""
    for flag in wrong:
        if known := known_elsewhere(flag, names):
            hints += f"{known}; "
        elif guess := _nearest_flag(flag, names):
            hints += f"nearest to `{flag}` is `{guess}`; " if len(wrong) > 1 else f"did you mean `{guess}`? "
    return with_hint(message, f"{hints}`{prog} --help` lists the flags")


def _nearest_flag(flag: str, names: Sequence[str]) -> str | None:
    """Return the flag that was probably meant: one with a word in common, or nearly the same letters."""
    name = flag.lstrip("-").replace("-", "_")
    words = set(name.split("_"))
    for guess in difflib.get_close_matches(name, [known.lstrip("-") for known in names], n=5, cutoff=_SIMILAR):
        if words & set(guess.split("_")) or difflib.SequenceMatcher(None, guess, name).ratio() >= _SAME_BUT_FOR_A_SLIP:
            return f"--{guess}"
    return None


def _is_default(option: Option, config: Config) -> bool:
    return getattr(getattr(config, option.section), option.name) == option.info.get_default()


def _validate(config_class: type[AnyConfig], known: Mapping[str, Option], values: Values) -> AnyConfig:
    """Return the configuration. Raises ConfigError, in terms of flags, for a value that a field cannot have."""
    sections: dict[str, Values] = {}
    for name, value in values.items():
        is_none = known[name].optional and value in (NONE, [NONE])
        sections.setdefault(known[name].section, {})[name] = None if is_none else value
    try:
        return config_class.model_validate(sections)
    except ValidationError as error:
        raise ConfigError(_explain(error.errors()[0])) from None


def _over(below: Values, above: Values, known: Mapping[str, Option]) -> Values:
    """Return one layer of values over another, without what of the lower one the upper one says in other words."""
    gone = {other for name in above for other in known[name].instead_of}
    return {name: value for name, value in below.items() if name not in gone} | above


def _single(name: str, flags: Values) -> Any:
    found = flags.pop(name, [None])
    if len(found) > 1:
        hint = "give one, and as flags what it should not say"
        raise ConfigError(f"--{name} is given {len(found)} times: {', '.join(found)}", hint=hint)
    return found[0]


def _shape(option: Option) -> dict[str, Any]:
    if option.is_switch:
        return {"nargs": "?", "const": _TRUE, "metavar": "true|false"}
    if option.num_values > 1:
        # `+`, so that None is a value of it, and the schema counts the others
        return {"nargs": "+" if option.optional else option.num_values, "metavar": "X"}
    if option.choices:
        return {"metavar": "{" + ",".join(option.choices) + "}"}
    kinds = (option.info.annotation, *get_args(option.info.annotation))
    return {"metavar": "N" if int in kinds else "X" if float in kinds else "TEXT"}


def _help(option: Option) -> str:
    default = option.info.get_default()
    text = (option.info.description or "").replace("%", "%%")
    if option.is_switch or default is None:
        return text
    shown = " ".join(map(str, default)) if isinstance(default, tuple) else default
    return f"{text} (default: {shown})"


_ALLOWED = {
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_parsing": "a number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "string_type": "text",
    "tuple_type": "a list of numbers",
    "too_long": "{max_length} numbers",
    "missing": "two numbers",
    "greater_than": "above {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "below {lt}",
    "less_than_equal": "at most {le}",
}


def _explain(error: Mapping[str, Any]) -> str:
    """Return one of pydantic's errors as a sentence about a flag."""
    section, *rest = error["loc"]
    name = next((part for part in rest if isinstance(part, str)), section)
    value, kind = error["input"], error["type"]
    if kind == "value_error":
        return f"--{name}: {error['ctx']['error']}"
    if isinstance(value, list | tuple):
        value = " ".join(map(str, value))
    if kind not in _ALLOWED:
        return f"--{name} is {value!r}: {error['msg']}"
    return f"--{name} is {value}; it must be {_ALLOWED[kind].format(**error.get('ctx', {}))}"
