"""Runs from Python: a function per training command, whose keyword arguments are the command's options.

A run is a process of its own, as if the command had been typed: the notebook or script that starts it holds no model
and no GPU, and the folder of the run is the same. A reward function or rows that are given as objects are written to
that folder, so `rlhf ppo --resume` finds them, too.
"""

import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from inspect import getmodule, isroutine
from pathlib import Path
from typing import Any, TypeAlias

from rlhf_cli.config.paths import INPUTS_FOLDER, user_path
from rlhf_cli.console.exits import BAD_INPUT, SUCCESS
from rlhf_cli.main import command_line
from rlhf_cli.preflight.resume import check_run_folders, run_folder
from rlhf_cli.report.runs import Run, read_run
from rlhf_cli.report.samples import recorded
from rlhf_data.errors import ConfigError, RlhfError
from rlhf_rollout.rewards.user_function import DEFAULT_FUNCTION

Rows: TypeAlias = Sequence[Mapping[str, Any]]
Option: TypeAlias = str | int | float | bool | Path | Sequence[int | float | str] | Rows | Callable[..., Any] | None

_ROWS = ("prompt_data", "eval_data", "dataset", "eval_dataset")
_LOADER = """\
# The function that was given to rlhf_cli.ppo as `remote_rm_url`. It imports what the script or notebook could.
import pickle
import sys
from pathlib import Path

sys.path += [folder for folder in {folders} if folder not in sys.path]
{function} = pickle.loads(Path(__file__).with_suffix(".pickle").read_bytes())
"""


def ppo(**options: Option) -> Run:
    """Train a policy on rewards, as `rlhf ppo` does; return its run.

    Args:
        options: the options of the command by name, without `--`. A switch is True or False, a list has the values of
            an option that takes several, and None is no value. `preset` and `config` name a preset and a TOML file.
            `remote_rm_url` may be a function of queries, prompts and labels, as docs/rewards.md describes it;
            `prompt_data` and `eval_data` may be lists of rows, each a dictionary.

    Raises:
        ConfigError: an unknown option, options that cannot work together, or a model, data or reward that does not
            work.
        RlhfError: the run failed; the message is its error.
        KeyboardInterrupt: it was interrupted. The run has ended, and has saved what an interrupted command saves.
    """
    return _run("ppo", options)


def sft(**options: Option) -> Run:
    """Train a model on demonstrations, as `rlhf sft` does. `dataset` and `eval_dataset` may be lists of rows; `ppo`
    describes the other arguments, the result and the errors."""
    return _run("sft", options)


def rm(**options: Option) -> Run:
    """Train a reward model on pairs of answers, as `rlhf rm` does; see `sft`."""
    return _run("rm", options)


def dpo(**options: Option) -> Run:
    """Train a policy on pairs of answers, as `rlhf dpo` does; see `sft`."""
    return _run("dpo", options)


def kto(**options: Option) -> Run:
    """Train a policy on answers judged good or bad, as `rlhf kto` does; see `sft`."""
    return _run("kto", options)


def prm(**options: Option) -> Run:
    """Train a process reward model on judged steps, as `rlhf prm` does; see `sft`."""
    return _run("prm", options)


def kd(**options: Option) -> Run:
    """Train a model on demonstrations and a teacher, as `rlhf kd` does; see `sft`."""
    return _run("kd", options)


def open_run(folder: str | Path) -> Run:
    """Return the run in a folder, which may still go on. Raises DataError if there is none."""
    return read_run(user_path(folder))


def read_rollouts(run: Run) -> Iterator[dict[str, Any]]:
    """Yield the rollouts of an online run, those of training first: `step`, `prompt`, `text`, `reward`, `tokens` and
    others, as rollouts.jsonl has them."""
    for rollouts in recorded(run.folder):
        for _, record in rollouts.file.rows():
            yield record


def _run(command: str, options: Mapping[str, Option]) -> Run:
    """Check the options here, write objects to the folder of the run, and run the command."""
    line = command_line(command)
    files = {name: f"{INPUTS_FOLDER}/{name}.py" for name, value in options.items() if callable(value)}
    files |= {name: f"{INPUTS_FOLDER}/{name}.jsonl" for name, value in options.items() if _is_rows(value)}
    if misplaced := [name for name in files if name not in ("remote_rm_url", *_ROWS)]:
        value = options[misplaced[0]]
        hint = "a function may be given as `remote_rm_url`, and rows as " + ", ".join(_ROWS)
        raise ConfigError(f"`{misplaced[0]}` is a value of type {type(value).__name__}", hint=hint)
    config = line.parse(_words(dict(options) | files)).config
    saving = config.checkpoint
    folder = run_folder(saving, config.output.save_path, command)
    check_run_folders(saving, folder)
    for name, file in files.items():
        _write(folder / file, options[name])
    places = {name: folder / file for name, file in files.items()}
    named = {} if saving.resume else {"save_path": folder}
    _start([command, *_words(dict(options) | places | named)])
    return read_run(folder)


def _is_rows(value: Option) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and any(isinstance(row, Mapping) for row in value)


def _words(options: Mapping[str, Any]) -> list[str]:
    """Return the flags of options."""
    words = []
    for name, value in options.items():
        if isinstance(value, list | tuple):
            words += [f"--{name}", *map(str, value)]
        else:
            words.append(f"--{name}={str(value).lower() if isinstance(value, bool) else value}")
    return words


def _write(file: Path, value: Any) -> None:
    """Write rows as JSONL, or a function as a Python file that reads it from a pickle."""
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        if callable(value):
            file.with_suffix(".pickle").write_bytes(_pickled(value))
            loader = _LOADER.format(folders=[*map(os.path.abspath, sys.path)], function=DEFAULT_FUNCTION)
            file.write_text(loader, encoding="utf-8")
        else:
            file.write_text("".join(json.dumps(row) + "\n" for row in value), encoding="utf-8")
    except (pickle.PicklingError, TypeError, ValueError) as error:
        hint = f"name a file instead, as in `rlhf ppo --{file.stem} FILE`"
        raise ConfigError(f"`{file.stem}` cannot be written to a file: {error}", hint=hint) from None


def _pickled(function: Callable[..., Any]) -> bytes:
    """Return a pickle of a function that holds its code: another process may not find the script or notebook, and a
    file beside them may have changed."""
    from ray import cloudpickle

    coded = function
    while isinstance(coded, partial):
        coded = coded.func
    module = getmodule(coded if isroutine(coded) else type(coded))
    file = getattr(module, "__file__", None)  # of no module of C, and not of a notebook
    # cloudpickle by itself takes along what a script or notebook defines.
    if file is None or module.__name__ == "__main__" or "site-packages" in file:
        return cloudpickle.dumps(function)
    cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps(function)
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _start(words: Sequence[str]) -> None:
    """Run a command as a process, and print what it says. See `ppo` for what is raised."""
    command = [sys.executable, "-m", "rlhf_cli.main", *words]
    said = []
    # In a session of its own, it gets Ctrl-C once: from here, and not from the terminal as well.
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    with subprocess.Popen(command, **options) as process:
        is_interrupted = False
        while True:
            try:
                for line in process.stdout:
                    print(line, end="", flush=True)
                    said.append(line)
                break
            except KeyboardInterrupt:
                is_interrupted = True
                process.send_signal(signal.SIGINT)
    if is_interrupted:
        raise KeyboardInterrupt
    if process.returncode == SUCCESS:
        return
    _, mark, text = ("\n" + "".join(said)).rpartition("\nerror: ")
    if not mark:
        hint = "see its output above, and log.txt in its folder; a negative status is the number of a signal"
        raise RlhfError(f"`rlhf {words[0]}` ended with status {process.returncode}", hint=hint)
    kind = ConfigError if process.returncode == BAD_INPUT else RlhfError
    message, _, hint = text.strip().partition("\n\nhint: ")
    raise kind(message, hint=hint or None)
