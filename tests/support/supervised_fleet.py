"""Engines under supervision by a simulated clock, and a trainer that sends them its weights."""

import asyncio

import numpy as np

from rlhf_data.errors import EngineError
from rlhf_rollout.engines.fake import FakeEngine
from rlhf_rollout.engines.spec import EngineSpec
from rlhf_rollout.protocols import SamplingParams
from rlhf_rollout.router import EngineRouter
from rlhf_rollout.supervisor import EngineSupervisor
from simulated import MortalEngine, now

REQUEST_TIMEOUT_S = 120.0
TOKENS = SamplingParams(max_tokens=64, num_samples=2)


def slow_engine() -> FakeEngine:
    """Write a token per second; the first token of a prompt is the number of tokens in its answers."""
    limits = {"request_timeout_s": REQUEST_TIMEOUT_S, "control_timeout_s": 60.0}
    spec = EngineSpec(model="fake", enable_sleep=True, **limits)
    return FakeEngine(spec, script=lambda prompt, seed: [7] * (prompt[0] - len(prompt)) + [0], token_latency_s=1.0)


class Fleet:
    """Engines under supervision, and a trainer that takes `send_s` to send its weights."""

    def __init__(self, num_engines=2, send_s=10.0, **options):
        self.engines = [MortalEngine(slow_engine) for _ in range(num_engines)]
        self.router = EngineRouter()
        self.said = []
        self.sent = []
        self.send_s = send_s
        self.version = 1
        self.error = None
        self.num_sending = 0
        self.supervisor = EngineSupervisor(self.engines, self.router, self.send, self.said.append, **options)

    async def send(self, engines):
        """As a trainer does: all engines take part until they fail."""
        self.num_sending += 1
        assert self.num_sending == 1, "two sends at once"
        version = self.version
        self.sent.append((now(), version, sorted(engines)))
        failures = {}

        async def each(call, *arguments):
            for number, engine in engines.items():
                if number not in failures:
                    try:
                        await getattr(engine, call)(*arguments)
                    except EngineError as error:
                        failures[number] = str(error)

        try:
            await each("begin_weight_update", version)
            await asyncio.sleep(self.send_s)
            if self.error is not None:
                raise self.error
            await each("finish_weight_update")
        finally:
            self.num_sending -= 1
        return failures

    def ask(self, num_tokens):
        return asyncio.create_task(self.router.generate(np.array([num_tokens], np.int32), TOKENS))

    async def synchronize(self):
        self.version += 1
        await self.supervisor.synchronize(self.version)

    async def __aenter__(self):
        """Send the first weights, and watch the engines."""
        await self.supervisor.synchronize(self.version)
        self.watching = asyncio.create_task(self.supervisor.watch())

    async def __aexit__(self, *_):
        self.watching.cancel()
        await asyncio.wait([self.watching])

    @property
    def states(self):
        return [str(state) for state in self.supervisor.states]
