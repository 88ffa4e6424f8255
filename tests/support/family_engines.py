"""A tiny model of each family in vLLM: its log-probs against plain transformers, before and after weights are sent.

The weights that are sent are those of the model as trainers load it.
"""

import argparse
import asyncio
import copy
import faulthandler
import json
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from families import logprobs_of, plain_model, write_tiny
from process_testing import forked_context
from rlhf_models.loading import load_actor, load_tokenizer
from rlhf_models.weights import hf_named_weights, save_hf
from rlhf_rollout.engines import EngineSpec, build_engine
from rlhf_rollout.engines.vllm.own_classes import shortest_prompt
from rlhf_rollout.protocols import RolloutEngine, SamplingParams
from rlhf_rollout.weights.source import WeightSource

_BLOCK = 128  # tokens of vLLM's KV cache on a CPU; a chunk of Llama 4's attention is made of whole blocks
_LENGTHS = (7, 40, _BLOCK - 8)  # of prompts, beside the shortest one that vLLM answers as it should
_TIMEOUT_S = 300.0  # of an engine's start and answers
_CHANGES = (0.0, 0.0, 0.05)  # of the weights: none at the start, the same weights are sent, then others

Answers = list[tuple[list[int], Tensor]]  # each prompt with its answer, and the log-probs of the answer


@dataclass(frozen=True, slots=True)
class Gap:
    """Differences of log-probs from plain transformers in float32, in nats.

    Attributes:
        largest, mean: of the engine.
        own_largest, own_mean: of plain transformers in the engine's data type, which says how near an engine can be.
    """

    largest: float
    mean: float
    own_largest: float
    own_mean: float


def gaps(family: str, dtype: str = "float32", *, saved: bool = False) -> list[Gap]:
    """Return the differences at the start, after the same weights and after others.

    With `saved`, the model is one that was loaded, changed and saved as a trained one is.
    Engine and model run on a GPU if there is one.
    """
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch, "made")
        write_tiny(family, made)
        _widen_chunks(made / "config.json")
        actor = load_actor(made, dtype=dtype)
        _change(actor.model, 0.02)
        folder = save_hf(actor, None, load_tokenizer(made), Path(scratch, "saved")) if saved else made
        # In a process of its own, because vLLM may end it, and may change the classes of transformers there.
        with ProcessPoolExecutor(1, mp_context=forked_context("vllm_preload")) as other:
            answers = other.submit(_answers, folder, dtype).result()
        return _compared(folder, dtype, answers)


def _widen_chunks(file: Path) -> None:
    def widened(fields: dict[str, Any]) -> dict[str, Any]:
        return fields | ({"attention_chunk_size": _BLOCK} if fields.get("attention_chunk_size") else {})

    file.write_text(json.dumps(json.loads(file.read_text(), object_hook=widened)))


def _answers(folder: Path, dtype: str) -> list[Answers]:
    """Return what vLLM answers after each of the changes."""
    faulthandler.dump_traceback_later(_TIMEOUT_S, exit=True)  # an engine that does not answer
    spec = EngineSpec(
        model=str(folder),
        dtype=dtype,
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=256,
        # Several engines may start at the same time on a GPU.
        **({"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 1 << 28} if torch.cuda.is_available() else {}),
    )
    actor = load_actor(folder, dtype=dtype, max_length=spec.max_model_len)
    engine = build_engine("vllm", spec)
    lengths = (shortest_prompt(json.loads((folder / "config.json").read_text())), *_LENGTHS)
    prompts = [np.arange(3, 3 + length, dtype=np.int32) for length in lengths]
    try:
        sender = WeightSource("shared_memory", bucket_bytes=100_000)
        found = []
        for version, size in enumerate(_CHANGES):
            _change(actor.model, size)
            if version:
                sender.send(hf_named_weights(actor), [engine], version, ["the engine"])
            found.append(_ask(engine, prompts))
        return found
    finally:
        asyncio.run(engine.close())


def _ask(engine: RolloutEngine, prompts: list[np.ndarray]) -> Answers:
    async def all_at_once() -> Any:
        params = SamplingParams(max_tokens=16, seed=3)
        return await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts))

    pairs = [(prompt, group[0]) for prompt, group in zip(prompts, asyncio.run(all_at_once()), strict=True)]
    return [
        (np.concatenate([prompt, completion.token_ids]).tolist(), torch.tensor(completion.logprobs))
        for prompt, completion in pairs
    ]


@torch.no_grad()
def _change(model: Any, size: float) -> None:
    generator = torch.Generator().manual_seed(7)
    for weight in model.parameters():
        weight.add_(torch.randn(weight.shape, generator=generator), alpha=size)


def _compared(folder: Path, dtype: str, answers: list[Answers]) -> list[Gap]:
    model, _ = plain_model(folder, getattr(torch, dtype))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = []
    for size, answered in zip(_CHANGES, answers, strict=True):
        _change(model, size)
        sequences = [sequence for sequence, _ in answered]
        exact = logprobs_of(copy.deepcopy(model).float().to(device), sequences)
        own = logprobs_of(copy.deepcopy(model).to(device), sequences)
        told = [logprobs for _, logprobs in answered]
        engine, trainer = (
            torch.cat([few - values[-len(few) :].cpu() for few, values in zip(ends, exact, strict=True)]).abs()
            for ends in (told, [values[-len(few) :].cpu() for few, values in zip(told, own, strict=True)])
        )
        found.append(Gap(*(float(value) for value in (engine.max(), engine.mean(), trainer.max(), trainer.mean()))))
    return found


def main() -> None:
    """Print a line with the largest differences; in another data type than float32, also the others of `Gap`."""
    line = argparse.ArgumentParser(description=__doc__)
    line.add_argument("family")
    line.add_argument("--dtype", default="float32")
    line.add_argument("--saved", action="store_true", help="start vLLM with a saved folder")
    args = line.parse_args()
    found = gaps(args.family, args.dtype, saved=args.saved)
    print("gaps:", *(f"{gap.largest:.0e}" for gap in found))
    if args.dtype != "float32":
        names = ("mean", "own_largest", "own_mean")
        print(*(f"{name}: {' '.join(f'{getattr(gap, name):.0e}' for gap in found)}" for name in names), sep="; ")


if __name__ == "__main__":
    main()
