"""Saves the state of an online run between two steps, and continues from it."""

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rlhf_data.errors import CheckpointError, RlhfError
from rlhf_train.background import BackgroundWriter
from rlhf_train.online.job import OnlineJob
from rlhf_train.online.learner import Learner
from rlhf_train.run.checkpoint import Checkpoint, Checkpoints, cannot_save
from rlhf_train.run.observer import Observer
from rlhf_train.run.recorder import Recorder
from rlhf_train.run.timeline import Timeline


class Resumable(Protocol):
    """A part of a run that has a state besides the models."""

    def state(self) -> Any:
        """Return the state between two steps as JSON values."""

    def restore(self, state: Any) -> None:
        """Continue with a state that `state` returned in another process."""


class Checkpointer:
    """Writes checkpoints while the run goes on, and restores them.

    A checkpoint that cannot be written is a warning, since training does not need it: the one before stays.

    Args:
        job: says how often, and how many are kept.
        folder: of all checkpoints of the run.
        parts: the parts of the run with a state, by name.
        learner: holds the models.
        recorder: its files must be on the disk before a checkpoint counts.
        timeline: counts the seconds for which the run waits.
        observer: is warned.
    """

    def __init__(
        self,
        job: OnlineJob,
        folder: Path,
        parts: Mapping[str, Resumable],
        learner: Learner,
        recorder: Recorder,
        timeline: Timeline,
        observer: Observer,
    ) -> None:
        spec = job.checkpoints
        self._job = job
        self._parts = parts
        self._learner = learner
        self._recorder = recorder
        self._timeline = timeline
        self._observer = observer
        self._checkpoints = Checkpoints(folder, max_num=spec.max_num, max_bytes=spec.max_bytes)
        self._background = BackgroundWriter(lambda error: cannot_save(folder, error), max_pending=1)
        self._failures: list[str] = []
        self._ended = threading.Event()  # no rank writes the last checkpoint any more
        self._saved_step = 0
        self._state: dict[str, Any] = {"step": 0}  # between the last two steps
        self._metric: float | None = None

    def restore(self, checkpoint: Checkpoint) -> int:
        """Continue from `checkpoint`; return its step.

        Raises CheckpointError when it belongs to other models or other prompts.
        """
        state = checkpoint.state()
        if lacking := self._parts.keys() - state.keys():
            raise CheckpointError(f"{checkpoint.path} lacks the state of {', '.join(sorted(lacking))}")
        self._learner.load_state(str(checkpoint.path))
        for name, part in self._parts.items():
            part.restore(state[name])
        self._state = state
        self._saved_step = checkpoint.step
        return checkpoint.step

    def after_step(self, step: int, metric: float | None) -> None:
        """Remember the state after `step`, and save it if that is due.

        `metric` is the value that decides the best checkpoint, or None if `step` was not evaluated.
        """
        self._state = {"step": step, **{name: part.state() for name, part in self._parts.items()}}
        self._metric = metric
        every = self._job.checkpoints.every
        if every > 0 and step % every == 0:
            self.save()

    def save(self) -> None:
        """Save the state after the last complete step, unless it is saved already. The models must have that state."""
        step = self._state["step"]
        spec = self._job.checkpoints
        self._warn()
        if step == self._saved_step or not (spec.full or spec.hf_model):
            return
        self._saved_step = step
        with self._timeline.phase("checkpoint"):
            try:
                self._await_commit()
                staging = self._checkpoints.begin(step)
                names = self._learner.save_state(str(staging)) if spec.full else []
                if spec.hf_model:
                    self._learner.save("actor", str(staging / "hf"))
                written = self._recorder.written()
            except CheckpointError as error:
                self._failures.append(str(error))
                self._warn()
                return
            # The thread gets its own references: the attributes change with the next step.
            args = step, self._state, names, self._metric, written, self._ended
            self._background.submit(lambda: self._commit(*args))

    def close(self, *, ranks_live: bool = True) -> None:
        """Wait until everything is written; with dead ranks, give up what they have not written."""
        if ranks_live:
            self._learner.finish_state()
        self._ended.set()
        self._background.close(lambda: None)
        self._warn()

    def _await_commit(self) -> None:
        """Wait until the checkpoint before is in force or has failed: two at once would need twice the memory."""
        self._learner.finish_state()
        self._ended.set()
        self._background.written().result()
        self._ended = threading.Event()
        self._warn()

    def _commit(
        self,
        step: int,
        state: Mapping[str, Any],
        names: Sequence[str],
        metric: float | None,
        written: Callable[[], None],
        ended: threading.Event,
    ) -> None:
        try:
            written()
            self._checkpoints.commit(step, state, names, metric, ended)
        except (RlhfError, OSError) as error:
            self._failures.append(str(error))

    def _warn(self) -> None:
        """Show what failed on the thread, from the thread that may use the terminal."""
        while self._failures:
            self._observer.warning(f"a checkpoint was not saved: {self._failures.pop(0)}")
