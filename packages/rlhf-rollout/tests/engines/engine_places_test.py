"""Several engines on one machine: which GPUs they get, how they start, and what happens when one of them dies."""

import asyncio
import os
import signal

import numpy as np
import pytest

from engine_processes import started_by
from rlhf_data.errors import ConfigError, EngineError
from rlhf_rollout.engines import EngineSpec, process
from rlhf_rollout.engines.fake import FakeEngine
from rlhf_rollout.engines.places import EnginePlaces, place_engines
from rlhf_rollout.engines.process import ProcessEngine, start_engines
from rlhf_rollout.engines.process_host import _Host
from rlhf_rollout.protocols import SamplingParams
from rlhf_rollout.router import EngineRouter

FAKE = EngineSpec(model="fake")
SHARED = EnginePlaces((("0",), ("0",)))


@pytest.mark.parametrize(
    ("slots", "length", "drafted", "tokens"),
    [(512, 812, 0, 8192), (8, 640, 0, 5120), (1, 640, 0, 640), (100, 100, 0, 8100), (9000, 50, 0, 9000), (4, 3, 4, 20)],
)
def test_a_step_has_no_more_tokens_than_slots_hold_and_as_many_for_each(slots, length, drafted, tokens):
    drafts = {"speculative": "ngram", "speculative_tokens": drafted} if drafted else {}
    spec = EngineSpec(model="fake", max_num_seqs=slots, max_model_len=length, **drafts)
    assert spec.batched_tokens == tokens


@pytest.mark.parametrize(
    ("num_engines", "each", "visible", "gpus", "most"),
    [
        (2, 1, "0 1 2", [("0",), ("1",)], 1),
        (5, 1, "4 7", [("4",), ("7",), ("4",), ("7",), ("4",)], 3),
        (3, 2, "0 1 2 3 4", [("0", "1"), ("2", "3"), ("0", "1")], 2),
        (2, 1, "", [(), ()], 1),
    ],
)
def test_engines_get_sets_of_gpus_in_turn(num_engines, each, visible, gpus, most):
    places = place_engines(num_engines, each, visible.split())
    assert list(places.gpus) == gpus
    assert places.most_per_gpu == most


def test_fewer_gpus_than_an_engine_needs_are_an_error():
    for visible in (["0", "1", "2"], []):
        with pytest.raises(
            ConfigError, match=rf"^an engine needs 4 GPUs, and {len(visible)} are visible\s+hint: lower"
        ):
            place_engines(2, 4, visible)


def test_each_engine_sees_its_own_gpus_or_has_its_part_of_the_cores(monkeypatch):
    places = place_engines(3, 2, ["5", "6", "7", "8"])
    assert [one["CUDA_VISIBLE_DEVICES"] for one in places.environs()] == ["5,6", "7,8", "5,6"]
    assert places.describe() == "3 engines are on the GPUs 5+6, 7+8, 5+6"
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(7)))
    places = place_engines(2, 1, [])
    assert places.environs() == [{"OMP_NUM_THREADS": "3"}] * 2
    assert places.describe() == "2 engines share the 7 cores of this machine"
    assert place_engines(9, 1, []).environs()[8] == {"OMP_NUM_THREADS": "1"}
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert places.environs()[1] == {"OMP_NUM_THREADS": "5"}
    assert EnginePlaces(((),)).environs() == [{}]  # one engine has what the command has


async def test_start_gives_each_engine_its_variables_and_seed(monkeypatch):
    started = []

    async def start(kind, spec, environ):
        started.append((kind, spec.seed, spec.measures_memory, environ))
        return FakeEngine(spec)

    monkeypatch.setattr(process, "start_engine", start)
    places = EnginePlaces((("0",), ("1",)))
    assert len(await start_engines("vllm", EngineSpec(model="m", seed=4), places, {"A": "b"})) == 2
    assert started == [
        ("vllm", 4, True, {"CUDA_VISIBLE_DEVICES": "0", "A": "b"}),
        ("vllm", 5, True, {"CUDA_VISIBLE_DEVICES": "1", "A": "b"}),
    ]
    started.clear()
    await start_engines("vllm", EngineSpec(model="m"), SHARED)
    assert [one[1:3] for one in started] == [(None, False)] * 2  # the other one's memory would be measured, too


async def test_variables_are_set_before_the_engine_is_built(monkeypatch):
    monkeypatch.setenv("OF_THIS_TEST", "before")
    monkeypatch.setattr("rlhf_rollout.engines.process_host.build_engine", lambda kind, spec: os.environ["OF_THIS_TEST"])
    host = _Host()
    await host.ready("fake", FAKE, {"OF_THIS_TEST": "after"})
    assert host.part == "after"


async def test_process_is_told_its_variables(monkeypatch):
    told = []

    async def exchange(engine, method, arguments):
        told.append((method, *arguments))

    monkeypatch.setattr(ProcessEngine, "_exchange", exchange)
    for environ in ({"CUDA_VISIBLE_DEVICES": "3"}, None):
        engine = await process.start_engine("vllm", FAKE, environ)
        engine._process.kill()
        await engine.close()
    assert told == [("ready", "vllm", FAKE, {"CUDA_VISIBLE_DEVICES": "3"}), ("ready", "vllm", FAKE, {})]


async def test_engine_that_does_not_start_closes_the_others(monkeypatch):
    closed = []

    async def start(kind, spec, environ):
        if spec.seed == 2:
            await asyncio.sleep(0)
            raise EngineError("no memory is left")
        try:
            if spec.seed == 3:
                await asyncio.sleep(60)
        except asyncio.CancelledError:
            closed.append("while it starts")
            raise
        engine = FakeEngine(spec)
        engine.close = lambda: asyncio.sleep(0, closed.append("after its start"))
        return engine

    monkeypatch.setattr(process, "start_engine", start)
    with pytest.raises(EngineError, match="no memory is left"):
        await start_engines("vllm", EngineSpec(model="m", seed=1), EnginePlaces((("0",), ("1",), ("2",))))
    assert sorted(closed) == ["after its start", "while it starts"]


async def test_requests_of_an_engine_that_is_killed_are_answered_by_the_other_one():
    engines = [ProcessEngine("fake", FAKE)]
    try:
        await engines[0].ready()
        first = list(started_by(os.getpid()))
        engines.append(ProcessEngine("fake", FAKE))
        await engines[1].ready()
        await engines[0].begin_weight_update(1)  # holds its requests back
        router = EngineRouter(engines)
        prompts = [np.arange(3, 6 + number, dtype=np.int32) for number in range(20)]

        def asked(engine):
            samplings = [SamplingParams(num_samples=2, max_tokens=9, seed=seed) for seed in range(20)]
            return [engine.generate(*pair) for pair in zip(prompts, samplings, strict=True)]

        answers = asyncio.gather(*asked(router))
        while (await engines[0].health()).num_in_flight < 10:
            await asyncio.sleep(0.01)
        os.kill(max(first), signal.SIGKILL)
        found = await answers
        expected = await asyncio.gather(*asked(FakeEngine(FAKE)))
    finally:
        await asyncio.gather(*(engine.close() for engine in engines))
    assert router.num_retries == 10
    for one, other in zip(found, expected, strict=True):
        assert [part.token_ids.tolist() for part in one] == [part.token_ids.tolist() for part in other]
