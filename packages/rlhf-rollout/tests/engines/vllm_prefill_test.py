"""What vLLM prefills: more prompt tokens at once than one step takes, and conversations that go on."""

import asyncio
from typing import Any

import numpy as np
import pytest

from rlhf_models.testing import tiny_model_dir
from rlhf_rollout.engines import EngineSpec, build_engine
from rlhf_rollout.protocols import SamplingParams
from rlhf_rollout.router import EngineRouter

BLOCK_SIZE = 128  # tokens, on a CPU: the cache holds whole blocks


def test_vllm_later_turns_prefill_only_what_is_new(tmp_path):
    pytest.importorskip("vllm")
    path = str(tiny_model_dir(tmp_path / "model", max_position_embeddings=1024))
    spec = EngineSpec(model=path, max_model_len=1000, max_num_seqs=4, enable_prefix_caching=True)
    engine = build_engine("vllm", spec)
    told = [np.arange(3 + turn, 153 + turn, dtype=np.int32) % 250 for turn in range(4)]

    async def episode() -> list[tuple[int, int]]:
        router = EngineRouter([engine])
        tokens = np.zeros(0, np.int32)
        found = []
        for added in told:
            seen = len(tokens)
            tokens = np.concatenate([tokens, added])
            [completion] = await router.generate(tokens, SamplingParams(max_tokens=20, min_tokens=20, seed=1))
            tokens = np.concatenate([tokens, completion.token_ids])
            found.append((seen, completion.num_cached_tokens))
        assert router.prompt_tokens.tolist() == [150 + 320 + 490 + 660, sum(cached for _, cached in found)]
        await engine.close()
        return found

    for seen, cached in asyncio.run(episode()):
        assert seen - BLOCK_SIZE <= cached <= seen


def test_vllm_sequences_that_start_together_are_generated_as_ever(tmp_path):
    pytest.importorskip("vllm")
    from rlhf_rollout.engines.vllm.patches.bulk_admission import patch as start_together

    path = str(tiny_model_dir(tmp_path / "model"))
    engine = build_engine("vllm", EngineSpec(model=path, max_model_len=64, max_num_seqs=32, enforce_eager=True))
    prompts = [np.arange(3 + number, 9 + number, dtype=np.int32) for number in range(80)]
    batches: list[set[str]] = []

    def watch(core):
        step = core.get_output

        def get_output():
            output = step()
            batches.append({item.request_id for item in output.outputs})
            return output

        core.get_output = get_output

    async def generate() -> tuple[list[list[int]], int]:
        batches.clear()
        params = [SamplingParams(max_tokens=2 + 29 * number % 47, temperature=0.0) for number in range(80)]
        groups = await asyncio.gather(*map(engine.generate, prompts, params))
        starts = sum(not later <= earlier for earlier, later in zip([set(), *batches], batches, strict=False))
        return [completion.token_ids.tolist() for [completion] in groups], starts

    async def both() -> tuple[Any, Any]:
        engine._loop.call(watch, drain=False).result(60)
        alone = await generate()
        engine._loop.call(lambda core: start_together(core.engine_core.scheduler), drain=False).result(60)
        together = await generate()
        await engine.close()
        return alone, together

    (expected, num_starts), (tokens, num_fewer) = asyncio.run(both())
    assert tokens == expected
    assert num_fewer < 0.8 * num_starts  # steps in which a sequence starts; two of 32 slots must be free
