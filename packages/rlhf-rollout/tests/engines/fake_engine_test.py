"""The fake engine: its scripts, its tokens and its failures, which the tests of other parts rely on."""

from typing import Any

import numpy as np
import pytest

from engine_testing import run
from rlhf_data.errors import EngineError
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
