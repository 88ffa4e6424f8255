"""What a run tells whoever watches it."""

from collections.abc import Mapping, Sequence

from rlhf_data.records import Prompt, Rollout


class Observer:
    """Shows a run to people and decides nothing. This one is silent: subclasses override what they show."""

    def starting(self, text: str) -> None:
        """A stage of the start-up begins, such as "Ray" or "engines and trainers"."""

    def phase(self, name: str) -> None:
        """A phase of a step begins: see `Timeline`."""

    def step(self, step: int, num_steps: int, metrics: Mapping[str, float]) -> None:
        """A step of an online run ended; see `rlhf_train.run.metrics` for the names."""

    def update(self, update: int, num_updates: int, metrics: Mapping[str, float]) -> None:
        """An update of an offline run ended."""

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """The held-out prompts were answered, or the held-out examples were run through the model; offline, `step`
        counts updates."""

    def samples(self, title: str, samples: Sequence[tuple[Prompt, Rollout]]) -> None:
        """A few rollouts to read."""

    def notice(self, text: str) -> None:
        """Something a person may want to know, such as the address of a tracker."""

    def warning(self, text: str) -> None:
        """Something a person should know that does not stop the run."""
