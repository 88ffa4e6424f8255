"""Looks for names of other libraries that are no part of their interface, which another version may not have."""

from collections.abc import Iterable, Mapping
from importlib import import_module
from operator import attrgetter
from typing import Any


def missing(names: Mapping[str, Iterable[str]]) -> list[str]:
    """Return which of `names`, by module or `module:Class`, the installed version does not have."""
    lost = []
    for place, attributes in names.items():
        module, _, kind = place.partition(":")
        try:
            owner = import_module(module)
        except ModuleNotFoundError:
            lost.append(module)
            continue
        if kind and not hasattr(owner, kind):
            lost.append(f"{module}.{kind}")
            continue
        owner = getattr(owner, kind) if kind else owner
        lost += [f"{place.replace(':', '.')}.{name}" for name in attributes if not hasattr(owner, name)]
    return lost


def missing_paths(owner: Any, paths: Iterable[str]) -> list[str]:
    """Return which of `paths`, such as "scheduler.running" or "new|old", do not lead from `owner` to anything."""
    return [path for path in paths if not _known_name(owner, path)]


def known_name(owner: Any, names: str) -> str:
    """Return the first of several names of one thing, such as "new|old", that `owner` has.

    Raises:
        AttributeError: it has none.
    """
    if name := _known_name(owner, names):
        return name
    raise AttributeError(f"{type(owner).__name__} has no {names}")


def _known_name(owner: Any, names: str) -> str:
    for name in names.split("|"):
        try:
            attrgetter(name)(owner)
        except AttributeError:
            continue
        return name
    return ""
