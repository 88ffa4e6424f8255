"""A tiny model of each family in vLLM: its log-probs against plain transformers, before and after weights are sent.

The weights that are sent are those of the model as trainers load it.
"""

import asyncio
import json
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from families import distance, logprobs_of, plain_model, write_tiny
from rlhf_models.loading import load_actor
from rlhf_models.weights import hf_named_weights
from rlhf_rollout.engines import EngineSpec, build_engine
from rlhf_rollout.protocols import RolloutEngine, SamplingParams
from rlhf_rollout.weights.source import WeightSource

_BLOCK = 128  # tokens of vLLM's KV cache on a CPU; a chunk of Llama 4's attention is made of whole blocks
_PROMPTS = [np.arange(3, 3 + length, dtype=np.int32) for length in (1, 7, 40, _BLOCK - 8)]
_CHANGES = (0.0, 0.0, 0.05)  # of the weights: none at the start, the same weights are sent, then others

Answers = list[tuple[list[int], Tensor]]  # each prompt with its answer, and the log-probs of the answer


def gaps(family: str) -> list[float]:
    """Return the largest differences of log-probs in nats: at the start, after the same weights and after others."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_tiny(family, folder)
        _widen_chunks(folder / "config.json")
        answers = _answers(folder)
        # In a process of its own, because vLLM may change the classes of transformers in this one.
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as others:
            return others.submit(_distances, folder, answers).result()


def _widen_chunks(file: Path) -> None:
    def widened(fields: dict[str, Any]) -> dict[str, Any]:
        return fields | ({"attention_chunk_size": _BLOCK} if fields.get("attention_chunk_size") else {})

    file.write_text(json.dumps(json.loads(file.read_text(), object_hook=widened)))


def _answers(folder: Path) -> list[Answers]:
    """Return what vLLM answers after each of the changes."""
    spec = EngineSpec(model=str(folder), max_model_len=256, max_num_seqs=4, max_num_batched_tokens=256)
    actor = load_actor(folder, dtype="float32", max_length=spec.max_model_len)
    engine = build_engine("vllm", spec)
    try:
        sender = WeightSource("shared_memory", bucket_bytes=100_000)
        found = []
        for version, size in enumerate(_CHANGES):
            _change(actor.model, size)
            if version:
                sender.send(hf_named_weights(actor), [engine], version, ["the engine"])
            found.append(_ask(engine))
        return found
    finally:
        asyncio.run(engine.close())


def _ask(engine: RolloutEngine) -> Answers:
    async def all_at_once() -> Any:
        params = SamplingParams(max_tokens=16, seed=3)
        return await asyncio.gather(*(engine.generate(prompt, params) for prompt in _PROMPTS))

    pairs = [(prompt, group[0]) for prompt, group in zip(_PROMPTS, asyncio.run(all_at_once()), strict=True)]
    return [
        (np.concatenate([prompt, completion.token_ids]).tolist(), torch.tensor(completion.logprobs))
        for prompt, completion in pairs
    ]


@torch.no_grad()
def _change(model: Any, size: float) -> None:
    generator = torch.Generator().manual_seed(7)
    for weight in model.parameters():
        weight.add_(torch.randn(weight.shape, generator=generator), alpha=size)


def _distances(folder: Path, answers: list[Answers]) -> list[float]:
    model, _ = plain_model(folder)
    found = []
    for size, answered in zip(_CHANGES, answers, strict=True):
        _change(model, size)
        plain = logprobs_of(model, [sequence for sequence, _ in answered])
        own = [logprobs for _, logprobs in answered]
        found.append(distance(own, [values[-len(few) :] for values, few in zip(plain, own, strict=True)]))
    return found


if __name__ == "__main__":
    print("gaps:", *(f"{gap:.0e}" for gap in gaps(sys.argv[1])))
