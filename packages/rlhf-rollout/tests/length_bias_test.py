"""Lengths of answers whose engines die and get new weights are those that were asked for, by a simulated clock."""

import asyncio
import dataclasses
import zlib
from functools import partial

import numpy as np
import pytest

from rlhf_data.errors import EngineError
from rlhf_data.records import FinishReason
from rlhf_rollout.engines.fake import FakeEngine
from rlhf_rollout.engines.spec import EngineSpec
from rlhf_rollout.protocols import SamplingParams
from rlhf_rollout.router import EngineRouter
from rlhf_rollout.supervisor import EngineSupervisor
from simulated import MortalEngine, now, simulate, simulated

LONGEST = 200
NUM_CLIENTS = 40
NUM_REQUESTS = 8  # per client, whatever becomes of them: a limit of time would itself prefer short answers
SAMPLING = SamplingParams(max_tokens=LONGEST + 10, num_samples=4)
SPEC = EngineSpec(model="fake", request_timeout_s=1e6, control_timeout_s=1e6, max_model_len=1024)


async def lengths_under(at_update, death_s, update_s, report_s=None):
    """Return the lengths of all answers, how many requests failed, and how many engines died.

    Answers have a token per second and 1 to `LONGEST` tokens, each as likely as the others. Deaths and updates come at
    random, every `death_s` and `update_s` seconds on average.
    """
    rng = np.random.default_rng(7)

    def write(tokens, seed):
        num_written = len(tokens) - 1
        return [7] * (int(rng.integers(num_written + 1, LONGEST + 1)) - num_written - 1) + [0]

    def make():
        return FakeEngine(SPEC, script=write, token_latency_s=1.0)

    engines = [MortalEngine(make, report_s=report_s) for _ in range(3)]
    router = EngineRouter()
    version = 0

    async def send(targets):
        failures = {}
        for number, engine in targets.items():
            try:
                await engine.begin_weight_update(version)
                await engine.finish_weight_update()
            except EngineError as error:
                failures[number] = str(error)
        return failures

    supervisor = EngineSupervisor(engines, router, send, lambda text: None, max_restarts=10_000, at_update=at_update)
    lengths = []
    num_failed = 0

    async def client(number):
        nonlocal num_failed
        for _ in range(NUM_REQUESTS):
            outcome = await asyncio.gather(router.generate(np.array([3], np.int32), SAMPLING), return_exceptions=True)
            if isinstance(outcome[0], Exception):
                num_failed += 1
            else:
                lengths.extend(len(completion.token_ids) for completion in outcome[0])

    async def harm():
        while True:
            await asyncio.sleep(rng.exponential(death_s))
            engines[rng.integers(len(engines))].kill()

    async def update():
        nonlocal version
        while True:
            await asyncio.sleep(rng.exponential(update_s))
            version += 1
            await supervisor.synchronize(version)

    await supervisor.synchronize(version)
    others = [asyncio.create_task(task) for task in (supervisor.watch(), harm(), update())]
    await asyncio.gather(*map(client, range(NUM_CLIENTS)))
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    return np.array(lengths), num_failed, sum(engine.num_restarts for engine in engines)


def distance(lengths):
    """Return the largest distance (Kolmogorov-Smirnov) between the distribution of lengths and the one asked for."""
    found = np.searchsorted(np.sort(lengths), np.arange(1, LONGEST + 1), side="right") / len(lengths)
    return np.abs(found - np.arange(1, LONGEST + 1) / LONGEST).max()


@pytest.mark.parametrize(
    ("at_update", "death_s", "update_s", "report_s"),
    [
        ("keep", 60.0, 150.0, None),
        ("restart", 120.0, 40.0, None),
        ("drain", 120.0, 600.0, None),
        ("keep", 60.0, 150.0, 4.0),
    ],
)
def test_lengths_of_answers_are_those_that_were_asked_for(at_update, death_s, update_s, report_s):
    lengths, num_failed, num_deaths = simulate(lengths_under(at_update, death_s, update_s, report_s))
    assert num_failed == 0 and len(lengths) == NUM_CLIENTS * NUM_REQUESTS * SAMPLING.num_samples
    assert num_deaths >= 5
    # A sample of that size is farther away in one of a hundred cases.
    assert distance(lengths) < 1.63 / np.sqrt(len(lengths))
    assert lengths.mean() == pytest.approx((LONGEST + 1) / 2, abs=4)


@pytest.mark.parametrize(
    "options", [{}, {"max_tokens": 9}, {"stop": ("ab", "c")}, {"min_tokens": 4, "stop_token_ids": (5,)}]
)
@pytest.mark.parametrize("report_s", [None, 1.0])
@simulated
async def test_answers_that_other_engines_finish_are_those_of_one_engine(options, report_s):
    sampling = SamplingParams(**{"max_tokens": 40} | options)

    def write(tokens, seed):
        """Choose each token by those before it, and end tokens not among the first four."""
        tokens = list(tokens)
        for _ in range(40):
            choice = zlib.crc32(bytes(tokens))
            tokens.append(97 + choice % 5 if choice % 9 or len(tokens) < 6 else choice % 2 * 5)
        return tokens[-40:]

    rng = np.random.default_rng(7)
    make = partial(FakeEngine, SPEC, script=write, token_latency_s=1.0)
    engines = [MortalEngine(make, report_s=report_s) for _ in range(2)]
    router = EngineRouter(engines)

    async def harm():
        while True:
            await asyncio.sleep(rng.exponential(8.0))
            engines[rng.integers(2)].restart()

    harming = asyncio.create_task(harm())
    prompts = [np.array([number]) for number in range(60)]
    found = await asyncio.gather(*[router.generate(prompt, sampling) for prompt in prompts])
    harming.cancel()
    engine = FakeEngine(SPEC, script=write)
    expected = [await engine.generate(prompt, sampling) for prompt in prompts]
    num_retries = router.num_retries
    assert num_retries >= 10
    for [one], [other] in zip(found, expected, strict=True):
        assert (one.token_ids.tolist(), one.finish_reason) == (other.token_ids.tolist(), other.finish_reason)
        assert len(one.logprobs) == len(one.token_ids)


@simulated
async def test_long_answers_are_whole_however_long_they_take():
    """A token per 40 s, up to 200 of them, where an engine may write nothing for 60 s."""
    spec = dataclasses.replace(SPEC, request_timeout_s=60.0, control_timeout_s=1.0)

    engine = FakeEngine(spec, script=lambda tokens, seed: [7] * (LONGEST - 1) + [0], token_latency_s=40.0)
    asked = asyncio.create_task(EngineRouter([engine]).generate(np.array([3], np.int32), SAMPLING))
    await asyncio.sleep(100)
    await engine.pause("drain")  # which waits for them, with the same limit
    assert [len(completion.token_ids) for completion in (await asked)] == [LONGEST] * 4


@simulated
async def test_answers_that_stop_growing_are_cut_where_they_stopped():
    spec = dataclasses.replace(SPEC, request_timeout_s=60.0)

    engine = FakeEngine(spec, script=lambda tokens, seed: [7] * LONGEST, token_latency_s=1.0)
    asked = asyncio.create_task(EngineRouter([engine]).generate(np.array([3], np.int32), SAMPLING))
    await asyncio.sleep(20.5)
    engine._writing.close()
    completions = await asked
    ended = now()
    assert [len(completion.token_ids) for completion in completions] == [20] * 4
    assert {completion.finish_reason for completion in completions} == {FinishReason.LENGTH}
    assert ended <= 20 + 3 * 68
