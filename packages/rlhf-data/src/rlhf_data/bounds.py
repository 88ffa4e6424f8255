"""Bounds of numbers in a frozen record of settings: declared with the field, and checked when the record is made."""

import operator
from collections.abc import Mapping
from dataclasses import MISSING, Field, field, fields
from typing import Any

from rlhf_data.errors import ConfigError

# By pydantic's name of a bound: the comparison, and its words.
_COMPARISONS = {
    "ge": (operator.ge, "at least"),
    "gt": (operator.gt, "above"),
    "le": (operator.le, "at most"),
    "lt": (operator.lt, "below"),
}
_KEY = "bounds"


def bounded(default: Any = MISSING, **bounds: float) -> Any:
    """Return a field of a dataclass whose value lies within `bounds`: `ge`, `gt`, `le` and `lt`, as in pydantic.

    In a tuple, each number does. None lies within all bounds. The class calls `check_bounds` in its `__post_init__`.
    """
    return field(default=default, metadata={_KEY: bounds})


def bounds_of(known: Field[Any]) -> Mapping[str, float]:
    """Return the bounds of a field; empty if it has none."""
    return known.metadata.get(_KEY, {})


def check_bounds(record: Any) -> None:
    """Raise ConfigError for a number of a dataclass that is out of its bounds, or not a number.

    The hint has a value that is allowed: the default, if there is one.
    """
    for item in fields(record):
        value = getattr(record, item.name)
        numbers = value if isinstance(value, tuple) else (value,)
        rules = [(*_COMPARISONS[name], limit) for name, limit in bounds_of(item).items() if value is not None]
        if not all(holds(number, limit) for holds, _, limit in rules for number in numbers):
            allowed = " and ".join(f"{words} {limit:g}" for _, words, limit in rules)
            what = "each" if isinstance(value, tuple) else "it"
            hint = f"use ``{item.name}={_example(item, value)}``, for example"
            raise ConfigError(f"``{item.name}`` is {value}; {what} must be {allowed}", hint=hint)


def check_none(is_used: object, message: str, *cases: tuple[object, str, str]) -> None:
    """Raise ConfigError for the first of `cases` that holds, if what they cannot go with is used.

    Each case says whether it holds, what the error says after `message`, and the hint.
    """
    for holds, reason, hint in cases if is_used else ():
        if holds:
            raise ConfigError(f"{message} {reason}", hint=hint)


def _example(known: Field[Any], value: Any) -> str:
    """Return an allowed value of a field, as it is typed: its default, else a number at or near its bounds."""
    if known.default is not MISSING:
        return " ".join(map(str, known.default)) if isinstance(known.default, tuple) else str(known.default)
    bounds = bounds_of(known)
    limits = list(bounds.values())
    near = (*limits, min(limits) + 1, max(limits) - 1, sum(limits) / len(limits))
    rules = [(_COMPARISONS[name][0], limit) for name, limit in bounds.items()]
    number = next(number for number in near if all(holds(number, limit) for holds, limit in rules))
    return " ".join([f"{number:g}"] * (len(value) if isinstance(value, tuple) else 1))
