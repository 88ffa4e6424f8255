"""Building blocks of a command's configuration: options, and sections of options that belong together."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import MISSING, dataclass
from inspect import signature
from typing import Annotated, Any, TypeVar, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, create_model
from pydantic.fields import FieldInfo

from rlhf_data.bounds import bounds_of
from rlhf_data.errors import ConfigError, unknown, with_hint
from rlhf_data.own_code import TrustedModel


# Validators are built at their first use (`defer_build`): --help needs none of them.
class Section(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=(), defer_build=True):
    """Options that belong together. The class argument `title` is their heading in --help."""


AnySection = TypeVar("AnySection", bound=Section)
AnyConfig = TypeVar("AnyConfig", bound="Config")


class Config(BaseModel, frozen=True, extra="forbid", protected_namespaces=(), defer_build=True):
    """All options of a command, with one field per section."""

    def check(self, given: Collection[str]) -> list[str]:
        """Check options that depend on each other; return a notice for each option that has no effect.

        Args:
            given: names of the options that the user set to a value other than the default.

        Raises:
            ConfigError: options that cannot work together.
        """
        return []

    def missing(self) -> list[ConfigError]:
        """Return an error for each option that a run needs and the user did not set.

        A run raises the first error. A dry run lists them all and shows what it can without the options.
        """
        return []


def flag(
    default: Any,
    text: str,
    *,
    aliases: Sequence[str] = (),
    instead_of: Sequence[str] = (),
    names_model: bool = False,
    **bounds: float,
) -> Any:
    """Return an option: a field of a section.

    Args:
        default: the value when the user sets none.
        text: the help text.
        aliases: further spellings of the flag.
        instead_of: other options that set the same thing. If this one is set in a higher layer, such as a flag, values
            of the others in a lower layer, such as a file, are dropped.
        names_model: whether the value is the folder or hub name of a model, an adapter or a tokenizer, or several.
        bounds: pydantic's `ge`, `gt`, `le` and `lt`.
    """
    extra = {"aliases": list(aliases), "instead_of": list(instead_of), "names_model": names_model}
    return Field(default, description=text, json_schema_extra=extra, **bounds)


def flag_of(field: Any, text: str, *, default: Any = MISSING, **more: Any) -> Any:
    """Return an option with the default and the bounds of a field of a dataclass; see `rlhf_data.bounds`.

    Args:
        field: `Record.field` of a dataclass with slots.
        text: the help text.
        default: another default than the field's.
        more: the other arguments of `flag`.
    """
    known = field.__objclass__.__dataclass_fields__[field.__name__]
    return flag(known.default if default is MISSING else default, text, **bounds_of(known), **more)


def with_defaults(section: type[AnySection], **defaults: Any) -> type[AnySection]:
    """Return a section with other defaults for some options. Their types, bounds and help texts stay the same."""
    fields: dict[str, Any] = {}
    for name, default in defaults.items():
        info = copy(section.model_fields[name])
        info.default = default
        fields[name] = (info.annotation, info)
    return create_model(section.__name__, __base__=section, __doc__=section.__doc__, **fields)


def matching(taker: Callable[..., Any], *sections: Section) -> dict[str, Any]:
    """Return the values of sections' options that have the name of a parameter of `taker`, a function or a class."""
    names = signature(taker).parameters
    return {name: getattr(part, name) for name in names for part in sections if hasattr(part, name)}


@dataclass(frozen=True, slots=True)
class Choices:
    """The allowed values of a text option, kept in the metadata of its field."""

    names: tuple[str, ...]


def one_of(names: Iterable[str], titles: Mapping[str, str] | None = None) -> Any:
    """Return the type of a text option with a fixed list of values.

    Args:
        names: the allowed values.
        titles: the name that papers use for a value, by value. A title is refused with a hint that names the value.
    """
    choices = Choices(tuple(names))
    by_title = {title.lower(): (name, title) for name, title in (titles or {}).items()}

    def check(value: str) -> str:
        if value in choices.names:
            return value
        if value.lower() in by_title:
            name, title = by_title[value.lower()]
            message = f"unknown value `{value}`; known: {', '.join(sorted(choices.names))}"
            raise ValueError(with_hint(message, f"{title} is `{name}` here"))
        raise ValueError(unknown("value", value, choices.names))

    return Annotated[str, AfterValidator(check), choices]


def _around_zero(value: Any) -> Any:
    """Return (-X, X) for a single number X. Any other value is returned unchanged, for pydantic to check."""
    words = value if isinstance(value, list | tuple) else [value]
    if len(words) != 1:
        return value
    try:
        bound = float(words[0])
    except (TypeError, ValueError):
        return words * 2  # pydantic refuses each word as a number, with a better message than a wrong count
    if not 0 < bound < math.inf:
        raise ValueError(with_hint(f"{words[0]} is one number, which must be above 0", "give LOW HIGH, or X for -X X"))
    return -bound, bound


# LOW HIGH, or one number X for -X X.
SymmetricRange = Annotated[tuple[float, float], BeforeValidator(_around_zero)]


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a command.

    Attributes:
        section: its table in a TOML file.
        name: its key in that table, and its flag without `--`.
        info: pydantic's description of the field.
    """

    section: str
    name: str
    info: FieldInfo

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags that set it, the main one first."""
        return tuple(f"--{name}" for name in (self.name, *self.info.json_schema_extra["aliases"]))

    @property
    def choices(self) -> tuple[str, ...] | None:
        """The allowed values; None if there is no fixed list of them."""
        # pydantic moves the metadata of `Annotated[str, ...]` into the field. In `Annotated[str, ...] | None` it stays
        # with the first member of the union.
        in_union = (item for member in get_args(self.info.annotation) for item in get_args(member)[1:])
        for item in (*self.info.metadata, *in_union):
            if isinstance(item, Choices):
                return item.names
        return None

    @property
    def instead_of(self) -> Sequence[str]:
        """Other options that set the same thing; see `flag`."""
        return self.info.json_schema_extra["instead_of"]

    @property
    def names_model(self) -> bool:
        """Whether the value is the name of a model; see `flag`."""
        return self.info.json_schema_extra["names_model"]

    @property
    def is_switch(self) -> bool:
        """Whether the option is either on or off."""
        return self.info.annotation is bool

    @property
    def num_values(self) -> int:
        """How many words follow the flag: more than one for a tuple."""
        for kind in (self.info.annotation, *get_args(self.info.annotation)):
            plain = get_args(kind)[0] if get_origin(kind) is Annotated else kind
            if get_origin(plain) is tuple:
                return len(get_args(plain))
        return 1

    @property
    def optional(self) -> bool:
        """Whether the value may be None."""
        return type(None) in get_args(self.info.annotation)


def options(config_class: type[Config]) -> Iterator[Option]:
    """Yield every option of every section of a configuration, in the order of definition."""
    for section, info in config_class.model_fields.items():
        for name, field in info.annotation.model_fields.items():
            yield Option(section, name, field)


def with_trust(config: AnyConfig) -> AnyConfig:
    """Return a configuration in which the names of models are `TrustedModel`s if --trust_remote_code is on."""
    sections = {name: getattr(config, name) for name in type(config).model_fields}
    if not any(getattr(section, "trust_remote_code", False) for section in sections.values()):
        return config
    for option in options(type(config)):
        section = sections[option.section]
        if option.names_model and (name := getattr(section, option.name)) is not None:
            sections[option.section] = section.model_copy(update={option.name: TrustedModel(name)})
    return config.model_copy(update=sections)
