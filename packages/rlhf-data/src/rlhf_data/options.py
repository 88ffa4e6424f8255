"""What sections and fields of a configuration are made of."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields
from typing import Annotated, Any, TypeVar, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, create_model
from pydantic.fields import FieldInfo

from rlhf_data.errors import ConfigError, unknown, with_hint


class Section(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=()):
    """One concern; its `title`, a class argument, heads it in --help."""


AnySection = TypeVar("AnySection", bound=Section)


class Config(BaseModel, frozen=True, extra="forbid", protected_namespaces=()):
    """Everything that a command is told, a field a section."""

    def check(self, given: Collection[str]) -> list[str]:
        """Check what concerns several fields; return a notice for each option that has no effect.

        `given` are the options that somebody set to something else than the default. Raises ConfigError for options
        that cannot work together.
        """
        return []

    def missing(self) -> list[ConfigError]:
        """Return an error for each option that a run needs and nobody set. A dry run shows what it can without them."""
        return []


def flag(
    default: Any, text: str, *, aliases: Sequence[str] = (), instead_of: Sequence[str] = (), **bounds: float
) -> Any:
    """Return a field of a section.

    Args:
        default: its value when nobody sets it.
        text: what --help says of it.
        aliases: further flags for it.
        instead_of: options whose place it takes: what a layer below says with them no longer counts.
        bounds: pydantic's `ge`, `gt`, `le` and `lt`.
    """
    extra = {"aliases": list(aliases), "instead_of": list(instead_of)}
    return Field(default, description=text, json_schema_extra=extra, **bounds)


def with_defaults(section: type[AnySection], **defaults: Any) -> type[AnySection]:
    """Return a section with other defaults for some of its options, which keep their types, bounds and texts."""
    fields: dict[str, Any] = {}
    for name, default in defaults.items():
        info = copy(section.model_fields[name])
        info.default = default
        fields[name] = (info.annotation, info)
    return create_model(section.__name__, __base__=section, __doc__=section.__doc__, **fields)


def matching(kind: type, *sections: Section) -> dict[str, Any]:
    """Return what sections hold for those fields of a dataclass that are called the same."""
    return {f.name: getattr(part, f.name) for f in fields(kind) for part in sections if hasattr(part, f.name)}


@dataclass(frozen=True, slots=True)
class Choices:
    """The values a text field may have; metadata of the field."""

    names: tuple[str, ...]


def one_of(names: Iterable[str], titles: Mapping[str, str] | None = None) -> Any:
    """Return the type of a text field that must be one of `names`; `titles` are what else people call them."""
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
    """Return (-X, X) for a single number X, and anything else as it is."""
    words = value if isinstance(value, list | tuple) else [value]
    if len(words) != 1:
        return value
    try:
        bound = float(words[0])
    except (TypeError, ValueError):
        return words * 2  # refused as the words that they are
    if not 0 < bound < math.inf:
        raise ValueError(with_hint(f"{words[0]} is one number, which must be above 0", "give LOW HIGH, or X for -X X"))
    return -bound, bound


SymmetricRange = Annotated[tuple[float, float], BeforeValidator(_around_zero)]
"""LOW HIGH, or one number X for -X X."""


@dataclass(frozen=True, slots=True)
class Option:
    """One field of one section, as flags and TOML see it: `section` is its table in TOML, `name` its key there and its
    flag after `--`, `info` pydantic's description of it."""

    section: str
    name: str
    info: FieldInfo

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags that set it, the main one first."""
        return tuple(f"--{name}" for name in (self.name, *self.info.json_schema_extra["aliases"]))

    @property
    def choices(self) -> tuple[str, ...] | None:
        """The values it may have, where they are a list."""
        for item in (*self.info.metadata, *(m for arg in get_args(self.info.annotation) for m in get_args(arg)[1:])):
            if isinstance(item, Choices):
                return item.names
        return None

    @property
    def instead_of(self) -> Sequence[str]:
        """The options whose place it takes."""
        return self.info.json_schema_extra["instead_of"]

    @property
    def is_switch(self) -> bool:
        """Whether it is on or off."""
        return self.info.annotation is bool

    @property
    def num_values(self) -> int:
        """Words that follow its flag."""
        for kind in (self.info.annotation, *get_args(self.info.annotation)):
            plain = get_args(kind)[0] if get_origin(kind) is Annotated else kind
            if get_origin(plain) is tuple:
                return len(get_args(plain))
        return 1

    @property
    def optional(self) -> bool:
        """Whether None is a value."""
        return type(None) in get_args(self.info.annotation)


def options(config_class: type[Config]) -> Iterator[Option]:
    """Yield every field of every section of a configuration, in the order of their definition."""
    for section, info in config_class.model_fields.items():
        for name, field in info.annotation.model_fields.items():
            yield Option(section, name, field)
