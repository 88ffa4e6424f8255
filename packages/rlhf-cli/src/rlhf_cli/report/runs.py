"""What the folder of a run says besides its rollouts: metrics, configuration and its difference to the defaults."""

import json
import math
import re
import tomllib
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_cli.config.paths import CONFIG_FILE, LOG_FILE
from rlhf_cli.doctor.environment import MARK
from rlhf_data.errors import DataError
from rlhf_data.options.command_line import ORIGINS
from rlhf_data.options.declare import Config, options

METRICS_FILE = "metrics.jsonl"
MAX_POINTS = 2000  # of a curve in a page; a screen is narrower
_MAX_LOG_LINES = 200
# What `to_toml` writes of an origin. A text ends with a quotation mark, so that none looks like this.
_ORIGIN = re.compile(rf"^(?P<name>\w+) = .*  # (?P<origin>{'|'.join(ORIGINS)})$", re.MULTILINE)
_ENDED = re.compile(r"(?:step|update) (\d+) of \d+ ended\n")  # what a run writes to its log after a step
_LOG_WORDS = ("notice: ", "warning: ", "error: ", "WARNING", "ERROR", "CRITICAL", "Traceback", "Error:")
# The command by the first part of its metrics' names.
_COMMANDS = {"rollout": "ppo", "preference": "dpo", **{name: name for name in ("sft", "rm", "kto", "prm", "kd")}}

# A curve: steps and values in the order of the file. A value is None where the run had NaN or an infinity.
Curve = list[tuple[int, float | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run, as its folder has it so far.

    Attributes:
        folder: of the run.
        curves: by name of the metric.
        config: rows of section, option, value as TOML has it, and its origin: one of `ORIGINS`, `default`, or `set`
            where the file does not say more; empty where the command that ran is not known either.
        command: such as ppo and sft; empty if the metrics do not tell.
        log: notices, warnings and errors in log.txt, the newest last, each with the step that had ended before it.
        num_log_lines: how many of them there are.
        environment: versions and hardware by name, of the process that ran last.
        num_damaged: lines of metrics.jsonl that are no metrics.
    """

    folder: Path
    curves: Mapping[str, Curve]
    config: Sequence[tuple[str, str, Any, str]]
    command: str
    log: Sequence[tuple[int, str]]
    num_log_lines: int
    environment: Mapping[str, str]
    num_damaged: int

    @property
    def metrics(self) -> dict[str, float | None]:
        """The last value of each metric."""
        return {name: curve[-1][1] for name, curve in self.curves.items()}

    @property
    def last_step(self) -> int:
        """The last step, or update of an offline run, that has metrics."""
        return max((curve[-1][0] for curve in self.curves.values()), default=0)


def read_run(folder: Path) -> Run:
    """Return what the folder of a run has. Raises DataError if it is not the folder of a run."""
    path = folder / METRICS_FILE
    if not path.is_file() and not (folder / CONFIG_FILE).is_file():
        what = "has no metrics.jsonl" if folder.is_dir() else "does not exist"
        hint = "name the folder of a run: its --save_path, or rlhf-output/COMMAND-DATE-TIME"
        raise DataError(f"there is no run in {folder}: it {what}", hint=hint)
    curves, num_damaged = _metrics(path)
    command = _command(curves)
    log, num_log_lines, environment = _log(folder / LOG_FILE)
    return Run(
        folder=folder,
        curves=curves,
        config=_configuration(folder, command),
        command=command,
        log=log,
        num_log_lines=num_log_lines,
        environment=environment,
        num_damaged=num_damaged,
    )


def _metrics(path: Path) -> tuple[dict[str, Curve], int]:
    """Return the curves of a file of metrics and the number of damaged lines; nothing if there is no file yet."""
    curves: dict[str, Curve] = {}
    num_damaged = 0
    for line in path.read_bytes().splitlines(keepends=True) if path.is_file() else ():
        if not line.endswith(b"\n"):
            break  # the run is writing it
        try:
            record = json.loads(line)
            step = int(record.pop("step"))
            values = {name: _value(value) for name, value in record.items()}
        except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError):
            num_damaged += 1
            continue
        for name, value in values.items():
            curves.setdefault(name, []).append((step, value))
    return curves, num_damaged


def finite(value: Any) -> float:
    """Return a number, or that of a text. Raises ValueError for one that is not finite."""
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{number} is not finite")
    return number


def _value(value: Any) -> float | None:
    number = None if value is None else float(value)
    return number if number is not None and math.isfinite(number) else None


def _command(curves: Mapping[str, Curve]) -> str:
    """Return the command of a run, which the first parts of its metrics' names tell."""
    firsts = dict.fromkeys(name.partition("/")[0] for name in curves)
    return next((_COMMANDS[first] for first in firsts if first in _COMMANDS), "")


def _configuration(folder: Path, command: str) -> list[tuple[str, str, Any, str]]:
    """Return `Run.config`. Raises DataError for a file that is not TOML."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        return []
    try:
        text = path.read_text(encoding="utf-8")
        tables = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        hint = "use the folder as the run wrote it, or remove the file: the report needs it only for the configuration"
        raise DataError(f"{path} is not TOML: {error}", hint=hint) from None
    defaults = _defaults(command)
    said = {found["name"]: found["origin"] for found in _ORIGIN.finditer(text)}
    rows = []
    for section, table in tables.items():
        values = table if isinstance(table, dict) else {section: table}
        for name, value in values.items():
            known = defaults.get(name, _UNKNOWN)
            compared = "default" if _same(value, known) else "set"
            rows.append((section, name, value, said.get(name) or ("" if known is _UNKNOWN else compared)))
    return rows


_UNKNOWN = object()


def _same(value: Any, default: Any) -> bool:
    return value == (list(default) if isinstance(default, tuple) else default)


def _defaults(command: str) -> dict[str, Any]:
    """Return the default of each option of a command; empty for one that is not known."""
    from rlhf_cli.config import offline
    from rlhf_cli.config.ppo import PpoConfig

    classes: dict[str, type[Config]] = {
        "ppo": PpoConfig,
        "sft": offline.SftConfig,
        "kd": offline.KdConfig,
        "rm": offline.RmConfig,
        "dpo": offline.DpoConfig,
        "kto": offline.KtoConfig,
        "prm": offline.PrmConfig,
    }
    return {option.name: option.info.get_default() for option in options(classes[command])} if command else {}


def _log(path: Path) -> tuple[list[tuple[int, str]], int, dict[str, str]]:
    """Return the last of `Run.log`, the number of all of them, and `Run.environment`."""
    found: deque[tuple[int, str]] = deque(maxlen=_MAX_LOG_LINES)
    number = 0
    step = 0
    environment: dict[str, str] = {}
    with path.open(encoding="utf-8", errors="replace") if path.is_file() else nullcontext(()) as lines:
        for line in lines:
            if ended := _ENDED.fullmatch(line):
                step = int(ended[1])
            elif line.startswith(MARK):
                with suppress(ValueError, AttributeError):
                    environment = {str(name): str(value) for name, value in json.loads(line[len(MARK) :]).items()}
            elif any(word in line for word in _LOG_WORDS):
                number += 1
                found.append((step, line.rstrip("\n")))
    return list(found), number, environment


def thinned(curve: Curve, max_points: int = MAX_POINTS) -> Curve:
    """Return a curve of at most `max_points`: each the last step and the mean of as many points that follow each other.

    A mean is over values that are not None, and None if there are none.
    """
    size = math.ceil(len(curve) / max_points) if curve else 1
    if size == 1:
        return curve
    points: Curve = []
    for start in range(0, len(curve), size):
        part = curve[start : start + size]
        known = [value for _, value in part if value is not None]
        points.append((part[-1][0], math.fsum(known) / len(known) if known else None))
    return points
