"""The account of a run's rollouts: none is lost. Torch-free."""

from dataclasses import dataclass

from rlhf_data.errors import RlhfError


@dataclass(frozen=True, slots=True)
class Ledger:
    """Where the rollouts of one step went.

    Attributes:
        num_generated: asked of the engines.
        num_trained: in the update; not a whole number when an epoch missed some.
        num_filtered: of groups that dynamic sampling left out.
        num_reward_failed: without a reward, by timeout or crash; all of a step that had too few rewards to learn from.
        num_engine_failed: never finished by an engine.
    """

    num_generated: int = 0
    num_trained: float = 0
    num_filtered: int = 0
    num_reward_failed: int = 0
    num_engine_failed: int = 0

    def check(self) -> None:
        """Raise RlhfError unless every rollout is accounted for."""
        failed = self.num_reward_failed + self.num_engine_failed
        if self.num_generated != self.num_trained + self.num_filtered + failed:
            raise RlhfError(
                f"rollouts were lost: {self.num_generated} generated, {self.num_trained:g} trained,"
                f" {self.num_filtered} filtered, {self.num_reward_failed} without a reward,"
                f" {self.num_engine_failed} failed in an engine"
            )

    def metrics(self) -> dict[str, float]:
        """Return the counts to log."""
        return {
            "samples/generated": self.num_generated,
            "samples/trained": int(self.num_trained),
            "samples/filtered": self.num_filtered,
            "samples/failed": self.num_reward_failed + self.num_engine_failed,
        }
