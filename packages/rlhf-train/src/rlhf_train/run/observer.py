"""What a run tells whoever watches it."""

from collections.abc import Mapping, Sequence

from rlhf_data.records import Prompt, Rollout


class Observer:
    """Shows a run to people; it decides nothing. This one is silent: others override what they show."""

    def starting(self, text: str) -> None:
        """A stage of the start-up began, such as "Ray", "engine and trainer"."""

    def step(self, step: int, num_steps: int, metrics: Mapping[str, float]) -> None:
        """A step ended; see `rlhf_train.run.metrics` for the names."""

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """The held-out prompts were answered, or the held-out examples run."""

    def samples(self, title: str, samples: Sequence[tuple[Prompt, Rollout]]) -> None:
        """A few rollouts to read."""

    def warning(self, text: str) -> None:
        """Something a person should know that does not stop the run."""
