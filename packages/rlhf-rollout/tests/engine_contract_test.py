"""The contract of RolloutEngine, held against every implementation that runs here: fake, transformers, vLLM."""

import asyncio
import dataclasses
from collections.abc import Coroutine, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_data.errors import EngineError, WeightSyncError
from rlhf_data.records import FinishReason
from rlhf_rollout.engines import EngineSpec, build_engine
from rlhf_rollout.engines.fake import FakeEngine
from rlhf_rollout.protocols import EngineHealth, RolloutEngine, SamplingParams
from rollout_testing import shared_memory_bucket

MAX_MODEL_LEN = 128
PROMPT = np.arange(3, 13, dtype=np.int32)


@dataclass(frozen=True)
class Subject:
    """An engine under test, the weights it holds, and the size of its vocabulary."""

    kind: str
    engine: RolloutEngine
    weights: Mapping[str, np.ndarray]
    vocab_size: int


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from rlhf_models.testing import tiny_model_dir

    # No end token of its own, so that only what a test asks for ends a completion.
    path = tiny_model_dir(tmp_path_factory.mktemp("model"), eos_token_id=None)
    for name in ("generation_config.json", "tokenizer_config.json"):
        (path / name).write_text("{}")
    return path


@pytest.fixture(scope="module", params=["fake", "transformers", "vllm"])
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    model_dir = Path() if request.param == "fake" else request.getfixturevalue("model_dir")
    spec = EngineSpec(
        model=str(model_dir),
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=32,
        max_num_batched_tokens=1024,
        enable_sleep=True,
    )
    weights: Mapping[str, np.ndarray] = {"a": np.arange(6, dtype=np.float32), "b": np.ones((2, 3), np.float32)}
    vocab_size = 256
    if request.param != "fake":
        from safetensors.numpy import load_file

        weights, vocab_size = load_file(model_dir / "model.safetensors"), 512
    engine = build_engine(request.param, spec)
    yield Subject(request.param, engine, weights, vocab_size)
    asyncio.run(engine.close())


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, timeout=120))


def generate(subject: Subject, **sampling: Any) -> list[Any]:
    return run(subject.engine.generate(PROMPT, SamplingParams(**sampling)))


async def update(subject: Subject, policy_version: int, weights: Mapping[str, np.ndarray] | None = None) -> None:
    await subject.engine.begin_weight_update(policy_version)
    names = list(subject.weights if weights is None else weights)
    for part in (names[: len(names) // 2], names[len(names) // 2 :]):
        with shared_memory_bucket({name: (weights or subject.weights)[name] for name in part}, checksum=True) as bucket:
            await subject.engine.receive_weights(bucket)
    await subject.engine.finish_weight_update()


def test_engine_is_a_rollout_engine(subject: Subject) -> None:
    assert isinstance(subject.engine, RolloutEngine)


def test_generate_returns_each_sample_with_its_logprobs(subject: Subject) -> None:
    completions = generate(subject, num_samples=3, max_tokens=9, seed=1)
    assert len(completions) == 3
    for completion in completions:
        assert completion.token_ids.dtype == np.int32
        assert completion.logprobs.dtype == np.float32
        assert len(completion.token_ids) == len(completion.logprobs)
        assert np.all(completion.logprobs <= 0)
        assert np.all((completion.token_ids >= 0) & (completion.token_ids < subject.vocab_size))
    assert len({completion.token_ids.tobytes() for completion in completions}) == 3


def test_generate_without_stop_ends_at_max_tokens(subject: Subject) -> None:
    # The fake engine's own stop token is 0, which min_tokens forbids.
    (completion,) = generate(subject, max_tokens=7, min_tokens=7, seed=2)
    assert len(completion.token_ids) == 7
    assert completion.finish_reason is FinishReason.LENGTH


def test_generate_stop_token_ends_it_and_stays_last(subject: Subject) -> None:
    stops = tuple(range(0, subject.vocab_size, 2))
    (completion,) = generate(subject, max_tokens=60, stop_token_ids=stops, seed=3)
    assert completion.finish_reason is FinishReason.STOP
    assert completion.token_ids[-1] % 2 == 0
    assert np.all(completion.token_ids[:-1] % 2 == 1)
    assert len(completion.logprobs) == len(completion.token_ids)


def test_generate_min_tokens_holds_stop_tokens_back(subject: Subject) -> None:
    stops = tuple(range(0, subject.vocab_size, 2))
    (completion,) = generate(subject, max_tokens=60, min_tokens=12, stop_token_ids=stops, seed=4)
    assert len(completion.token_ids) >= 12
    assert np.all(completion.token_ids[:11] % 2 == 1)


def test_generate_same_seed_repeats_even_beside_other_requests(subject: Subject) -> None:
    sampling = SamplingParams(num_samples=2, max_tokens=12, seed=5)
    others = [SamplingParams(max_tokens=20), SamplingParams(max_tokens=5, temperature=0.0), SamplingParams(seed=6)]

    async def crowded() -> Any:
        neighbours = [asyncio.create_task(subject.engine.generate(PROMPT + i, p)) for i, p in enumerate(others * 3)]
        wanted = await subject.engine.generate(PROMPT, sampling)
        await asyncio.gather(*neighbours)
        return wanted

    alone = run(subject.engine.generate(PROMPT, sampling))
    for first, second in zip(alone, run(crowded()), strict=True):
        np.testing.assert_array_equal(first.token_ids, second.token_ids)
        np.testing.assert_allclose(first.logprobs, second.logprobs, atol=1e-5)


def test_generate_neighbouring_seeds_share_no_sample(subject: Subject) -> None:
    # A seed of its own for every sample: seed + index would give request 7 and request 8 a sample in common.
    samples = [generate(subject, num_samples=3, max_tokens=16, min_tokens=16, seed=seed) for seed in (7, 8)]
    assert len({completion.token_ids.tobytes() for group in samples for completion in group}) == 6


def test_generate_greedy_repeats(subject: Subject) -> None:
    (first,) = generate(subject, max_tokens=10, temperature=0.0)
    (second,) = generate(subject, max_tokens=10, temperature=0.0)
    np.testing.assert_array_equal(first.token_ids, second.token_ids)


def test_generate_many_at_once_keeps_requests_apart(subject: Subject) -> None:
    prompts = [PROMPT + shift for shift in range(24)]
    greedy = SamplingParams(max_tokens=4, temperature=0.0)

    async def at_once() -> Any:
        return await asyncio.gather(*(subject.engine.generate(prompt, greedy) for prompt in prompts))

    one_by_one = [run(subject.engine.generate(prompt, greedy)) for prompt in prompts]
    for expected, got in zip(one_by_one, run(at_once()), strict=True):
        np.testing.assert_array_equal(expected[0].token_ids, got[0].token_ids)


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        (PROMPT, {"max_tokens": MAX_MODEL_LEN}, "exceed the engine's context of 128 tokens"),
        (np.array([], np.int32), {}, "without tokens"),
        (np.array([3, 100_000], np.int32), {}, "token id 100000 is outside"),
        (np.array([3, -1], np.int32), {}, "token id -1 is outside"),
        (PROMPT, {"max_tokens": 4, "min_tokens": 5}, "min_tokens 5 is above max_tokens 4"),
    ],
    ids=["context", "empty", "vocabulary", "negative", "min_tokens"],
)
def test_generate_bad_request_raises(subject: Subject, prompt: Any, sampling: Any, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        run(subject.engine.generate(prompt, SamplingParams(**sampling)))


def test_generate_cancelled_leaves_the_engine_usable(subject: Subject) -> None:
    async def cancel() -> None:
        task = asyncio.create_task(subject.engine.generate(PROMPT, SamplingParams(num_samples=2, max_tokens=100)))
        await asyncio.sleep(0.0 if subject.kind == "fake" else 0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(cancel())
    assert len(generate(subject, max_tokens=3, min_tokens=3, seed=1)[0].token_ids) == 3


def test_weight_update_changes_the_policy_version(subject: Subject) -> None:
    run(update(subject, 41))
    assert generate(subject, max_tokens=2)[0].policy_version == 41


def test_weight_update_same_weights_give_the_same_tokens(subject: Subject) -> None:
    before = generate(subject, num_samples=2, max_tokens=16, seed=9)
    run(update(subject, 42))
    after = generate(subject, num_samples=2, max_tokens=16, seed=9)
    for first, second in zip(before, after, strict=True):
        np.testing.assert_array_equal(first.token_ids, second.token_ids)
        np.testing.assert_array_equal(first.logprobs, second.logprobs)


def test_weight_update_requests_wait_for_it(subject: Subject) -> None:
    async def scenario() -> Any:
        await subject.engine.begin_weight_update(43)
        task = asyncio.create_task(subject.engine.generate(PROMPT, SamplingParams(max_tokens=2)))
        await asyncio.sleep(0.05)
        assert not task.done()
        with shared_memory_bucket(subject.weights) as bucket:
            await subject.engine.receive_weights(bucket)
        await subject.engine.finish_weight_update()
        return await task

    assert run(scenario())[0].policy_version == 43


def test_weight_update_not_begun_raises(subject: Subject) -> None:
    with pytest.raises(WeightSyncError, match="no weight update has begun"):
        run(subject.engine.finish_weight_update())


def test_weight_update_begun_twice_starts_over(subject: Subject) -> None:
    async def scenario() -> None:
        await subject.engine.begin_weight_update(44)
        with shared_memory_bucket(dict(list(subject.weights.items())[:1])) as bucket:
            await subject.engine.receive_weights(bucket)
        await update(subject, 45)

    run(scenario())
    assert generate(subject, max_tokens=2)[0].policy_version == 45


def test_weight_update_wrong_checksum_raises(subject: Subject) -> None:
    async def scenario() -> None:
        await subject.engine.begin_weight_update(46)
        with shared_memory_bucket(subject.weights, checksum=True) as bucket:
            await subject.engine.receive_weights(dataclasses.replace(bucket, checksum=(bucket.checksum or 0) ^ 1))

    with pytest.raises(WeightSyncError, match="checksum"):
        run(scenario())
    run(update(subject, 47))


def _without_last(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return dict(list(weights.items())[:-1])


def _with_extra(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return weights | {"model.extra.weight": np.zeros(3, np.float32)}


def _with_wrong_shape(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    name = "model.layers.1.mlp.up_proj.weight"
    return weights | {name: weights[name][1:]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without_last, "1 did not come"),
        (_with_extra, "has no weight 'model.extra.weight'"),
        (_with_wrong_shape, r"up_proj.weight' came with shape \(127, 64\); the engine's model has \(128, 64\)"),
    ],
    ids=["missing", "extra", "shape"],
)
def test_weight_update_of_another_model_raises_and_a_good_one_heals(
    subject: Subject, change: Any, message: str
) -> None:
    if subject.kind == "fake":
        pytest.skip("the fake engine has no model to compare with")
    expected = generate(subject, max_tokens=8, temperature=0.0)[0]
    with pytest.raises(WeightSyncError, match=message):
        run(update(subject, 50, change(dict(subject.weights))))
    with pytest.raises(EngineError, match=r"weights are incomplete(.|\n)*hint: send all of them"):
        generate(subject, max_tokens=2)
    run(update(subject, 51))
    healed = generate(subject, max_tokens=8, temperature=0.0)[0]
    np.testing.assert_array_equal(healed.token_ids, expected.token_ids)
    assert healed.policy_version == 51


def test_sleep_then_wake_up_keeps_the_weights(subject: Subject) -> None:
    before = generate(subject, max_tokens=8, temperature=0.0)[0]

    async def nap() -> None:
        await subject.engine.sleep()
        with pytest.raises(EngineError, match=r"sleeps\s+hint: await wake_up\(\)"):
            await subject.engine.generate(PROMPT, SamplingParams())
        await subject.engine.wake_up()

    run(nap())
    np.testing.assert_array_equal(generate(subject, max_tokens=8, temperature=0.0)[0].token_ids, before.token_ids)


def test_sleep_without_enable_sleep_raises(model_dir: Path) -> None:
    for kind in ("fake", "transformers"):
        engine = build_engine(kind, EngineSpec(model=str(model_dir)))
        with pytest.raises(EngineError, match=r"hint: build it with EngineSpec\(enable_sleep=True\)"):
            run(engine.sleep())


def test_sleep_with_requests_in_flight_raises(subject: Subject) -> None:
    async def scenario() -> None:
        await subject.engine.begin_weight_update(60)
        task = asyncio.create_task(subject.engine.generate(PROMPT, SamplingParams(max_tokens=2)))
        await asyncio.sleep(0.05)
        with pytest.raises(EngineError, match="cannot sleep with 1"):
            await subject.engine.sleep()
        with shared_memory_bucket(subject.weights) as bucket:
            await subject.engine.receive_weights(bucket)
        await subject.engine.finish_weight_update()
        await task

    run(scenario())


def test_generate_deadline_that_passes_raises_and_gives_the_request_up(subject: Subject) -> None:
    async def scenario() -> None:
        await subject.engine.pause("drain")
        with pytest.raises(EngineError, match=r"took longer than 0\.05 s"):
            await subject.engine.generate(PROMPT, SamplingParams(max_tokens=2), timeout_s=0.05)
        assert (await subject.engine.health()).num_in_flight == 0
        await subject.engine.resume()

    run(scenario())


def paced(subject: Subject) -> Subject:
    """The subject, or in place of the fake engine, which answers at once, one that takes its time for each token."""
    if subject.kind != "fake":
        return subject
    return dataclasses.replace(subject, engine=FakeEngine(token_latency_s=0.005, max_model_len=MAX_MODEL_LEN))


def test_pause_by_drain_finishes_what_runs_and_holds_newcomers_until_resume(subject: Subject) -> None:
    subject = paced(subject)

    async def scenario() -> None:
        running = asyncio.create_task(subject.engine.generate(PROMPT, SamplingParams(max_tokens=30, min_tokens=30)))
        while (await subject.engine.health()).num_in_flight == 0:
            await asyncio.sleep(0.001)
        await subject.engine.pause("drain")
        health = await subject.engine.health()
        assert (health.num_in_flight, health.is_paused) == (0, True)
        assert len((await asyncio.wait_for(running, 1))[0].token_ids) == 30
        waiting = asyncio.create_task(subject.engine.generate(PROMPT, SamplingParams(max_tokens=2)))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        assert (await subject.engine.health()).num_in_flight == 1
        await subject.engine.resume()
        await waiting
        assert not (await subject.engine.health()).is_paused

    run(scenario())


def test_pause_lasts_through_a_weight_update_until_resume(subject: Subject) -> None:
    async def scenario() -> Any:
        await subject.engine.pause("drain")
        task = asyncio.create_task(subject.engine.generate(PROMPT, SamplingParams(max_tokens=2)))
        await update(subject, 70)
        await asyncio.sleep(0.1)
        assert not task.done()
        await subject.engine.begin_weight_update(71)
        await subject.engine.resume()  # the update that has begun still holds requests back
        await asyncio.sleep(0.1)
        assert not task.done()
        with shared_memory_bucket(subject.weights) as bucket:
            await subject.engine.receive_weights(bucket)
        await subject.engine.finish_weight_update()
        return await task

    assert run(scenario())[0].policy_version == 71


def test_pause_by_a_mode_that_there_is_not_raises(subject: Subject) -> None:
    with pytest.raises(EngineError, match=r"unknown pause mode `drian`(.|\n)*hint: did you mean `drain`"):
        run(subject.engine.pause("drian"))
    if subject.kind == "transformers":
        for mode in ("keep", "restart"):
            with pytest.raises(EngineError, match=rf"cannot pause by {mode}\s+hint: use one of: drain"):
                run(subject.engine.pause(mode))
    assert not run(subject.engine.health()).is_paused


@pytest.mark.parametrize("mode", ["keep", "restart"])
def test_pause_request_that_lives_through_an_update(subject: Subject, mode: Any) -> None:
    if subject.kind == "transformers":
        pytest.skip("it drains only")
    subject = paced(subject)
    engine = subject.engine

    async def scenario() -> Any:
        await update(subject, 80)
        # Sixty tokens, with a pause after some of them.
        sampling = SamplingParams(num_samples=2, max_tokens=60, min_tokens=60, seed=4)
        task = asyncio.create_task(engine.generate(PROMPT, sampling))
        while (await engine.health()).num_in_flight == 0:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        await engine.pause(mode)
        assert not task.done()
        await update(subject, 81)
        await asyncio.sleep(0.05)
        assert not task.done()
        await engine.resume()
        return await task

    for completion in run(scenario()):
        assert len(completion.token_ids) == len(completion.logprobs) == 60
        versions = [span.policy_version for span in completion.spans]
        assert versions == ([80, 81] if mode == "keep" else [81])
    run(update(subject, 82))


def test_weight_update_that_fails_lets_no_request_wait_for_ever(subject: Subject) -> None:
    async def scenario() -> None:
        await subject.engine.begin_weight_update(90)
        task = asyncio.create_task(subject.engine.generate(PROMPT, SamplingParams(max_tokens=2)))
        await asyncio.sleep(0.05)
        weights = _with_extra(dict(subject.weights))
        with shared_memory_bucket(weights) as bucket, pytest.raises(WeightSyncError, match="has no weight"):
            await subject.engine.receive_weights(bucket)
        with pytest.raises(EngineError, match=r"weights are incomplete(.|\n)*hint: send all of them"):
            await asyncio.wait_for(task, 5)

    if subject.kind == "fake":
        pytest.skip("the fake engine has no model to compare with")
    run(scenario())
    run(update(subject, 91))


def test_health_tells_the_version_and_the_sleep(subject: Subject) -> None:
    run(update(subject, 92))
    assert run(subject.engine.health()) == EngineHealth(
        policy_version=92, num_in_flight=0, is_paused=False, is_asleep=False
    )
    run(subject.engine.sleep())
    assert run(subject.engine.health()).is_asleep
    run(subject.engine.wake_up())
    assert not run(subject.engine.health()).is_asleep


def test_weight_update_given_up_while_it_drains_lets_requests_through(subject: Subject) -> None:
    if subject.kind != "fake":
        pytest.skip("only the fake engine's requests last as long as they are told")
    engine = FakeEngine(latency_s=0.5)

    async def scenario() -> Any:
        running = asyncio.create_task(engine.generate(PROMPT, SamplingParams(max_tokens=2)))
        await asyncio.sleep(0.01)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.begin_weight_update(9), 0.05)
        with pytest.raises(WeightSyncError, match="no weight update has begun"):
            await engine.finish_weight_update()
        return await asyncio.gather(running, engine.generate(PROMPT, SamplingParams(max_tokens=2)))

    assert [completions[0].policy_version for completions in run(scenario())] == [0, 0]


def test_fake_engine_scripts_get_a_seed_per_request_and_sample() -> None:
    seeds: list[int] = []
    engine = FakeEngine(lambda prompt, seed: seeds.append(seed) or [0])
    for sampling in (SamplingParams(num_samples=2), SamplingParams(), SamplingParams(num_samples=3, seed=5)):
        run(engine.generate(PROMPT, sampling))
    run(engine.generate(PROMPT, SamplingParams(temperature=0.0)))
    assert seeds == [0, 1, 1009, 5045, 5046, 5047, 0]


def test_close_refuses_further_requests(subject: Subject) -> None:
    run(subject.engine.close())
    with pytest.raises(EngineError, match="closed"):
        generate(subject)
    with pytest.raises(EngineError, match="closed"):
        run(subject.engine.health())
