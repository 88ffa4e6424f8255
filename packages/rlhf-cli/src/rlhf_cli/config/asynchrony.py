"""Options of asynchronous training: generation goes on while models train, or run."""

from collections.abc import Collection

from rlhf_data.options.checks import without_effect
from rlhf_data.options.declare import Section, flag, one_of
from rlhf_rollout.protocols import PAUSE_MODES
from rlhf_train.generation.run_spec import AsyncSpec

AtUpdate = one_of(PAUSE_MODES)


class AsyncSection(Section, title="asynchronous training"):
    """How far generation may run ahead of training."""

    async_train: bool = flag(False, "generate and train at the same time; nothing may sleep")
    max_staleness: int = flag(
        1,
        "steps that may be trained between the start of a prompt's responses and the step that trains on them; 0:"
        " generate and train in turn",
        ge=0,
    )
    at_update: AtUpdate = flag(
        "keep",
        "responses in flight when engines get new weights: keep continues them with the new weights, drain finishes"
        " them first, restart ends them and starts them again behind what they have written",
    )

    keep_kv: bool = flag(
        False,
        "with --at_update keep: responses go on from keys and values of the old weights, and so do cached prefixes;"
        " otherwise these are computed again",
    )

    early_forwards: bool = flag(
        False,
        "without --async_train and sleep: run policy (for old log-probs), reference, teacher and critic on complete"
        " responses while others are still generated, instead of after generation",
    )

    def check(self, given: Collection[str]) -> list[str]:
        """Return notices about options without effect."""
        return without_effect(
            given,
            (not self.async_train, ["max_staleness", "at_update", "keep_kv"], "--async_train is off"),
            (self.max_staleness == 0, ["at_update"], "with --max_staleness 0 no response is in flight at an update"),
            (self.at_update != "keep", ["keep_kv"], f"--at_update is {self.at_update}"),
        )

    @property
    def runs_ahead(self) -> bool:
        """Whether engines generate while models train."""
        return self.async_train and self.max_staleness > 0

    @property
    def overlaps(self) -> bool:
        """Whether engines generate while models run."""
        return self.runs_ahead or self.early_forwards

    def spec(self) -> AsyncSpec | None:
        """Return how generation and training overlap; None if they alternate."""
        if not self.async_train:
            return None
        return AsyncSpec(max_staleness=self.max_staleness, at_update=self.at_update)
