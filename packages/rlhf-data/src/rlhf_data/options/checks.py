"""Errors and notices that the checks of several commands share."""

from collections.abc import Collection, Iterable
from pathlib import Path

from rlhf_data.errors import ConfigError
from rlhf_data.options.declare import Section

_RAY_COPIES = "working_dir_files"  # the folder of Ray with copies of the working directories of submitted jobs


def missing(option: str, what: str, hint: str) -> ConfigError:
    """Return the error for a required option that is not set. `what` says why it is required."""
    return ConfigError(f"--{option} is missing: {what}", hint=hint)


def lacking(options: Section, option: str, what: str, hint: str) -> list[ConfigError]:
    """Return the error of `missing` if a required option of a section is not set, and nothing if it is."""
    return [missing(option, what, hint)] if getattr(options, option) is None else []


def without_effect(given: Collection[str], *rows: tuple[bool, Iterable[str], str]) -> list[str]:
    """Return a notice for each option in `given` that has no effect.

    Each row is (condition, options, reason): if the condition is true, those options have no effect.
    """
    return [
        f"--{name} has no effect: {why}" for useless, names, why in rows if useless for name in names if name in given
    ]


def once(notices: Iterable[str]) -> list[str]:
    """Return `notices` with at most one per option that has no effect: the first, when there are several reasons."""
    found: dict[str, str] = {}
    for notice in notices:
        what, has_none, _ = notice.partition(" has no effect: ")
        found.setdefault(what if has_none else notice, notice)
    return list(found.values())


def check_has_metric(data_option: str, held_out: str | None, key: str | None, eval_steps: int) -> list[str]:
    """Return notices about --best_metric_key, whose value is `key`. Raises ConfigError if there is no held-out data.

    Args:
        data_option: the option that names the held-out data.
        held_out: its value.
        key: the metric, or None.
        eval_steps: the interval of evaluations; below 1 there are only two, before and after training.
    """
    if key is None:
        return []
    if held_out is None:
        raise missing(data_option, f"--best_metric_key {key} is measured on it", f"add --{data_option} FILE.jsonl")
    few = "--best_metric_key can only choose between the first and the last evaluation: --eval_steps is -1"
    return [few] if eval_steps < 1 else []


def check_stays(path: Path, flag: str) -> None:
    """Raise ConfigError if `path` is in Ray's copy of a submitted job's working directory.

    Ray removes the copy some time after the job, and makes another one when a file has changed: a run that is submitted
    again would not find its checkpoints.
    """
    if _RAY_COPIES not in path.parts:
        return
    copy = next(parent for parent in path.parents if parent.parent.name == _RAY_COPIES)
    lasting = Path.home() / path.relative_to(copy)
    message = f"{flag} {path} is in Ray's copy of the job's working directory, which Ray removes"
    raise ConfigError(message, hint=f"give the absolute path of a folder that stays, such as {flag} {lasting}")
