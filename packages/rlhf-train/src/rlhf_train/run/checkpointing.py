"""Saves the state of a run between two steps, or two updates of an offline run, and continues from it."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rlhf_data.errors import CheckpointError, RlhfError
from rlhf_train.background import BackgroundWriter
from rlhf_train.run.checkpoint import (
    MANIFEST,
    WRITER,
    Checkpoint,
    Checkpoints,
    CheckpointSpec,
    cannot_save,
    folders,
    step_of,
)
from rlhf_train.run.observer import Observer
from rlhf_train.run.recorder import Recorder
from rlhf_train.run.timeline import Timeline


class Resumable(Protocol):
    """A part of a run that has a state besides the models."""

    def state(self) -> Any:
        """Return the state between two steps: JSON values, rollout groups and arrays; see `saved.state`."""

    def restore(self, state: Any) -> None:
        """Continue with a state that `state` returned in another process."""


class Models(Protocol):
    """The trained models of a run on all its ranks."""

    def save_state(self, folder: str) -> list[str]:
        """Have all ranks copy their models to host memory and write them to `folder` while the run goes on.

        Returns the names of the files, which are complete when each has a receipt; see `run.checkpoint`.
        """

    def finish_state(self) -> None:
        """Wait until no rank writes files of `save_state` any more."""

    def load_state(self, folder: str) -> None:
        """Have all ranks continue with the models in `folder`."""

    def save(self, role: str, path: str) -> None:
        """Write the model of `role` as a Hugging Face folder."""


def find_checkpoint(spec: CheckpointSpec, run_folder: str | Path, observer: Observer) -> Checkpoint | None:
    """Return the newest whole checkpoint if the run continues one, and say so; None for a run from the start.

    Raises CheckpointError when there are checkpoints, and none of them can be used: a run from the start would remove
    them and the records of their steps.
    """
    if not spec.resume:
        return None
    folder = spec.home(run_folder)
    checkpoint = Checkpoints(folder).newest_whole(observer.warning, spec.before)
    if checkpoint is None:
        unusable = [path for path in folders(folder) if step_of(path) < spec.before and (path / MANIFEST).is_file()]
        if unusable:
            message = f"none of the {len(unusable)} checkpoints in {folder} can be used; the warnings say why"
            hint = "continue with the version that wrote them, or copy them there again; to begin anew, move them away"
            raise CheckpointError(message, hint=hint)
        observer.notice(f"there is no checkpoint in {folder}: the run starts from the beginning")
    else:
        observer.notice(f"the run continues from {checkpoint.path}")
    return checkpoint


def resumed_step(spec: CheckpointSpec, checkpoint: Checkpoint | None) -> int | None:
    """Return which records `Recorder` keeps when the run continues from `checkpoint`; None for a new run."""
    if not spec.resume:
        return None
    return -1 if checkpoint is None else checkpoint.step


@dataclass(eq=False, repr=False)
class Checkpointer:
    """Writes checkpoints while the run goes on, and restores them.

    A checkpoint that cannot be written is a warning, since training does not need it: the one before stays.

    Attributes:
        spec: says how often, and what.
        checkpoints: of the run.
        parts: the parts of the run with a state, by name.
        models: the trained models.
        recorder: its files must be on the disk before a checkpoint counts; None if nothing is recorded.
        timeline: counts the seconds for which the run waits.
        observer: is warned.
        role: of the model that `spec.hf_model` saves.
    """

    spec: CheckpointSpec
    checkpoints: Checkpoints
    parts: Mapping[str, Resumable]
    models: Models
    recorder: Recorder | None
    timeline: Timeline
    observer: Observer
    role: str = "actor"

    def __post_init__(self) -> None:
        folder = self.checkpoints.folder
        self._background = BackgroundWriter(lambda error: cannot_save(folder, error), max_pending=1)
        self._failures: list[str] = []
        self._ended = threading.Event()  # no rank writes the last checkpoint any more
        self._saved_step = 0
        self._state: dict[str, Any] = {"step": 0, "is_recorded": True}  # after the last update
        self._metric: float | None = None

    def restore(self, checkpoint: Checkpoint) -> int:
        """Continue from `checkpoint`; return its step.

        Raises CheckpointError when it belongs to other models or other prompts.
        """
        state = checkpoint.state()
        if lacking := self.parts.keys() - state.keys():
            message = f"{checkpoint.path} lacks the state of {', '.join(sorted(lacking))}"
            raise CheckpointError(message, hint=WRITER)
        self.models.load_state(str(checkpoint.path))
        try:
            for name, part in self.parts.items():
                part.restore(state[name])
        except (KeyError, TypeError, AttributeError) as error:
            message = f"{checkpoint.path} holds a state that this version cannot continue: {error!r}"
            raise CheckpointError(message, hint=WRITER) from error
        self._state = state
        self._saved_step = checkpoint.step
        return checkpoint.step

    def remember(self, step: int, metric: float | None = None, *, is_recorded: bool = False) -> None:
        """Remember the state after the updates of `step`, to be saved until the next call.

        Args:
            step: whose updates the models have.
            metric: the value that decides the best checkpoint; None if `step` was not evaluated.
            is_recorded: whether `step` was also evaluated, if that was due, and its metrics written. A run that
                continues does both otherwise.
        """
        parts = {name: part.state() for name, part in self.parts.items()}
        clock = self.spec.template_clock
        told = {} if clock is None else {"template_clock": clock.isoformat()}
        self._state = {"step": step, "is_recorded": is_recorded, **told, **parts}
        self._metric = metric

    def after_step(self, step: int, metric: float | None) -> None:
        """Remember the state after `step`, with all its records, and save it if that is due."""
        self.remember(step, metric, is_recorded=True)
        if self.is_due(step):
            self.save()

    def is_due(self, step: int) -> bool:
        """Return whether `after_step` saves the state after `step`."""
        return self.spec.every > 0 and step % self.spec.every == 0

    @property
    def unrecorded_step(self) -> int | None:
        """The step that the remembered state says is still to be evaluated and recorded; None without one."""
        return None if self._state["is_recorded"] else self._state["step"]

    @property
    def is_behind(self) -> bool:
        """Whether `save` has something to save."""
        return self._state["step"] != self._saved_step and (self.spec.full or self.spec.hf_model)

    def save(self) -> None:
        """Save the remembered state, unless it is saved already. The models must have that state."""
        step = self._state["step"]
        spec = self.spec
        self._warn()
        if not self.is_behind:
            return
        self._saved_step = step
        with self.timeline.phase("checkpoint"):
            try:
                self._await_commit()
                staging = self.checkpoints.begin(step)
                names = self.models.save_state(str(staging)) if spec.full else []
                if spec.hf_model:
                    self.models.save(self.role, str(staging / "hf"))
                written = self.recorder.written() if self.recorder else lambda: None
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
            self.models.finish_state()
        self._ended.set()
        self._background.close(lambda: None)
        self._warn()

    def _await_commit(self) -> None:
        """Wait until the checkpoint before is in force or has failed: two at once would need twice the memory."""
        self.models.finish_state()
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
            self.checkpoints.commit(step, state, names, metric, ended)
        except (RlhfError, OSError) as error:
            self._failures.append(str(error))

    def _warn(self) -> None:
        """Show what failed on the thread, from the thread that may use the terminal."""
        while self._failures:
            self.observer.warning(f"a checkpoint was not saved: {self._failures.pop(0)}")
