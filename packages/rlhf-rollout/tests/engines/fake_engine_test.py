"""The fake engine: its scripts, its tokens and its failures, which the tests of other parts rely on."""

from typing import Any

import numpy as np
import pytest

from engine_testing import PROMPT, run
from rlhf_data.errors import EngineError
from rlhf_data.records import FinishReason
from rlhf_rollout.engines import EngineSpec
from rlhf_rollout.engines.fake import FakeEngine
from rlhf_rollout.protocols import SamplingParams
from simulated import now, simulate


def test_fake_engine_takes_the_ids_of_its_tokenizer_or_256() -> None:
    prompt = np.array([256], np.int32)
    with pytest.raises(EngineError, match="token id 256 is outside the model's vocabulary of 256"):
        run(FakeEngine().generate(prompt, SamplingParams(max_tokens=1)))
    spec = EngineSpec(model="fake", tokenizer="its/own")
    assert len(run(FakeEngine(spec).generate(prompt, SamplingParams(max_tokens=1)))) == 1


def test_fake_engine_scripts_get_a_seed_per_request_and_sample() -> None:
    seeds: list[int] = []
    engine = FakeEngine(script=lambda prompt, seed: seeds.append(seed) or [0])
    for sampling in (SamplingParams(num_samples=2), SamplingParams(), SamplingParams(num_samples=3, seed=5)):
        run(engine.generate(PROMPT, sampling))
    run(engine.generate(PROMPT, SamplingParams(temperature=0.0)))
    assert seeds == [0, 1, 1009, 5045, 5046, 5047, 0]


def test_fake_engine_takes_the_seconds_that_a_prompt_and_a_sample_say() -> None:
    engine = FakeEngine(
        script=lambda prompt, seed: [7] * 9 + [0], token_latency_s=lambda prompt, seed: prompt[0] + seed
    )

    async def lasts(first: int, **sampling: Any) -> float:
        begun = now()
        await engine.generate(np.array([first], np.int32), SamplingParams(max_tokens=64, **sampling))
        return now() - begun

    async def scenario() -> list[float]:
        return [await lasts(3, seed=0), await lasts(2, seed=0), await lasts(2, seed=0, num_samples=4)]

    # Ten tokens each; a request lasts as long as its slowest sample.
    assert simulate(scenario()) == [30.0, 20.0, 50.0]


def test_fake_engine_holds_end_tokens_back_until_min_tokens_and_fills_up_to_max_tokens() -> None:
    engine = FakeEngine(script=lambda prompt, seed: [0] * 9)
    (completion,) = run(engine.generate(PROMPT, SamplingParams(min_tokens=2, max_tokens=5)))
    assert completion.token_ids.tolist() == [255, 255, 0]
    engine = FakeEngine(script=lambda prompt, seed: [9])
    (completion,) = run(engine.generate(PROMPT, SamplingParams(max_tokens=3)))
    assert (completion.token_ids.tolist(), completion.finish_reason) == ([9, 255, 255], FinishReason.LENGTH)


def test_fake_engine_fails_after_the_requests_that_it_was_told() -> None:
    engine = FakeEngine(fail_after=2)
    for _ in range(2):
        run(engine.generate(PROMPT, SamplingParams()))
    with pytest.raises(EngineError, match="told to fail after 2 requests"):
        run(engine.generate(PROMPT, SamplingParams()))
