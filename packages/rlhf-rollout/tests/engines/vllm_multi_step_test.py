"""Several decode steps per step of the scheduler give each request what single steps give it."""

import asyncio
import random
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm")

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import AsyncModelRunnerOutput, LogprobsLists, ModelRunnerOutput

from rlhf_models.testing import tiny_model_dir
from rlhf_rollout.engines.spec import EngineSpec
from rlhf_rollout.engines.vllm.engine import VllmEngine
from rlhf_rollout.engines.vllm.patches import multi_step
from rlhf_rollout.protocols import SamplingParams
from vllm_scheduling import MAX_LENGTH, Engine, make_scheduler

RUNS_AHEAD = multi_step._runs_ahead


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny_model_dir(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture(autouse=True)
def first_tokens_of_any_scheduler_suffice(monkeypatch):
    monkeypatch.setattr(multi_step, "TOKENS_PER_STEP", 1e-9)
    monkeypatch.setattr(multi_step, "_runs_ahead", lambda scheduler: True)


def answers(engine, seed, *, longest=12, num_requests=40):
    """Return what each of the requests gets in the end, and the numbers of tokens per sequence of the steps."""
    drawn = random.Random(seed)
    prefix = [drawn.randrange(3, 100) for _ in range(40)]
    waiting = []
    for name in map(str, range(num_requests)):
        prompt = prefix[: drawn.randrange(12)] + [drawn.randrange(3, 100) for _ in range(drawn.randrange(1, longest))]
        options = {"max_tokens": drawn.randrange(1, 40), "logprobs": drawn.choice([0, 0, None])}
        waiting.append((drawn.randrange(60), name, prompt, options))
    found = {name: ([], [], []) for _, name, *_ in waiting}
    seen = []
    scheduler = engine.scheduler
    for number in range(1000):
        for at, name, prompt, options in waiting:
            if at == number:
                engine.add(name, prompt, **options)
        if scheduler.requests or engine.pending:
            engine.begin()
            step = engine.pending[-1][0]
            seen.append(step.num_steps)
            for name in step.num_scheduled_tokens:
                assert engine.workers[name] == (
                    scheduler.kv_cache_manager.get_block_ids(name)[0],
                    scheduler.requests[name].num_computed_tokens,
                )
        while len(engine.pending) > (engine.is_async and bool(scheduler.requests)):
            for name, (tokens, logprobs, *ends, _) in engine.end().items():
                found[name][0].extend(tokens)
                found[name][1].extend(logprobs or [])
                found[name][2].append(ends)
    assert not scheduler.requests and not engine.pending
    scheduler.reset_prefix_cache()
    return {name: (*given, ends[-1]) for name, (*given, ends) in found.items()}, seen


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("in_bulk", [False, True])
@pytest.mark.parametrize("kind", [Scheduler, AsyncScheduler])
@pytest.mark.parametrize("num_blocks", [26, 200])
def test_requests_get_what_single_steps_give_them(model, kind, num_blocks, in_bulk, seed):
    """With 26 blocks, sequences are preempted."""
    options = {"is_v2": True, "stop_rate": 0.04 * (seed % 2), "num_blocks": num_blocks}
    plain = Engine(model, kind, in_bulk=False, **options)
    engine = Engine(model, kind, in_bulk=in_bulk, num_steps=4, **options)
    plain.scheduler.schedule = counted(plain.scheduler.schedule)
    expected, _ = answers(plain, seed, longest=24)
    found, seen = answers(engine, seed, longest=24)
    assert found == expected
    assert len({ends[0] for *_, ends in found.values()}) == 1 + seed % 2  # by their length, and by a token
    assert max(seen) == 4 and min(seen) == 1
    free = [each.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() for each in (plain, engine)]
    assert free[0] == free[1] == num_blocks - 1  # one is vLLM's own


def counted(schedule):
    def one_step(*args, **options):
        step = schedule(*args, **options)
        step.num_steps = 1
        return step

    return one_step


def running(model, *, num_requests=3, length=20, max_tokens=30, **options):
    """Return an engine whose requests have all begun to decode, with nothing in flight."""
    options = {"is_v2": True, "stop_rate": 0.0, "num_steps": 4} | options
    engine = Engine(model, options.pop("kind", Scheduler), in_bulk=True, **options)
    for name in range(num_requests):
        engine.add(str(name), [3 + name] * length, max_tokens=max_tokens)
    return engine


def numbers(engine, num_steps):
    """Return the tokens per sequence of the next steps, whose outputs are taken in at once."""
    seen = []
    for _ in range(num_steps):
        engine.begin()
        seen.append(engine.pending[-1][0].num_steps)
        engine.end()
    return seen


def test_prompts_take_single_steps_and_the_last_step_ends_with_the_last_token(model):
    # Of ten tokens, the prompts' step gives the first; the others come in steps of four, four and one.
    engine = running(model, max_tokens=10, num_tokens=64)
    assert numbers(engine, 4) == [1, 4, 4, 1] and not engine.scheduler.requests


def test_a_sequence_that_ends_early_does_not_shorten_the_steps_of_others(model):
    engine = running(model, num_tokens=96)
    engine.add("short", [9] * 20, max_tokens=3)
    assert numbers(engine, 2) == [1, 4] and engine.scheduler.requests.keys() == {"0", "1", "2"}


def test_a_sequence_takes_no_step_behind_the_longest_that_is_possible(model):
    # 60 of 64 tokens: the first and three more.
    engine = running(model, length=MAX_LENGTH - 4, max_tokens=30, num_tokens=192)
    assert numbers(engine, 2) == [1, 3] and not engine.scheduler.requests


def test_one_sequence_alone_takes_several_steps(model):
    assert numbers(running(model, num_requests=1, max_tokens=10, num_tokens=64), 4) == [1, 4, 4, 1]


@pytest.mark.parametrize(("num_blocks", "num_steps"), [(19, 4), (18, 1)])
def test_sequences_take_single_steps_while_blocks_are_missing_for_more(model, num_blocks, num_steps):
    # Prompts of 18 tokens take five blocks of four each, and 22 tokens a sixth. The first block is vLLM's own.
    engine = running(model, length=18, num_blocks=num_blocks, num_tokens=64)
    assert numbers(engine, 2) == [1, num_steps]


@pytest.mark.parametrize("change", [{"num_spec_tokens": 3}, {"lora_config": object()}, {"log_stats": True}])
def test_an_engine_that_does_more_is_left_to_vllm(model, change):
    scheduler = make_scheduler(model, Scheduler)
    vars(scheduler).update(change)
    multi_step.patch(scheduler)
    assert "schedule" not in vars(scheduler)


def test_no_more_steps_than_the_tokens_that_sequences_have_written_allow(model, monkeypatch):
    monkeypatch.setattr(multi_step, "TOKENS_PER_STEP", 3)
    # Three tokens per step: 1, 1, 1, ... after six tokens two steps, and so on.
    engine = running(model, num_tokens=64, max_tokens=40, num_steps=8)
    assert numbers(engine, 11) == [1] * 6 + [2, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("waits", "expected"),
    [(0.05, [8, 16]), (0.11, [8, 16]), (0.13, [4, 4]), (0.39, [4, 4]), (0.41, [2, 1]), (0.9, [2, 1])],
)
def test_there_are_as_many_steps_as_the_host_needs_to_keep_up(model, monkeypatch, waits, expected):
    """Each step of the scheduler takes a second, of which the host waits for the GPU in this share."""
    now = [0.0]
    monkeypatch.setattr(multi_step, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(multi_step, "ROUNDS", 2)
    engine = running(model, num_tokens=64, max_tokens=200, num_blocks=400, max_length=256)
    seen = []
    for _ in range(5):  # the first is that of the prompts
        engine.begin()
        now[0] += 1 - waits
        engine.pending[-1][0].launched_at = now[0]
        now[0] += waits
        engine.end()
        seen.append(engine.control.number)
    assert seen[2::2] == expected


def test_a_host_that_is_slower_soon_has_more_steps_at_a_time(model, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(multi_step, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    engine = running(model, num_tokens=64, max_tokens=400, num_blocks=800, max_length=512, num_steps=1)
    seen = []
    for _ in range(20):
        engine.begin()
        engine.pending[-1][0].launched_at = now[0] = now[0] + 1
        engine.end()
        seen.append(engine.control.number)
    # Two rounds of 1, two of 2, four of 4 and eight of 8.
    assert seen == [1, 2, 2, 4, 4, 4, 4, 8, 8, 8, 8, 8, 8, 8, 8, 16, 16, 16, 16, 16]


def test_workers_that_say_no_time_leave_the_number_of_steps(model):
    engine = running(model, num_tokens=64, num_steps=1)
    assert set(numbers(engine, 20)) == {1} and engine.control.number == 1


@pytest.mark.parametrize(
    ("kind", "is_v2", "num_ranks", "is_patched"),
    [
        (AsyncScheduler, True, 1, True),
        (AsyncScheduler, False, 1, False),
        (Scheduler, True, 1, False),
        (AsyncScheduler, True, 2, False),
    ],
)
def test_runners_that_keep_tokens_on_the_host_or_wait_for_others_are_left_alone(
    model, monkeypatch, kind, is_v2, num_ranks, is_patched
):
    monkeypatch.setattr(multi_step, "_runs_ahead", RUNS_AHEAD)
    scheduler = make_scheduler(model, kind)
    scheduler.use_v2_model_runner = is_v2
    scheduler.parallel_config.data_parallel_size = num_ranks
    multi_step.patch(scheduler)
    assert ("schedule" in vars(scheduler)) == is_patched


def test_steps_of_one_token_go_on_where_the_last_one_ended(model):
    engine = running(model, num_requests=2, num_tokens=64)
    numbers(engine, 1)
    step = engine.scheduler.schedule()
    assert step.num_steps == 4 and step.total_num_scheduled_tokens == 8
    step.finished_req_ids = {"gone"}
    first, *others = multi_step.single_steps(step)
    assert first.finished_req_ids == {"gone"} and first.scheduled_cached_reqs is step.scheduled_cached_reqs
    for later, single in enumerate([first, *others]):
        cached = single.scheduled_cached_reqs
        assert (cached.req_ids, single.num_scheduled_tokens) == (["0", "1"], {"0": 1, "1": 1})
        assert single.total_num_scheduled_tokens == 2
        # The prompts have 20 tokens, and one token was written.
        assert cached.num_computed_tokens == [20 + later] * 2 and cached.num_output_tokens == [1 + later] * 2
        assert later == 0 or (cached.new_block_ids, single.finished_req_ids) == ([None, None], set())


class Later(AsyncModelRunnerOutput):
    def __init__(self, output):
        self.output = output

    def get_output(self):
        return self.output


def output_of(tokens):
    column = np.array(tokens)[:, None]
    rows = LogprobsLists(column, -column.astype(np.float32), 10 * column[:, 0])
    return ModelRunnerOutput(["a", "b"], {"a": 0, "b": 1}, [[token] for token in tokens], rows)


@pytest.mark.parametrize("wrap", [lambda output: output, Later])
def test_outputs_of_steps_become_those_of_sequences(wrap):
    joined = multi_step.joined([wrap(output_of(tokens)) for tokens in ([1, 2], [3, 4], [5, 6])])
    joined = joined.get_output() if wrap is Later else joined
    assert joined.sampled_token_ids == [[1, 3, 5], [2, 4, 6]]
    of_second = joined.logprobs.slice_request(1, 3)
    assert of_second.logprobs.tolist() == [[-2.0], [-4.0], [-6.0]]
    assert of_second.logprob_token_ids.tolist() == [[2], [4], [6]]
    assert of_second.sampled_token_ranks.tolist() == [20, 40, 60]
    assert joined.logprobs.slice_request(0, 2).logprobs.tolist() == [[-1.0], [-3.0]]


def test_outputs_without_log_probs_have_none():
    outputs = [output_of(tokens) for tokens in ([1, 2], [3, 4])]
    for output in outputs:
        output.logprobs = None
    assert multi_step.joined(outputs).logprobs is None


async def test_engine_gives_the_same_tokens_and_log_probs(model, monkeypatch):
    """Sequences have a seed each, so that their tokens do not depend on those beside them."""
    several = []
    lengthen = multi_step._MultiStep._lengthen
    monkeypatch.setattr(multi_step._MultiStep, "_lengthen", lambda *args: several.append(args) or lengthen(*args))
    monkeypatch.setattr(multi_step, "ROUNDS", 1)
    found = []
    for skipped in ((), ("multi_step",)):
        several.clear()
        engine = VllmEngine(
            EngineSpec(model=model, max_model_len=MAX_LENGTH, max_num_seqs=8, seed=0, skip_patches=skipped)
        )
        try:
            scheduler = vars(engine._loop._core.engine_core.scheduler)
            assert "_make_cached_request_data" in scheduler  # by the patch bulk_decoding
            sampling = [
                SamplingParams(num_samples=2, max_tokens=9 + 4 * seed, seed=seed, stop=stop)
                for stop in ((), ("A", "B", "C", "D", "E"))
                for seed in range(6)
            ]
            prompts = [np.arange(3, 8 + length) for length in range(6)] * 2
            calls = [engine.generate(prompt, each) for prompt, each in zip(prompts, sampling, strict=True)]
            found.append([given.spans[0] for group in await asyncio.gather(*calls) for given in group])
        finally:
            await engine.close()
        assert bool(several) == (not skipped)
    for one, other in zip(*found, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist() and len(one.token_ids) > 0
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
