"""A door with one episode and a fake engine behind it, and its clients."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import openai

from record_testing import make_prompt
from rlhf_data.records import Rollout
from rlhf_data.testing import EOS_ID, ByteTokenizer
from rlhf_rollout.agents.gateway import Gateway
from rlhf_rollout.agents.recorder import EpisodeLimits, EpisodeRecorder
from rlhf_rollout.engines.fake import FakeEngine
from rlhf_rollout.protocols import SamplingParams
from rlhf_rollout.router import EngineRouter
from rlhf_rollout.workers.rpc import Activity

TOKENIZER = ByteTokenizer(add_bos=False)
HI = {"role": "user", "content": "hi"}


def writes(*answers: str, **options: Any) -> FakeEngine:
    """Return an engine that gives one answer after the other, by the number of requests."""
    asked: list[Any] = []

    def script(prompt: Any, _: int) -> list[int]:
        asked.append(prompt)
        return [*answers[min(len(asked), len(answers)) - 1].encode(), EOS_ID]

    return FakeEngine(script=script, **options)


class Door:
    """A door with one episode."""

    def __init__(self, gateway: Gateway, session: Any, recorder: EpisodeRecorder) -> None:
        self.gateway, self.session, self.recorder = gateway, session, recorder
        self.client = openai.AsyncOpenAI(base_url=session.url + "/v1", api_key="none")
        self.anthropic = anthropic.AsyncAnthropic(base_url=session.url, api_key="none")

    async def chat(self, messages: Any, **options: Any) -> Any:
        """Return the choice of a chat completion."""
        return (await self.client.chat.completions.create(model="m", messages=messages, **options)).choices[0]

    def rollouts(self) -> list[Any]:
        """Return source and text of each span of each rollout."""
        episode = self.recorder.episode((), None)
        return [texts_of(rollout) for rollout in episode.rollouts]


def texts_of(rollout: Rollout) -> list[Any]:
    """Return source and text of each span."""
    return [(span.source, TOKENIZER.decode(span.token_ids)) for span in rollout.spans]


@contextlib.asynccontextmanager
async def opened(
    engine: FakeEngine,
    *,
    limits: EpisodeLimits | None = None,
    tokenizer: ByteTokenizer = TOKENIZER,
    max_tokens: int = 200,
    stop: tuple[str, ...] = (),
    **options: Any,
) -> AsyncIterator[Door]:
    """Yield a door; `options` are the gateway's."""
    gateway = Gateway(tokenizer, **options)
    await gateway.start()
    recorder = EpisodeRecorder(
        EngineRouter([engine]),
        make_prompt("2+2=", "4"),
        SamplingParams(max_tokens=max_tokens, stop=stop, seed=3),
        name="e",
        group_id="g",
        limits=limits or EpisodeLimits(),
        decode=TOKENIZER.decode,
    )
    try:
        with gateway.session(recorder, Activity()) as session:
            door = Door(gateway, session, recorder)
            async with door.client, door.anthropic:
                yield door
    finally:
        await gateway.close()
