"""vLLM with more prompt tokens at once than one step takes."""

import asyncio

import numpy as np
import pytest

from rlhf_models.testing import tiny_model_dir
from rlhf_rollout.engines import EngineSpec, build_engine
from rlhf_rollout.protocols import SamplingParams


def test_vllm_more_prompt_tokens_than_a_step_takes_are_generated_from_whole_prompts(tmp_path):
    pytest.importorskip("vllm")
    path = str(tiny_model_dir(tmp_path / "model"))
    engine = build_engine("vllm", EngineSpec(model=path, max_model_len=64, max_num_seqs=32, max_num_batched_tokens=100))
    prompts = [np.arange(3, 3 + length, dtype=np.int32) for length in range(20, 52)]  # 1136 tokens, steps of 100

    async def generate() -> list[int]:
        params = SamplingParams(max_tokens=4, seed=1)
        groups = await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts))
        await engine.close()
        return [len(group) for group in groups]

    assert asyncio.run(generate()) == [1] * len(prompts)
