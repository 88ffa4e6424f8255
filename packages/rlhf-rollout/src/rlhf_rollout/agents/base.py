"""The Protocol of a workflow."""

from typing import Protocol

from rlhf_data.records import Episode, Prompt
from rlhf_rollout.protocols import SamplingParams
from rlhf_rollout.router import EngineRouter


class Workflow(Protocol):
    """Turns a prompt into episodes; `run` may be called concurrently.

    Attributes:
        router: answers the workflow's requests.
    """

    router: EngineRouter

    async def run(self, prompt: Prompt, sampling: SamplingParams, group_id: str) -> tuple[Episode, ...]:
        """Return `sampling.num_samples` episodes of one prompt, without verdicts.

        Their ids begin with `group_id`, which is unique in a run. Raises EngineError when one of the episodes cannot be
        finished: a group is complete or failed.
        """

    async def start(self) -> None:
        """Start what episodes need, such as processes. Raises RewardError when that fails."""

    async def close(self) -> None:
        """End what `start` and `run` have started."""
