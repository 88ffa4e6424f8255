"""Writes the folder of a run: metrics, TensorBoard events, the resolved configuration and rollouts."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from rlhf_data.errors import ConfigError, RlhfError
from rlhf_data.records import RolloutGroup
from rlhf_rollout.records_io import RolloutWriter
from rlhf_train.background import BackgroundWriter, cannot_write
from rlhf_train.run.observer import Observer
from rlhf_train.run.trackers.jsonl import JsonlTracker
from rlhf_train.run.trackers.spec import Tracker, TrackerSpec
from rlhf_train.run.trackers.start import open_remote, open_tensorboard

ARTIFACTS: Mapping[str, str] = {
    "metrics": "metrics.jsonl",
    "tensorboard": "tensorboard",
    "config": "config.toml",
    "rollouts": "rollouts.jsonl",
    "held-out rollouts": "eval_rollouts.jsonl",
    "final model": "model",
    "best model": "best_model",
    "averaged model": "ema_model",
    "critic": "critic",
    "log": "log.txt",
}


def check_save_path(save_path: str) -> None:
    """Raise ConfigError when the folder holds anything besides the log of the command that is running."""
    folder = Path(save_path)
    if folder.is_dir() and any(path.name != ARTIFACTS["log"] for path in folder.iterdir()):
        raise ConfigError(f"save_path {folder} is not empty", hint="name a new folder with --save_path")


class Recorder:
    """Writes a run's folder and sends its metrics to trackers. A context manager that closes both.

    Rollouts are written on background threads. A failed write raises RlhfError at the next call and at `close`. A
    tracker on another machine is the exception: its failure is a warning, because `metrics.jsonl` has the numbers too.

    Args:
        save_path: the folder, new or empty.
        config: the resolved configuration as TOML.
        trackers: where metrics go besides `metrics.jsonl`.
        observer: is notified of the trackers' addresses, and warned when one fails.

    Raises:
        ConfigError: the folder is not empty, or a tracker cannot start.
    """

    def __init__(
        self, save_path: str, config: str, trackers: TrackerSpec | None = None, observer: Observer | None = None
    ) -> None:
        check_save_path(save_path)
        spec = trackers or TrackerSpec()
        self.folder = Path(save_path)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path("config").write_text(config, encoding="utf-8")
        self._observer = observer or Observer()
        self._logging_steps = spec.logging_steps
        self._metrics = JsonlTracker(self.path("metrics"))
        remote = open_remote(spec, self.folder, config)
        self._trackers: list[Tracker] = [
            open_tensorboard(spec, self.path("tensorboard")),
            *(RemoteTracker(name, tracker, self._observer.warning) for name, tracker in remote.items()),
        ]
        for name, tracker in remote.items():
            self._observer.notice(f"{name}: {tracker.where}")
        self._rollouts: dict[str, _RolloutFile] = {}

    def path(self, artifact: str) -> Path:
        """Return the path of an artifact, which need not exist yet."""
        return self.folder / ARTIFACTS[artifact]

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of one step, or of one update of an offline run. Trackers get every `logging_steps`th."""
        self._metrics.log(step, metrics)
        if step % self._logging_steps == 0:
            for tracker in self._trackers:
                tracker.log(step, metrics)

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log metrics that not every step has, such as those of an evaluation. Trackers get all of them."""
        for tracker in (self._metrics, *self._trackers):
            tracker.log(step, metrics)

    def rollouts(self, artifact: str, step: int, groups: Sequence[RolloutGroup], **fields: Any) -> None:
        """Append one record per rollout, which begins with the step and further `fields`.

        Returns before the records are written, unless many writes are waiting already.
        """
        if artifact not in self._rollouts:
            self._rollouts[artifact] = _RolloutFile(self.path(artifact))
        self._rollouts[artifact].append(groups, {"step": step, **fields})

    def close(self) -> None:
        """Finish all waiting writes and close all files. Raises RlhfError when a write failed."""
        with ExitStack() as stack:  # closes all of them even if one fails
            for part in (*self._rollouts.values(), *self._trackers, self._metrics):
                stack.callback(part.close)

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


class _RolloutFile:
    """A JSONL file of rollouts, written on a background thread."""

    def __init__(self, path: Path) -> None:
        self._writer = RolloutWriter(path)
        self._background = BackgroundWriter(partial(cannot_write, path))

    def append(self, groups: Sequence[RolloutGroup], fields: Mapping[str, Any]) -> None:
        self._background.submit(lambda: self._write(groups, fields))

    def close(self) -> None:
        self._background.close(self._writer.close)

    def _write(self, groups: Sequence[RolloutGroup], fields: Mapping[str, Any]) -> None:
        for group in groups:
            self._writer.write(group, **fields)


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
