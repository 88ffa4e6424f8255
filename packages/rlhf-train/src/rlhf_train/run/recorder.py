"""Writes the folder of a run: metrics, TensorBoard events, the resolved configuration and rollouts."""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from rlhf_data.errors import ConfigError, RlhfError
from rlhf_data.records import RolloutGroup
from rlhf_rollout.records_io import COLUMNS, RolloutWriter, read_lines
from rlhf_train.background import BackgroundWriter, cannot_write
from rlhf_train.run.checkpoint import FOLDER, flush
from rlhf_train.run.observer import Observer
from rlhf_train.run.trackers.jsonl import JsonlTracker
from rlhf_train.run.trackers.spec import Tracker, TrackerSpec
from rlhf_train.run.trackers.start import open_remote, open_tensorboard
from rlhf_train.tracing.token_values import TokenValues, cut_values, write_values

_STEP = re.compile(rb'\{"step": (-?\d+)[,}]')  # the beginning of a record
GROUPS_LEFT = "groups_left"  # of a record: how many groups of its step follow that of the record
_SUMMARY = b'"time/total": '  # only the summary of a run that ended has this metric
_ROLLOUTS = ("rollouts", "held-out rollouts")
_RECORDS = ("metrics", *_ROLLOUTS)  # the artifacts that consist of records
RecordFormat = Literal["jsonl", "columns"]

ARTIFACTS: Mapping[str, str] = {
    "metrics": "metrics.jsonl",
    "tensorboard": "tensorboard",
    "config": "config.toml",
    "rollouts": "rollouts.jsonl",
    "held-out rollouts": "eval_rollouts.jsonl",
    "token values": "token_values",
    "final model": "model",
    "best model": "best_model",
    "averaged model": "ema_model",
    "critic": "critic",
    "draft model": "draft",
    "checkpoints": FOLDER,
    "timeline": "timeline.json",
    "log": "log.txt",
    "inputs": "inputs",  # functions and rows that Python gave to the run
}


def artifact_path(folder: Path, artifact: str, record_format: RecordFormat = "jsonl") -> Path:
    """Return the path of an artifact of the run in `folder`, which need not exist yet.

    Rollouts are in the file that the run has; only without one does `record_format` decide.
    """
    path = folder / ARTIFACTS[artifact]
    columns = path.with_suffix(COLUMNS)
    is_new = record_format == "columns" and not path.exists()
    return columns if artifact in _ROLLOUTS and (is_new or columns.exists()) else path


def check_save_path(save_path: str, *, resumes: bool = False) -> None:
    """Raise ConfigError when the folder holds anything besides the log and the inputs of the command that is running.

    With `resumes`, it may hold a run.
    """
    folder = Path(save_path)
    if resumes and (folder / ARTIFACTS["config"]).is_file():
        return
    before = {ARTIFACTS["log"], ARTIFACTS["inputs"]}
    if folder.is_dir() and any(path.name not in before for path in folder.iterdir()):
        raise ConfigError(f"save_path {folder} is not empty", hint="name a new folder with ``save_path``")


class Recorder:
    """Writes a run's folder and sends its metrics to trackers. A context manager that closes both.

    Rollouts are written on background threads. A failed write raises RlhfError at the next call and at `close`. A
    tracker on another machine is the exception: its failure is a warning, because `metrics.jsonl` has the numbers too.

    Args:
        save_path: the folder, new or empty, or that of the run to continue.
        config: the resolved configuration as TOML.
        trackers: where metrics go besides `metrics.jsonl`.
        observer: is notified of the trackers' addresses, and warned when one fails.
        resumed_step: last step whose updates are kept in the run to continue: records of later steps are removed from
            its files. 0 keeps the evaluation before the first step, and -1 nothing. None for a new run.
        is_recorded: whether the records of `resumed_step` are kept; else only its rollouts are, and the run writes the
            others again.
        record_format: of the files of rollouts: JSON lines or `records_io.COLUMNS`. A run that continues goes on in the
            files that it has.

    Raises:
        ConfigError: the folder is not empty, or a tracker cannot start.
    """

    def __init__(
        self,
        save_path: str,
        config: str,
        trackers: TrackerSpec | None = None,
        observer: Observer | None = None,
        resumed_step: int | None = None,
        *,
        is_recorded: bool = True,
        record_format: RecordFormat = "jsonl",
    ) -> None:
        check_save_path(save_path, resumes=resumed_step is not None)
        spec = trackers or TrackerSpec()
        self.folder = Path(save_path)
        self._record_format: RecordFormat = record_format
        self.folder.mkdir(parents=True, exist_ok=True)
        self._config: str | None = config  # until it is written
        if not self.path("config").exists():
            self._write_config()
        self._observer = observer or Observer()
        self._logging_steps = spec.logging_steps
        recorded_step = resumed_step
        if resumed_step is not None:
            recorded_step = resumed_step if is_recorded else resumed_step - 1
            for name in _RECORDS:
                cut_records(self.path(name), resumed_step if name == "rollouts" else recorded_step)
            cut_values(self.path("token values"), resumed_step)
            file = self.path("rollouts")
            if (file.suffix == COLUMNS) != (record_format == "columns"):
                self._observer.notice(f"``record_format={record_format}`` has no effect: the run goes on in {file}")
        self._metrics = JsonlTracker(self.path("metrics"))
        remote = open_remote(spec, self.folder, config, self._run_ids())
        if remote:
            self._run_ids_file.write_text(json.dumps({name: tracker.run_id for name, tracker in remote.items()}))
        self._trackers: list[Tracker] = [
            open_tensorboard(spec, self.path("tensorboard"), recorded_step),
            *(RemoteTracker(name, tracker, self._observer.warning) for name, tracker in remote.items()),
        ]
        for name, tracker in remote.items():
            self._observer.notice(f"{name}: {tracker.where}")
        self._rollouts: dict[str, tuple[RolloutWriter, BackgroundWriter]] = {}
        self._values = BackgroundWriter(partial(cannot_write, self.path("token values")))

    def path(self, artifact: str) -> Path:
        """Return the path of an artifact, which need not exist yet."""
        return artifact_path(self.folder, artifact, self._record_format)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of one step, or of one update of an offline run. Trackers get every `logging_steps`th."""
        self._write_config()
        self._metrics.log(step, metrics)
        if step % self._logging_steps == 0:
            for tracker in self._trackers:
                tracker.log(step, metrics)

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log metrics that not every step has, such as those of an evaluation. Trackers get all of them."""
        for tracker in (self._metrics, *self._trackers):
            tracker.log(step, metrics)

    def _write_config(self) -> None:
        """Write the configuration once. One that a checkpoint refuses must not replace that of the run before."""
        if self._config is not None:
            self.path("config").write_text(self._config, encoding="utf-8")
        self._config = None

    def rollouts(
        self, artifact: str, step: int, groups: Sequence[RolloutGroup], *, num_later: int | None = None, **fields: Any
    ) -> None:
        """Append one record per rollout, which begins with the step and further `fields`.

        Returns before the records are written, unless many writes are waiting already. With `num_later`, the number of
        groups of the step that later calls append, records say how many groups of their step follow: a reader then
        knows whether a step is complete.
        """
        if artifact not in self._rollouts:
            path = self.path(artifact)
            self._rollouts[artifact] = RolloutWriter(path), BackgroundWriter(partial(cannot_write, path))
        writer, background = self._rollouts[artifact]

        def write() -> None:
            for number, group in enumerate(groups, 1):
                left = {} if num_later is None else {GROUPS_LEFT: len(groups) - number + num_later}
                writer.write(group, step=step, **fields, **left)

        background.submit(write)

    def token_values(self, step: int, parts: Sequence[TokenValues]) -> None:
        """Write what was computed for the tokens of a step, from all ranks; returns like `rollouts`."""
        self._values.submit(partial(write_values, self.path("token values"), step, parts))

    def written(self) -> Callable[[], None]:
        """Return a function that waits until all records so far are on the disk. Other threads may call it."""
        waiting = [each.written() for each in (self._values, *(each for _, each in self._rollouts.values()))]
        paths = [path for name in _RECORDS if (path := self.path(name)).exists()]

        def wait() -> None:
            for each in waiting:
                each.result()
            for path in paths:
                flush(path)

        return wait

    def close(self) -> None:
        """Finish all waiting writes and close all files. Raises RlhfError when a write failed."""
        with ExitStack() as stack:  # closes all of them even if one fails
            stack.callback(self._values.close, lambda: None)
            for writer, background in self._rollouts.values():
                stack.callback(background.close, writer.close)
            for tracker in (*self._trackers, self._metrics):
                stack.callback(tracker.close)

    @property
    def _run_ids_file(self) -> Path:
        return self.folder / "trackers.json"

    def _run_ids(self) -> dict[str, str]:
        """Return the ids of this folder's run in trackers; empty for a new run."""
        path = self._run_ids_file
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except RlhfError as failure:
            if error is None:
                raise
            # The run ends with the error that stopped it. Show this one as a warning, unless they are the same.
            if str(failure) != str(error):
                self._observer.warning(str(failure))


def cut_records(path: Path, last_step: int) -> None:
    """Remove all records after `last_step` from a file whose records begin with their step, in its order.

    The file has JSON lines or columns. An incomplete last line or chunk is removed, too, and the summary of a run that
    ended. A missing file stays missing.
    """
    if not path.exists():
        return
    end = 0
    for line in read_lines(path, has_tokens=False):
        match = _STEP.match(line.text)
        if match is None or int(match[1]) > last_step or not line.text.endswith(b"\n") or _SUMMARY in line.text:
            break
        end = line.end
    os.truncate(path, end)


def ended_after(path: Path) -> int | None:
    """Return the last step of the run whose metrics are in a file; None if the run has not ended with a summary."""
    lines = path.read_bytes().splitlines() if path.is_file() else []
    match = _STEP.match(lines[-1]) if lines and _SUMMARY in lines[-1] else None
    return None if match is None else int(match[1])


class RemoteTracker:
    """Sends metrics to a tracker on another machine without making the run wait for it or fail with it.

    After a failure, `warn` is called once, and the tracker gets no more metrics.
    """

    def __init__(self, name: str, tracker: Tracker, warn: Callable[[str], None]) -> None:
        self._tracker = tracker
        self._warn = warn
        self._background = BackgroundWriter(lambda error: RlhfError(f"{name} failed: {error}"), max_pending=64)
        self._has_failed = False
        self.where = tracker.where
        self.run_id = tracker.run_id

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Tracker`."""
        numbers = dict(metrics)
        self._attempt(lambda: self._background.submit(lambda: self._tracker.log(step, numbers)))

    def close(self) -> None:
        """See `Tracker`."""
        self._attempt(lambda: self._background.close(self._tracker.close))

    def _attempt(self, call: Callable[[], None]) -> None:
        try:
            call()
        except RlhfError as error:
            if not self._has_failed:
                self._warn(f"{error}; it gets no more metrics of this run; metrics.jsonl has all of them")
            self._has_failed = True
