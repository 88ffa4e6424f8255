"""The sentences that checks have in common."""

from collections.abc import Collection, Iterable

from rlhf_data.errors import ConfigError


def missing(option: str, what: str, hint: str) -> ConfigError:
    """Return the error for an option that is needed and not there."""
    return ConfigError(f"--{option} is missing: {what}", hint=hint)


def without_effect(given: Collection[str], *rows: tuple[bool, Iterable[str], str]) -> list[str]:
    """Return a notice for each given option that a row says is without effect: (whether it is so, options, why)."""
    return [
        f"--{name} has no effect: {why}" for useless, names, why in rows if useless for name in names if name in given
    ]


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
        raise ConfigError(f"--{option} is {bounds[0]:g} {bounds[1]:g}", hint="give LOW before HIGH, two numbers")


def check_has_metric(data_option: str, held_out: str | None, key: str | None, eval_steps: int) -> list[str]:
    """Return notices about --best_metric_key. Raises ConfigError when there is nothing to measure it on."""
    if key is None:
        return []
    if held_out is None:
        raise missing(data_option, f"--best_metric_key {key} is measured on it", "add it")
    few = "--best_metric_key has only the first and the last evaluation to choose from: --eval_steps -1"
    return [few] if eval_steps < 1 else []
