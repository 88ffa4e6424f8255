"""Reads a command's configuration from defaults, recipe, preset, TOML file and flags, over argparse and pydantic."""

import argparse
import json
import re
import sys
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic

from pydantic import ValidationError

from rlhf_data.errors import ConfigError, FeatureError, missing_file, nearest, unknown, with_hint
from rlhf_data.options.declare import AnyConfig, Config, Option, options, with_trust
from rlhf_data.options.flags import Foreign, Parser, Values, add_foreign, add_option, default_words, read_flags
from rlhf_data.safety import MASK, is_utf8, without_secrets

# The word for "no value" on the command line and in TOML files, because TOML has no null.
NONE = "None"

# The layers of a configuration above the defaults, the lowest first.
ORIGINS = ("recipe", "preset", "file", "flag")

_HINT = "\n\nhint: "  # see `with_hint`


@dataclass(frozen=True, slots=True)
class Parsed(Generic[AnyConfig]):
    """A parsed command line.

    Attributes:
        config: the complete, checked configuration.
        notices: what the user should know about the options, one sentence each.
        given: names of the options that the user set, by flag or file, to a value other than the default.
        dry_run: only show what a run would do.
        missing: one error per required option that is not set. Empty unless this is a dry run.
        unavailable: one error per flag for a feature that is not available. Empty unless this is a dry run.
        origins: where the value of an option comes from, by its name: one of `ORIGINS`. Others are at their default.
    """

    config: AnyConfig
    notices: tuple[str, ...]
    given: frozenset[str]
    dry_run: bool
    missing: tuple[ConfigError, ...] = ()
    unavailable: tuple[FeatureError, ...] = ()
    origins: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine(Generic[AnyConfig]):
    """The command line of one command.

    Attributes:
        config: the class of its configuration.
        prog: the words that call it, such as `rlhf ppo`.
        words: what follows these words, before the flags.
        description: the first paragraph of --help.
        resolve: turns a path that a user typed into one that can be opened.
        recipe: takes the values given so far; returns a TOML file with values for the rest, or None.
        presets: the values of --preset, each with its TOML file.
        foreign: flags of another program, by name without `--`, and their meaning here.
        compare: takes a configuration and the names of the options that were set; returns notices about flags that have
            another meaning in that program. Called if one of the program's flags was given.
        adapt: takes the values of all flags, `foreign` ones included; returns values of options. Resolves flags whose
            meaning depends on each other.
    """

    config: type[AnyConfig]
    prog: str
    words: str = ""
    description: str = ""
    resolve: Callable[[str], Path] = Path
    recipe: Callable[[Values], Path | None] = lambda values: None
    presets: Mapping[str, Path] = field(default_factory=lambda: MappingProxyType({}))
    foreign: Mapping[str, Foreign] = field(default_factory=lambda: MappingProxyType({}))
    compare: Callable[[AnyConfig, Collection[str]], Iterable[str]] = lambda config, given: ()
    adapt: Callable[[Values], Values] = lambda values: values

    def parse(self, argv: Sequence[str]) -> Parsed[AnyConfig]:
        """Return the configuration that `argv` describes. Each layer overrides those before it: defaults, recipe,
        preset, TOML file, flags.

        Raises:
            ConfigError: an unknown flag, section, key or value, or options that cannot work together. Except in a dry
                run, also a required option that is not set, or a flag for a feature that is not available.
            SystemExit: after --help.
        """
        try:
            return self._parse(argv)
        except ConfigError as error:
            if _HINT in str(error):
                raise
            raise type(error)(str(error), hint=f"`{self.prog} --help` says what each flag does") from None

    def parse_naming(self, flag: str, argv: Sequence[str]) -> Parsed[AnyConfig]:
        """Do as `parse`; a first word that is no flag is the value of `flag`."""
        is_named = bool(argv) and not argv[0].startswith("-")
        return self.parse([flag, *argv] if is_named else argv)

    def _parse(self, argv: Sequence[str]) -> Parsed[AnyConfig]:
        known = {option.name: option for option in options(self.config)}
        words = read_flags(self.parser(), argv, self.foreign)
        flags = self.adapt(dict(words.values))
        notices = list(words.notices)
        file = _single("config", flags)
        preset = _single("preset", flags)
        dry_run = flags.pop("dry_run", False)
        if preset is not None and preset not in self.presets:
            raise ConfigError(f"--preset: {unknown('value', preset, self.presets)}")
        in_file = read_toml(self.resolve(file), self.config) if file else {}
        in_preset = read_toml(self.presets[preset], self.config) if preset else {}
        # Options count as given if the user wrote them, in a file or as flags. Those of presets and recipes do not, so
        # that a preset's option without effect is no reason for a notice.
        named = _over(in_file, flags, known)
        values = _over(in_preset, named, known)
        # The recipe comes last, although it is the lowest layer: whether it applies depends on what the others set.
        layers = [in_preset, in_file, flags]
        if (path := self.recipe(values)) is not None:
            try:
                recipe = read_toml(path, self.config)
            except ConfigError as error:
                message = f"`{self.prog}` cannot take the options of {path.parent}: {error}".partition(_HINT)[0]
                raise ConfigError(message, hint=f"name the folder of a run of `{self.prog}`") from None
            values = _over(recipe, values, known)
            layers.insert(0, recipe)
        config = with_trust(_validate(self.config, known, values, self.prog))
        given = frozenset(name for name in named if not _is_default(known[name], config))
        # A flag beside --preset overrides it on purpose. A file may do so unnoticed: the run is then not the paper's.
        left = _over(in_preset, in_file, known)
        if overridden := [name for name, value in in_preset.items() if left.get(name) != value]:
            count = f"{len(overridden)} of the {len(in_preset)} keys of --preset {preset}"
            notices.append(f"--config {file} overrides {count}: {', '.join(overridden)}")
        missing = config.missing()
        if (lacks := (*words.unavailable, *missing)) and not dry_run:
            raise lacks[0]
        notices += config.check(given)
        if words.is_foreign:
            notices += self.compare(config, given)
        above = ORIGINS[-len(layers) :]
        origins = {
            name: origin for origin, layer in zip(above, layers, strict=True) for name in layer if name in values
        }
        return Parsed(config, tuple(notices), given, dry_run, tuple(missing), words.unavailable, origins)

    def parser(self) -> Parser:
        """Return an argparse parser with one group of flags per section."""
        preset = "[--preset NAME]" if self.presets else ""
        usage = filter(None, (self.prog, self.words, preset, "[--config FILE.toml] [--dry_run] [flags]"))
        parser = Parser(
            prog=self.prog,
            usage=" ".join(usage),
            description=self.description,
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
            formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=110),
        )
        if self.presets:
            text = "the settings of an algorithm's paper; --config and flags override them"
            parser.add_argument("--preset", action="append", metavar="{" + ",".join(self.presets) + "}", help=text)
        text = "read options from a TOML file with these sections"
        parser.add_argument("--config", action="append", metavar="FILE.toml", help=text)
        text = "show the configuration and what would be done; start nothing"
        parser.add_argument("--dry_run", action="store_true", help=text)
        sections = self.config.model_fields.items()
        groups = {name: parser.add_argument_group(info.annotation.model_config["title"]) for name, info in sections}
        known = {option.name: option for option in options(self.config)}
        for option in known.values():
            add_option(groups[option.section], option)
        add_foreign(parser, known, self.foreign)
        return parser


def show_parsed(parsed: Parsed[Any]) -> None:
    """Print the notices to stderr and, in a dry run, the configuration to stdout and what is missing to stderr."""
    for notice in parsed.notices:
        print(f"notice: {notice}", file=sys.stderr)
    if parsed.dry_run:
        print(to_toml(parsed.config))
        for title, errors in (("cannot run yet", parsed.unavailable), ("still missing", parsed.missing)):
            for error in errors:
                print(f"{title}: {error}".replace("\n\n", "\n"), file=sys.stderr)


def read_toml(path: Path, config_class: type[Config]) -> Values:
    """Return the values of a TOML file by name of option.

    Raises:
        ConfigError: the file does not exist, is not TOML, or has an unknown section or key.
    """
    if not path.is_file():
        raise ConfigError(missing_file("configuration file", path))
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        hint = "write it as `--dry_run` prints it: `name = value` below `[section]`, with text in double quotes"
        raise ConfigError(f"{path} is not TOML: {reason}", hint=hint) from None
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
    """Return the hint for an unknown name: the section it belongs to, else the most similar known name, else all of
    them. `one` and `each` are formats for one name and for a list."""
    if name in home:
        return f"`{name}` is a key of the section [{home[name]}]"
    guess = nearest(name, known)
    return f"did you mean {one.format(guess)}?" if guess else f"there are {', '.join(map(each.format, known))}"


def to_toml(config: Config, origins: Mapping[str, str] | None = None) -> str:
    """Return a configuration as a TOML file for --config. Options that are None by default and now are left out.

    The text may be stored and sent to trackers, so `***` stands for passwords and queries of URLs. A comment behind a
    value gives its origin, if `origins` has it; see `Parsed`.
    """
    marks = {name: f"  # {origin}" for name, origin in (origins or {}).items()}
    lines = []
    # None is written only where it is not the default: the reader's defaults fill in the others.
    for section, table in config.model_dump(mode="json").items():
        fields = type(getattr(config, section)).model_fields
        said = {name: value for name, value in table.items() if value is not None or fields[name].default is not None}
        values = ((name, NONE if value is None else value) for name, value in said.items())
        lines.append(f"[{section}]")
        lines += [f"{name} = {_toml_value(value)}{marks.get(name, '')}" for name, value in values]
        lines.append("")
    return "\n".join(lines)


def _toml_value(value: Any) -> str:
    """Return a number, a list or a text, without the secrets of URLs. Text with spaces, as in a template, is no URL."""
    if isinstance(value, str) and not re.search(r"\s", value):
        value = without_secrets(value)
    # TOML writes them as JSON does, except for one character that it does not allow.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _is_default(option: Option, config: Config) -> bool:
    return getattr(getattr(config, option.section), option.name) == option.info.get_default()


def _validate(config_class: type[AnyConfig], known: Mapping[str, Option], values: Values, prog: str) -> AnyConfig:
    """Return the configuration. Raises ConfigError, which names the flag, for a value that is not valid."""
    sections: dict[str, Values] = {}
    for name, value in values.items():
        if isinstance(value, str):
            _check_text(name, value)
        # Flags with several values arrive as lists, so the word None may be alone in one.
        is_none = known[name].optional and value in (NONE, [NONE])
        sections.setdefault(known[name].section, {})[name] = None if is_none else value
    try:
        return config_class.model_validate(sections)
    except ValidationError as error:
        raise ConfigError(_explain(error.errors()[0], known, prog)) from None


def _check_text(name: str, value: str) -> None:
    """Raise ConfigError for text that cannot be written to a file, and for a URL as `to_toml` writes it."""
    if not is_utf8(value):
        raise ConfigError(f"--{name} is {value!r}, which is not UTF-8", hint="write it in UTF-8")
    if "://" in value and MASK in value:
        message = f"--{name} is {value}: {MASK} stands for a secret that is never saved"
        raise ConfigError(message, hint=f"give --{name} the whole URL")


def _over(below: Values, above: Values, known: Mapping[str, Option]) -> Values:
    """Return the values of two layers together. The upper layer wins, also over options of the lower one that set the
    same thing under another name (`instead_of`)."""
    gone = {other for name in above for other in known[name].instead_of}
    return {name: value for name, value in below.items() if name not in gone} | above


def _single(name: str, flags: Values) -> Any:
    found = flags.pop(name, [None])
    if len(found) > 1:
        hint = "give one, and set other options by flags"
        raise ConfigError(f"--{name} is given {len(found)} times: {', '.join(found)}", hint=hint)
    return found[0]


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


def _explain(error: Mapping[str, Any], known: Mapping[str, Option], prog: str) -> str:
    """Return the message for one of pydantic's errors, in terms of the flag of the program `prog`."""
    section, *rest = error["loc"]
    name = next((part for part in rest if isinstance(part, str)), section)
    value = error["input"]
    kind = error["type"]
    if isinstance(value, list | tuple):
        value = " ".join(map(str, value))
    if kind == "value_error":
        message = f"--{name}: {error['ctx']['error']}"
    elif kind in _ALLOWED:
        message = f"--{name} is {value}; it must be {_ALLOWED[kind].format(**error.get('ctx', {}))}"
    else:
        message = f"--{name} is {value!r}: {error['msg']}"
    if _HINT in message:
        return message
    default = default_words(known[name]) if name in known else None
    normal = "" if default is None else f"--{name} {default} is the default; "
    return with_hint(message, f"{normal}`{prog} --help` says what --{name} does")
