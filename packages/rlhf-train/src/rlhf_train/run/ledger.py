"""Counts every rollout of a run, so that none is lost unnoticed. Torch-free."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from rlhf_data.errors import RlhfError


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutCounts:
    """Numbers of rollouts by what happened to them.

    Attributes:
        requested: requested from the engines.
        trained: used in updates; a fraction when only some epochs used a rollout.
        filtered: left out by dynamic sampling.
        failed: not completed by an engine, or without a reward: a time-out, a crash, or a scorer that abstained.
        stale: left out because an engine that missed an update of the weights wrote them.
    """

    requested: int = 0
    trained: float = 0.0
    filtered: int = 0
    failed: int = 0
    stale: int = 0

    def __add__(self, other: "RolloutCounts") -> "RolloutCounts":
        return RolloutCounts(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})


class Ledger:
    """Checks over the whole run that

        requested = trained + filtered + failed + stale + outstanding

    Counting over the run, and not per step, also covers rollouts that one step generates and a later one trains.

    Attributes:
        run: counts since the start of the run.
        step: counts since the last `close_step`.
    """

    def __init__(self) -> None:
        self.run = RolloutCounts()
        self.step = RolloutCounts()

    def add(self, **counts: float) -> None:
        """Add to the counts, named by the fields of `RolloutCounts`."""
        added = RolloutCounts(**counts)
        self.run += added
        self.step += added

    def check(self, *, outstanding: int) -> None:
        """Raise RlhfError unless every rollout of the run is accounted for.

        `outstanding` rollouts are in flight, wait for a batch, or are in the batch that is being trained.
        """
        run = self.run
        accounted = run.trained + run.filtered + run.failed + run.stale + outstanding
        if not math.isclose(run.requested, accounted, rel_tol=0, abs_tol=1e-6):
            raise RlhfError(
                f"rollouts were lost or counted twice: {run.requested} requested, {run.trained:g} trained,"
                f" {run.filtered} filtered, {run.failed} failed, {run.stale} stale, {outstanding} outstanding"
            )

    def state(self) -> dict[str, dict[str, float]]:
        """Return the counts, for `restore`."""
        return {"run": asdict(self.run), "step": asdict(self.step)}

    def restore(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Continue with the counts of another process."""
        self.run = RolloutCounts(**state["run"])
        self.step = RolloutCounts(**state["step"])

    def close_step(self) -> dict[str, float]:
        """Return the step's counts as metrics, and start counting the next step."""
        step, self.step = self.step, RolloutCounts()
        return {
            "samples/generated": step.requested,
            "samples/trained": int(step.trained),
            "samples/filtered": step.filtered,
            "samples/failed": step.failed,
            "samples/stale": step.stale,
        }
