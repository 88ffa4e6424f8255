"""The workflow of one prompt and one answer."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rlhf_data.records import Episode, Prompt, Rollout, Span, SpanSource
from rlhf_rollout.engines.stopping import before_stop
from rlhf_rollout.protocols import SamplingParams
from rlhf_rollout.router import EngineRouter


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class SingleTurn:
    """A `Workflow` of one turn: an episode is one rollout, which holds the prompt and the policy's answer.

    A text of `sampling.stop` that ended an answer is part of its tokens, which are trained, and not of its text.

    All samples of a prompt go out as one request, so that the engine computes the prompt once.

    Attributes:
        router: answers the requests.
        decode: returns the text of an answer's token ids [n], which include a stop token.
    """

    router: EngineRouter
    decode: Callable[[np.ndarray], str]

    async def run(self, prompt: Prompt, sampling: SamplingParams, group_id: str) -> tuple[Episode, ...]:
        """See `Workflow.run`: episode and rollout `<group_id>/<number>` for each sample."""
        more = {"images": prompt.images} if prompt.images else {}
        completions = await self.router.generate(prompt.token_ids, sampling, group_id=group_id, **more)
        asked = Span(SpanSource.PROMPT, prompt.token_ids)
        episodes = []
        for index, completion in enumerate(completions):
            name = f"{group_id}/{index}"
            text = before_stop(self.decode(completion.token_ids), sampling.stop)
            spans = (asked, *completion.spans)
            known = {"routes": completion.routes, "images": prompt.images}
            rollout = Rollout(name, group_id, spans, completion.finish_reason, text, **known)
            episodes.append(Episode(name, group_id, (rollout,)))
        return tuple(episodes)

    async def start(self) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""
