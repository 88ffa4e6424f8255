"""The contract of RolloutEngine, held against every implementation that runs here: fake, served, transformers, vLLM."""

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine_testing import (
    CONTROL_TIMEOUT_S,
    MASKED,
    MAX_MODEL_LEN,
    PROMPT,
    REQUEST_TIMEOUT_S,
    Subject,
    generate,
    run,
    update,
)
from rlhf_data.errors import EngineError
from rlhf_data.records import FinishReason
from rlhf_rollout.engines import EngineSpec, build_engine
from rlhf_rollout.engines.fake import FakeEngine
from rlhf_rollout.engines.stopping import decoder
from rlhf_rollout.protocols import Draft, SamplingParams
from rollout_testing import shared_memory_bucket


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


def test_generate_stop_token_ends_it_and_stays_last(subject: Subject) -> None:
    stops = tuple(range(0, subject.vocab_size, 2))
    (completion,) = generate(subject, max_tokens=60, stop_token_ids=stops, seed=3)
    assert completion.finish_reason is FinishReason.STOP
    assert completion.token_ids[-1] % 2 == 0
    assert np.all(completion.token_ids[:-1] % 2 == 1)
    assert len(completion.logprobs) == len(completion.token_ids)


def test_generate_text_of_stop_ends_it_at_the_token_that_completes_it(subject: Subject, model_dir: Path) -> None:
    decode = decoder(model_dir if subject.has_model else None)
    for seed in range(20, 40):
        (whole,) = generate(subject, max_tokens=40, seed=seed)
        ids = whole.token_ids.tolist()
        stop = decode(ids[: len(ids) // 2])[-2:]
        if len(stop) == 2 and "\ufffd" not in stop and len(ids) > 5:
            break
    (completion,) = generate(subject, max_tokens=40, seed=seed, stop=("never written", stop))
    size = next(size for size in range(len(ids)) if stop in decode(ids[:size]))
    assert completion.token_ids.tolist() == ids[:size]
    np.testing.assert_allclose(completion.logprobs, whole.logprobs[:size], atol=1e-5)
    assert completion.finish_reason is FinishReason.STOP
    assert run(subject.engine.health()).num_in_flight == 0


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> Any:
    """The engines' model in plain transformers."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_dir).float()


def filtered(logits: np.ndarray, seen: set[int], sampling: SamplingParams) -> np.ndarray:
    """Return the probabilities [V] of the next token after all filters, which keep the most likely token."""
    for token in seen:
        factor = sampling.repetition_penalty
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    probs = np.exp((logits - logits.max()) / (sampling.temperature or 1.0))
    probs[probs < sampling.min_p * probs.max()] = 0
    order = np.argsort(-probs)
    if sampling.top_k > 0:
        probs[order[sampling.top_k :]] = 0
    # The nucleus is the fewest tokens that have `top_p` of what the other filters leave.
    before = np.cumsum(probs[order]) - probs[order]
    probs[order[before >= sampling.top_p * probs.sum()]] = 0
    return probs / probs.sum()


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({"temperature": 1.0}, None),
        ({"temperature": 0.0}, None),
        ({"temperature": 0.7, "min_p": 0.05, "repetition_penalty": 1.3}, None),
        ({"temperature": 1.0, "repetition_penalty": 0.6}, None),
        ({"temperature": 0.0, "repetition_penalty": 1.5}, None),
        ({"temperature": 1.3, "top_k": 5}, 5),
        ({"temperature": 0.7, "top_p": 0.5}, None),
        ({"temperature": 0.8, "min_p": 0.1, "top_k": 20, "top_p": 0.8}, 20),
    ],
)
def test_generate_logprobs_are_those_after_all_filters_and_without_masked_ids(
    subject: Subject, reference: Any, options: dict[str, Any], most: int | None
) -> None:
    if not subject.has_model:
        pytest.skip("no model behind it")
    import torch

    num_samples = 1 if options["temperature"] == 0 else 3
    sampling = SamplingParams(num_samples=num_samples, max_tokens=24, seed=5, **options)
    completions = run(subject.engine.generate(PROMPT, sampling))
    kept = []
    for completion in completions:
        ids = [*PROMPT.tolist(), *completion.token_ids.tolist()]
        with torch.no_grad():
            rows = reference(torch.tensor([ids])).logits[0, len(PROMPT) - 1 : -1].double().numpy()
        rows[:, MASKED] = -np.inf
        for number, logits in enumerate(rows):
            probs = filtered(logits, set(ids[: len(PROMPT) + number]), sampling)
            kept.append(np.count_nonzero(probs))
            chosen = ids[len(PROMPT) + number]
            assert sampling.temperature > 0 or chosen == int(np.argmax(logits))
            assert np.log(probs[chosen]) == pytest.approx(float(completion.logprobs[number]), abs=2e-4)
    has_filter = options.keys() & {"min_p", "top_k", "top_p"}
    assert (min(kept) < subject.vocab_size - len(MASKED)) == bool(has_filter)
    assert max(kept) <= (most or subject.vocab_size)


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


def test_engines_without_a_seed_write_differently(model_dir: Path) -> None:
    written = []
    for seed in (None, None, 3, 3):
        engine = build_engine("transformers", EngineSpec(model=str(model_dir), max_model_len=MAX_MODEL_LEN, seed=seed))
        [completion] = run(engine.generate(PROMPT, SamplingParams(max_tokens=16)))
        written.append(completion.token_ids.tolist())
    assert written[0] != written[1] and written[2] == written[3]


def test_generate_goes_on_behind_what_another_engine_wrote(subject: Subject) -> None:
    if subject.kind == "served":
        pytest.skip("a server tells nothing before the end")
    (whole,) = generate(subject, max_tokens=12, min_tokens=12, temperature=0.0)
    draft = Draft(whole.token_ids[:5].tolist(), [-7.0] * 5, [(0, 1000)])

    async def finish() -> Any:
        sampling = SamplingParams(max_tokens=12, min_tokens=12, temperature=0.0)
        return await subject.engine.generate(PROMPT, sampling, drafts=[draft])

    [completion] = run(finish())
    assert [(span.policy_version, len(span.token_ids)) for span in completion.spans] == [
        (1000, 5), (whole.policy_version, 7)
    ]  # fmt: skip
    assert completion.logprobs[:5].tolist() == [-7.0] * 5
    assert completion.finish_reason is FinishReason.LENGTH
    if subject.has_model:  # the fake engine's script does not depend on the prompt as a model does
        np.testing.assert_array_equal(completion.token_ids, whole.token_ids)
        np.testing.assert_allclose(completion.logprobs[5:], whole.logprobs[5:], atol=1e-4)
    # From another process, what is written is read every second until the request ends.
    num_known = 5 if subject.kind == "process" else 12
    assert draft.token_ids[:num_known].tolist() == completion.token_ids[:num_known].tolist()
    assert len(draft.token_ids) >= num_known


def test_generate_finishes_the_samples_that_are_not_finished(subject: Subject) -> None:
    if subject.kind == "served":
        pytest.skip("a server tells nothing before the end")
    drafts = [
        Draft([1, 2, 3], [-1.0] * 3, [(0, 1000)], finish_reason=FinishReason.STOP),
        Draft([4, 5], [-1.0] * 2, [(0, 1000)]),
        Draft(),
    ]
    sampling = SamplingParams(num_samples=3, max_tokens=6, min_tokens=6, seed=3)
    first, second, third = run(subject.engine.generate(PROMPT, sampling, drafts=drafts))
    assert (first.token_ids.tolist(), first.finish_reason) == ([1, 2, 3], FinishReason.STOP)
    assert second.token_ids[:2].tolist() == [4, 5]
    assert [len(second.token_ids), len(third.token_ids)] == [6, 6]


def test_generate_bad_request_raises(subject: Subject) -> None:
    with pytest.raises(EngineError, match="exceed the engine's context of 128 tokens"):
        generate(subject, max_tokens=MAX_MODEL_LEN)
    outside = r"token id 100000 is outside(.|\n)*hint: the prompts were tokenized for another model"
    with pytest.raises(EngineError, match=outside):
        run(subject.engine.generate(np.array([3, 100_000], np.int32), SamplingParams()))


def test_generate_cancelled_leaves_the_engine_usable(subject: Subject) -> None:
    async def cancel() -> bool:
        task = asyncio.create_task(subject.engine.generate(PROMPT, SamplingParams(num_samples=2, max_tokens=100)))
        await asyncio.sleep(0.0 if subject.kind == "fake" else 0.02)
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    for _ in range(20):  # on a busy machine, a request may end before it is cancelled
        if run(cancel()):
            break
    else:
        pytest.fail("no request was cancelled")
    assert len(generate(subject, max_tokens=3, min_tokens=3, seed=1)[0].token_ids) == 3


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
        while not (await subject.engine.health()).num_in_flight:
            await asyncio.sleep(0.01)
        with pytest.raises(EngineError, match="cannot sleep with 1"):
            await subject.engine.sleep()
        with shared_memory_bucket(subject.weights) as bucket:
            await subject.engine.receive_weights(bucket)
        await subject.engine.finish_weight_update()
        await task

    run(scenario())


def test_each_pass_that_writes_tokens_puts_the_deadline_off(model_dir: Path) -> None:
    for kind, num_passes in (("transformers", 3), ("fake", 6)):  # the fake engine writes each sample apart
        engine = build_engine(kind, EngineSpec(model=str(model_dir), max_model_len=MAX_MODEL_LEN))
        run(engine.generate(PROMPT, SamplingParams(num_samples=2, max_tokens=3, min_tokens=3)))
        assert engine._progress.num_signs == num_passes
        run(engine.close())


def test_deadline_of_a_request_is_put_off_by_a_pause_and_counts_before_and_after(subject: Subject) -> None:
    async def scenario() -> Any:
        assert await subject.engine.pause("drain") == 0
        task = asyncio.create_task(subject.engine.generate(PROMPT, SamplingParams(max_tokens=2), timeout_s=30.0))
        await asyncio.sleep(0.05)
        # Set this process's clock forward, instead of waiting.
        loop = asyncio.get_running_loop()
        loop.time = lambda real=loop.time: real() + 31.0
        await asyncio.sleep(0.05)
        assert not task.done()
        await subject.engine.resume()
        assert len(await task) == 1
        # A pause that is over puts nothing off.
        await subject.engine.begin_weight_update(63)
        with pytest.raises(EngineError, match=r"took longer than 0\.05 s"):
            await subject.engine.generate(PROMPT, SamplingParams(max_tokens=2), timeout_s=0.05)
        while (await subject.engine.health()).num_in_flight:  # the request is given up
            await asyncio.sleep(0.01)

    run(scenario())
    run(update(subject, 64))


def test_deadline_of_the_spec_holds_for_requests_that_bring_none(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = subject.engine
    spec = engine._spec
    assert (spec.request_timeout_s, spec.control_timeout_s) == (REQUEST_TIMEOUT_S, CONTROL_TIMEOUT_S)

    async def scenario() -> None:
        await engine.begin_weight_update(65)
        with monkeypatch.context() as patch:
            patch.setattr(engine, "_spec", dataclasses.replace(spec, request_timeout_s=0.05))
            late = r"request( of an engine's process)? took longer than 0\.05 s without [a-z ]+\s+hint: "
            with pytest.raises(EngineError, match=late):
                await engine.generate(PROMPT, SamplingParams(max_tokens=2))
        await update(subject, 66)

    run(scenario())


@pytest.mark.parametrize("call", ["pause", "begin_weight_update"])
def test_control_call_that_waits_for_requests_has_the_deadline_of_both(call: str) -> None:
    engine = FakeEngine(EngineSpec(model="", request_timeout_s=0.06, control_timeout_s=0.02), latency_s=60.0)

    async def scenario() -> None:
        task = asyncio.create_task(engine.generate(PROMPT, SamplingParams(max_tokens=2), timeout_s=60.0))
        await asyncio.sleep(0)
        arguments = {"pause": "drain", "begin_weight_update": 1}
        with pytest.raises(EngineError, match=rf"`{call}` took longer than 0\.08 s"):
            await getattr(engine, call)(arguments[call])
        task.cancel()

    run(scenario())
