"""The sentences that checks have in common."""

from collections.abc import Collection, Iterable

from rlhf_data.errors import ConfigError, with_hint


def missing(option: str, what: str, hint: str) -> ConfigError:
    """Return the error for an option that is needed and not there."""
    return ConfigError(with_hint(f"--{option} is missing: {what}", hint))


def without_effect(options: Iterable[str], given: Collection[str], why: str) -> list[str]:
    """Return a notice for each of `options` that was given."""
    return [f"--{option} has no effect: {why}" for option in options if option in given]


def once(notices: Iterable[str]) -> list[str]:
    """Return `notices` without those that say of an option again, for another reason, that it has no effect."""
    found: dict[str, str] = {}
    for notice in notices:
        what, has_none, _ = notice.partition(" has no effect: ")
        found.setdefault(what if has_none else notice, notice)
    return list(found.values())


def check_range(option: str, bounds: tuple[float, float] | None) -> None:
    """Raise ConfigError unless the lower bound is below the upper one."""
    if bounds is not None and not bounds[0] < bounds[1]:
        raise ConfigError(with_hint(f"--{option} is {bounds[0]:g} {bounds[1]:g}", "give LOW before HIGH, two numbers"))
