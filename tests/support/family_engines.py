"""A tiny model of each family in vLLM: its log-probs against plain transformers, before and after weights are sent."""

import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from families import distance, logprobs_of, plain_model, write_tiny
from rlhf_models.weights import hf_named_weights
from rlhf_rollout.engines import EngineSpec, build_engine
from rlhf_rollout.protocols import RolloutEngine, SamplingParams
from rlhf_train.weight_sync.source import WeightSource

_PROMPTS = [np.arange(3, 3 + length, dtype=np.int32) for length in (1, 7, 40)]


def gaps(family: str) -> list[float]:
    """Return the largest differences of log-probs in nats: at the start, after the same weights and after others."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_tiny(family, folder)
        model, _ = plain_model(folder)
        spec = EngineSpec(model=str(folder), max_model_len=128, max_num_seqs=4, max_num_batched_tokens=256)
        engine = build_engine("vllm", spec)
        try:
            found = [_gap(engine, model)]
            sender = WeightSource("shared_memory", bucket_bytes=100_000)
            for version, size in ((1, 0.0), (2, 0.05)):
                _change(model, size)
                sender.send(hf_named_weights(model), [engine], version, ["the engine"])
                found.append(_gap(engine, model))
            return found
        finally:
            asyncio.run(engine.close())


@torch.no_grad()
def _change(model: Any, size: float) -> None:
    generator = torch.Generator().manual_seed(7)
    for weight in model.parameters():
        weight.add_(torch.randn(weight.shape, generator=generator), alpha=size)


def _gap(engine: RolloutEngine, model: Any) -> float:
    async def all_at_once() -> Any:
        params = SamplingParams(max_tokens=16, seed=3)
        return await asyncio.gather(*(engine.generate(prompt, params) for prompt in _PROMPTS))

    pairs = [(prompt, group[0]) for prompt, group in zip(_PROMPTS, asyncio.run(all_at_once()), strict=True)]
    sequences = [np.concatenate([prompt, completion.token_ids]).tolist() for prompt, completion in pairs]
    own = [torch.tensor(completion.logprobs) for _, completion in pairs]
    plain = logprobs_of(model, sequences)
    return distance(own, [values[-len(found) :] for values, found in zip(plain, own, strict=True)])


if __name__ == "__main__":
    print("gaps:", *(f"{gap:.0e}" for gap in gaps(sys.argv[1])))
