"""The account of a run's rollouts: none is lost. Torch-free."""

import math
from dataclasses import dataclass, fields

from rlhf_data.errors import RlhfError


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutCounts:
    """What became of rollouts.

    Attributes:
        requested: asked of the engines.
        trained: in the update; not a whole number when an epoch missed some.
        filtered: of groups that dynamic sampling left out.
        failed: never finished by an engine, or without a reward by time-out or crash.
        stale: of groups that were too old to learn from.
    """

    requested: int = 0
    trained: float = 0.0
    filtered: int = 0
    failed: int = 0
    stale: int = 0

    def __add__(self, other: "RolloutCounts") -> "RolloutCounts":
        return RolloutCounts(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})


class Ledger:
    """Balances the run, from its first rollout on:

    requested = trained + filtered + failed + stale + queued + in flight
    """

    def __init__(self) -> None:
        self.run = RolloutCounts()
        self.step = RolloutCounts()  # since the last `close_step`

    def add(self, **counts: float) -> None:
        """Add to the fields of `RolloutCounts`."""
        added = RolloutCounts(**counts)
        self.run += added
        self.step += added

    def check(self, *, queued: int, in_flight: int) -> None:
        """Raise RlhfError unless every rollout of the run is accounted for.

        Args:
            queued: complete rollouts that wait to be trained.
            in_flight: rollouts that are being generated or scored.
        """
        run = self.run
        accounted = run.trained + run.filtered + run.failed + run.stale + queued + in_flight
        if not math.isclose(run.requested, accounted, rel_tol=0, abs_tol=1e-6):
            raise RlhfError(
                f"rollouts were lost: {run.requested} requested, {run.trained:g} trained, {run.filtered} filtered,"
                f" {run.failed} failed, {run.stale} stale, {queued} queued, {in_flight} in flight"
            )

    def close_step(self) -> dict[str, float]:
        """Return the step's counts to log, and begin the next one."""
        step, self.step = self.step, RolloutCounts()
        return {
            "samples/generated": step.requested,
            "samples/trained": int(step.trained),
            "samples/filtered": step.filtered,
            "samples/failed": step.failed,
            "samples/stale": step.stale,
        }
