"""Runs users' agents with the fake engine, for tests."""

import asyncio
import itertools

from record_testing import make_prompt
from rlhf_data.testing import EOS_ID, ByteTokenizer
from rlhf_rollout.agents.agent_spec import AgentSpec, make_pool
from rlhf_rollout.agents.hosted import HostedAgent
from rlhf_rollout.agents.recorder import EpisodeLimits
from rlhf_rollout.engines.fake import FakeEngine
from rlhf_rollout.protocols import SamplingParams
from rlhf_rollout.router import EngineRouter

TOKENIZER = ByteTokenizer(add_bos=False)


class ToolTokenizer(ByteTokenizer):
    """Its chat template writes the names of the tools at the start, or has no place for tools."""

    def __init__(self, *, writes_tools=True):
        super().__init__()
        self._writes_tools = writes_tools

    def apply_chat_template(self, conversation, *, tools=(), **options):
        text = super().apply_chat_template(conversation, **options)
        names = ",".join(tool["function"]["name"] for tool in tools)
        return f"{names}|{text}" if tools and self._writes_tools else text


def writes(answers, *, sign=""):
    """Return an engine that gives one answer after the other, by the number of end tokens, or of signs, before."""

    def script(prompt, _):
        count = TOKENIZER.decode(prompt).count(sign) - 1 if sign else list(prompt).count(EOS_ID)
        turn = min(count, len(answers) - 1)
        return [*answers[turn].encode(), EOS_ID]

    return FakeEngine(script=script)


def agent_pool(source, **options):
    """Return the processes of an agent: one, unless the options of `AgentSpec` say otherwise."""
    return make_pool(AgentSpec(path=source, limits=EpisodeLimits(), **{"num_processes": 1, **options}), None)


class Hosted:
    """A user's agent with one process and an engine. It is closed when the context ends."""

    def __init__(self, source, engine, *, limits=None, tokenizer=TOKENIZER, gives_reward=True, failed_reward=None,
                 **options):  # fmt: skip
        self.pool = agent_pool(source, **options)
        rewards = {"gives_reward": gives_reward, "failed_reward": failed_reward}
        limits = limits or EpisodeLimits(max_length=200)
        self.agent = HostedAgent(EngineRouter([engine]), self.pool, tokenizer, limits, **rewards)
        self._group_ids = map("g{}".format, itertools.count())

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        await self.pool.close()

    async def episodes(self, prompt, max_tokens=32, samples=1):
        sampling = SamplingParams(max_tokens=max_tokens, seed=3, num_samples=samples)
        return await self.agent.run(prompt, sampling, next(self._group_ids))

    async def episode(self, label="4", text="2+2="):
        [episode] = await self.episodes(make_prompt(text, label))
        return episode


def run(source, engine, *, prompts=None, samples=1, engine_tokens=32, **options):
    """Return the episodes of a prompt, or of each prompt, and how many processes were replaced."""

    async def collect():
        async with Hosted(source, engine, **options) as hosted:
            asked = [make_prompt("2+2=", "4")] if prompts is None else prompts
            results = await asyncio.gather(*(hosted.episodes(prompt, engine_tokens, samples) for prompt in asked))
            return [episode for episodes in results for episode in episodes], hosted.pool.num_replaced

    return asyncio.run(collect())


def texts_of(rollout):
    return [(span.source, TOKENIZER.decode(span.token_ids)) for span in rollout.spans]
