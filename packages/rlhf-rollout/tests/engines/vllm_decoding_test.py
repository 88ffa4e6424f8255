"""A scheduler that decodes in bulk does what vLLM's own does: the same steps, outputs, requests and blocks."""

import gc
import random
import weakref

import pytest

pytest.importorskip("vllm")

import torch
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import SlidingWindowSpec
from vllm.v1.request import RequestStatus

from rlhf_models.testing import tiny_model_dir
from rlhf_rollout.engines.vllm.patches.bulk_decoding import patch as decode_in_bulk
from rlhf_rollout.private_names import known_name
from vllm_scheduling import BLOCK_SIZE, Engine, make_scheduler

CHANGED = ("schedule", "update_from_output", "_make_cached_request_data", "_update_after_schedule", "_preempt_request")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny_model_dir(tmp_path_factory.mktemp("model") / "tiny"))


def drive(engines, seed, num_steps=160, *, longest=12):
    """Let two engines do the same at random, and compare all that can be seen after each step."""
    drawn = random.Random(seed)
    names = iter(map(str, range(10_000)))
    prefix = [drawn.randrange(3, 100) for _ in range(40)]
    finished = 0

    def both(act):
        first, second = map(act, engines)
        assert first == second
        return first

    for _ in range(num_steps):
        if drawn.random() < 0.3:
            shared, own = drawn.randrange(12), [drawn.randrange(3, 100) for _ in range(drawn.randrange(1, longest))]
            options = {"max_tokens": drawn.randrange(1, 40), "min_tokens": drawn.choice([0, 0, 1])}
            options["logprobs"] = drawn.choice([0, 0, None])
            name = next(names)
            both(
                lambda engine, name=name, prompt=prefix[:shared] + own, options=options: engine.add(
                    name, list(prompt), **options
                )
            )
        requests = list(engines[0].scheduler.requests)
        if requests and drawn.random() < 0.05:
            gone = drawn.choice(requests)
            both(
                lambda engine, gone=gone: bool(engine.scheduler.finish_requests([gone], RequestStatus.FINISHED_ABORTED))
            )
        if drawn.random() < 0.05:
            # As `StepLoop.freeze`: nothing is scheduled until all outputs are taken in.
            while engines[0].pending:
                both(Engine.end)
            both(lambda engine: engine.scheduler.set_pause_state(PauseState.PAUSED_ALL))
            both(Engine.begin)
            both(Engine.end)
            if drawn.random() < 0.5:
                both(lambda engine: engine.scheduler.reset_prefix_cache(reset_running_requests=True))
            both(lambda engine: engine.scheduler.set_pause_state(PauseState.UNPAUSED))
            both(Engine.state)
        if drawn.random() < 0.03:  # with a step in flight, whose tokens are lost
            both(lambda engine: engine.scheduler.reset_prefix_cache(reset_running_requests=True))
        both(Engine.begin)
        both(Engine.state)
        if len(engines[0].pending) > engines[0].is_async:
            finished += sum(output[2] is not None for output in both(Engine.end).values())
        both(Engine.state)
    return finished


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("is_v2", [False, True])
@pytest.mark.parametrize("kind", [Scheduler, AsyncScheduler])
def test_steps_and_outputs_are_those_of_vllm(model, kind, is_v2, seed):
    options = {"is_v2": is_v2, "stop_rate": 0.02 * (seed % 2)}
    engines = [Engine(model, kind, in_bulk=in_bulk, **options) for in_bulk in (False, True)]
    assert drive(engines, seed) > 10
    for seen in (engines[1].num_scheduled, engines[1].num_taken):
        assert 0 < seen["part"] < 0.8 * seen["whole"]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("num_tokens", [8, 16, 32])
@pytest.mark.parametrize("num_blocks", [26, 200])
@pytest.mark.parametrize("kind", [Scheduler, AsyncScheduler])
def test_steps_are_those_of_vllm_with_too_few_blocks_and_prompts_in_parts(model, kind, num_blocks, num_tokens, seed):
    options = {"is_v2": seed % 2 == 0, "stop_rate": 0.01, "num_blocks": num_blocks, "num_tokens": num_tokens}
    engines = [Engine(model, kind, in_bulk=in_bulk, **options) for in_bulk in (False, True)]
    drive(engines, seed, 120, longest=48)
    seen = engines[1].num_scheduled
    assert seen["part"] < seen["whole"] or num_tokens < 32 or num_blocks < 200  # prompts then take most steps


def test_a_prompt_in_parts_takes_what_decoding_leaves_of_a_step(model):
    """Of 32 tokens, five sequences take one each."""
    engine = Engine(model, AsyncScheduler, in_bulk=True, is_v2=True, stop_rate=0.0)
    for name in "abcde":
        engine.add(name, [3, 4, 5], max_tokens=30)
    for number in range(6):
        if number == 4:
            engine.add("long", [6] * 60, max_tokens=2)
        said = dict(engine.begin()["num_scheduled_tokens"])
        assert number < 4 or said["long"] == [27, 27][number - 4]
        if len(engine.pending) > 1:
            engine.end()


def test_ended_and_aborted_requests_are_forgotten(model):
    engine = Engine(model, AsyncScheduler, in_bulk=True, is_v2=True, stop_rate=0.0)
    bulk = engine.scheduler._preempt_request.__self__
    for number in range(60):
        engine.add(str(number), [3, 4, 5], max_tokens=20)
        for _ in range(5):
            engine.begin()
            if len(engine.pending) > 1:
                engine.end()
        if number % 2:
            engine.scheduler.finish_requests([str(number)], RequestStatus.FINISHED_ABORTED)
        assert len(bulk._known) <= 12


@pytest.mark.parametrize("kind", [Scheduler, AsyncScheduler])
def test_an_idle_engine_keeps_no_request_in_memory(model, kind):
    engine = Engine(model, kind, in_bulk=True, is_v2=True, stop_rate=0.1)
    for number in range(12):
        engine.add(str(number), [3, 4, 5], max_tokens=9 + number)
    alive = [weakref.ref(request) for request in engine.scheduler.requests.values()]
    while engine.scheduler.requests:
        engine.begin()
        if len(engine.pending) > engine.is_async or not engine.scheduler.running:
            engine.end()
    while engine.pending:
        engine.end()
    assert engine.num_scheduled["part"] < engine.num_scheduled["whole"]  # some were scheduled in bulk
    gc.collect()
    assert [ref() for ref in alive if ref() is not None] == []


@pytest.mark.parametrize(
    "change",
    [
        {"num_lookahead_tokens": 2},
        {"connector": object()},
        {"ec_connector": object()},
        {"num_spec_tokens": 3},
        {"lora_config": object()},
        {"max_num_encoder_input_tokens": 8},
        {"log_stats": True},
        {"aux_output_connector|enable_return_routed_experts": object()},
        {"defer_block_free": True},
        {"hash_block_size": 2},
    ],
    ids=lambda change: next(iter(change)),
)
def test_an_engine_that_does_more_is_left_to_vllm(model, change):
    scheduler = make_scheduler(model, AsyncScheduler)
    vars(scheduler).update({known_name(scheduler, name): value for name, value in change.items()})
    decode_in_bulk(scheduler)
    assert not set(CHANGED) & vars(scheduler).keys()


def test_a_sliding_window_is_left_to_vllm(model):
    window = SlidingWindowSpec(BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=8)
    scheduler = make_scheduler(model, AsyncScheduler, spec=window)
    decode_in_bulk(scheduler)
    assert not set(CHANGED) & vars(scheduler).keys()


@pytest.mark.parametrize(
    ("name", "value"),
    [("prompt_logprobs_dict", {"a": None}), ("num_nans_in_logits", {"a": 1}), ("sampled_token_ids", [])],
)
def test_outputs_with_more_or_less_than_tokens_are_left_to_vllm(model, name, value):
    engine = Engine(model, AsyncScheduler, in_bulk=True, is_v2=True, stop_rate=0.0)
    engine.add("a", [3, 4, 5], max_tokens=20)
    for _ in range(4):
        engine.begin()
        if len(engine.pending) > 1:
            engine.end()
    bulk = engine.scheduler._preempt_request.__self__
    found = []
    bulk._take = lambda *args: found.append(args) or []
    engine.begin()
    engine.end()
    assert found
    setattr(engine.pending[0][1], name, value)
    found.clear()
    engine.end()
    assert not found
