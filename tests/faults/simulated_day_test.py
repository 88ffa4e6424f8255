"""A day of asynchronous training on a clock that jumps: engines die and hang at random, yet every rollout is accounted
for at every step, and memory does not grow."""

import asyncio
import gc
from types import SimpleNamespace

import numpy as np
import pytest

from rlhf_data.errors import EngineError
from rlhf_data.records import Prompt, Verdict, VerdictKind
from rlhf_rollout.agents import SingleTurn
from rlhf_rollout.engines.fake import FakeEngine
from rlhf_rollout.engines.spec import EngineSpec
from rlhf_rollout.protocols import SamplingParams
from rlhf_rollout.router import EngineRouter
from rlhf_rollout.supervisor import EngineSupervisor
from rlhf_train.generation.service import GenerationService
from rlhf_train.generation.stream import SampleStream
from rlhf_train.run.ledger import Ledger
from simulated import MortalEngine, now, simulate

DAY_S = 86_400
TOKEN_S = 10.0
TRAIN_S = 150.0
START_S = 60.0
BATCH_SIZE, NUM_SAMPLES, MAX_STALENESS = 4, 2, 2
SPEC = EngineSpec(model="fake", request_timeout_s=3600.0, control_timeout_s=3600.0, max_model_len=256)


def write(prompt, seed):
    """As many tokens as the prompt's first one says, with those behind its two, and the stop token."""
    return [*[7] * (prompt[0] - len(prompt) + 2), 0]


def make_engine() -> FakeEngine:
    return FakeEngine(SPEC, script=write, token_latency_s=TOKEN_S)


class Scores:
    async def score(self, prompt, rollouts):
        return [Verdict(VerdictKind.OK, 1.0) for _ in rollouts]


class Day:
    """A run without trainers: a batch is trained by waiting."""

    def __init__(self, at_update: str, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        lengths = np.maximum(np.round(6 * np.exp(self.rng.standard_normal(997) * 0.9)), 1).clip(max=100).astype(int)
        prompts = tuple(Prompt(f"p{n}", np.array([length, 1]), f"p{n}") for n, length in enumerate(lengths))
        sampling = SamplingParams(num_samples=NUM_SAMPLES, max_tokens=128, seed=1)
        job = SimpleNamespace(
            prompts=prompts,
            prompts_digest="",
            batch=SimpleNamespace(rollout_batch_size=BATCH_SIZE),
            sampling=sampling,
            seed=seed,
            max_staleness=MAX_STALENESS,
            max_in_flight=8,
            dynamic_sampling=None,
            difficulty=None,
            reuse=None,
        )
        self.engines = [MortalEngine(make_engine, START_S), MortalEngine(make_engine, START_S)]
        router = EngineRouter()
        self.said: list[str] = []
        self.supervisor = EngineSupervisor(
            self.engines, router, self.send, self.said.append, max_restarts=1000, at_update=at_update
        )
        self.stream = SampleStream(BATCH_SIZE, 1_000_000, MAX_STALENESS)
        self.service = GenerationService(job, SingleTurn(router, str), Scores(), self.stream, lambda *_: None)
        self.ledger = Ledger()
        self.version = 0
        self.trained: set[str] = set()
        self.num_objects: list[int] = []

    async def send(self, engines):
        failures = {}
        for number, engine in engines.items():
            try:
                await engine.begin_weight_update(self.version)
                await asyncio.sleep(2.0)
                await engine.finish_weight_update()
            except EngineError as error:
                failures[number] = str(error)
        return failures

    async def disturb(self) -> None:
        """Kill an engine every 40 minutes, and have one not answer health checks every hour, on average."""
        while True:
            await asyncio.sleep(self.rng.exponential(1440.0))
            engine = self.engines[self.rng.integers(2)]
            if self.rng.random() < 0.6:
                engine.kill()
            else:
                engine.hanging.add("health")
                asyncio.get_running_loop().call_later(self.rng.uniform(5.0, 300.0), engine.hanging.discard, "health")

    async def step(self) -> None:
        drawn = await self.service.next_batch()
        self.ledger.add(requested=drawn.num_requested, failed=drawn.num_failed)
        rollouts = [rollout for group in drawn.kept for rollout in group.rollouts]
        self.ledger.check(outstanding=self.service.num_outstanding + len(rollouts))
        assert not drawn.stale and len(drawn.kept) == BATCH_SIZE
        for group in drawn.kept:
            assert group.group_id not in self.trained
            self.trained.add(group.group_id)
        for rollout in rollouts:
            assert rollout.num_response_tokens == group_length(rollout)
            versions = [span.policy_version for span in rollout.spans[1:]]
            assert versions == sorted(versions) and versions[-1] <= self.version
            assert self.version - versions[0] <= MAX_STALENESS
        await asyncio.sleep(TRAIN_S)
        self.version += 1
        self.ledger.add(trained=len(rollouts))
        self.ledger.check(outstanding=self.service.num_outstanding)
        await self.supervisor.synchronize(self.version)
        self.service.release(self.version)

    async def run(self) -> None:
        await self.supervisor.synchronize(0)
        others = [asyncio.create_task(self.supervisor.watch()), asyncio.create_task(self.disturb())]
        quarters = 0
        while now() < DAY_S:
            await self.step()
            if now() >= quarters * DAY_S / 4:
                quarters += 1
                gc.collect()
                self.num_objects.append(len(gc.get_objects()) - len(self.said) - len(self.trained))
        for task in others:
            task.cancel()
        await self.service.close()


def group_length(rollout) -> int:
    return int(rollout.spans[0].token_ids[0]) + 1


@pytest.mark.parametrize("at_update", ["drain", "keep", "restart"])
def test_day_with_dying_engines_trains_every_rollout_once_and_needs_no_more_memory(at_update):
    async def main():
        day = Day(at_update, seed=3)
        await day.run()
        return day

    day = simulate(main())
    # Steps wait for training alone, except where engines are down or hang, or an update waits for long answers.
    assert day.version > (0.75 if at_update == "keep" else 0.6) * DAY_S / (TRAIN_S + 4.0)
    assert day.ledger.run.trained == day.version * BATCH_SIZE * NUM_SAMPLES == NUM_SAMPLES * len(day.trained)
    assert sum(engine.num_restarts for engine in day.engines) > 20
    assert max(day.num_objects[1:]) - day.num_objects[1] < 1000
