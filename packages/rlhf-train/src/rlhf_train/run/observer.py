"""The events of a run that people can watch."""

from collections.abc import Mapping, Sequence

from rlhf_data.records import Prompt, Rollout


class Observer:
    """Receives the events of a run. This class ignores them all; subclasses override those that they show."""

    def starting(self, text: str) -> None:
        """A stage of start-up or shutdown begins, such as "Ray" or "engines and trainers"."""

    def stopping(self) -> None:
        """An online run has failed or was interrupted. It saves what it can next, then comes `ending`."""

    def ending(self, error: BaseException) -> None:
        """An online run has failed or was interrupted, and has saved what it can. Its processes end now."""

    def phase(self, name: str) -> None:
        """A phase of a step begins; see `Timeline`."""

    def progress(self, done: int, total: int) -> None:
        """So many parts are done: rollout groups of a phase in online runs, updates in offline runs."""

    def step(self, step: int, num_steps: int, metrics: Mapping[str, float]) -> None:
        """A step of an online run ended; see `rlhf_train.run.metrics` for the names."""

    def update(self, update: int, num_updates: int, metrics: Mapping[str, float]) -> None:
        """An update of an offline run ended."""

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """An evaluation on held-out prompts or examples ended. In offline runs `step` counts updates."""

    def samples(self, title: str, samples: Sequence[tuple[Prompt, Rollout]]) -> None:
        """A few sample rollouts to read."""

    def waiting(self, text: str) -> None:
        """The run has been waiting for long; see `Watch`. Called on another thread."""

    def notice(self, text: str) -> None:
        """Information that a person may want, such as the address of a tracker."""

    def warning(self, text: str) -> None:
        """A problem that does not stop the run."""
