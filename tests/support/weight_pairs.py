"""An engine and the model whose weights it is to have: what the engine draws, and how far it is from the model."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from rlhf_rollout.protocols import Completion, RolloutEngine, SamplingParams

PROMPTS = [np.arange(3, 3 + length, dtype=np.int32) for length in (1, 7, 40)]


def generate(engine: RolloutEngine, **sampling: Any) -> list[list[Completion]]:
    """Return what the engine draws for `PROMPTS`, by default 2 samples of at most 24 tokens each."""

    async def all_at_once() -> Any:
        params = SamplingParams(**({"num_samples": 2, "max_tokens": 24, "seed": 3} | sampling))
        return await asyncio.gather(*(engine.generate(prompt, params) for prompt in PROMPTS))

    return asyncio.run(all_at_once())


def ask_receiver(engine: Any, function: Callable[[Any], Any]) -> Any:
    """Run `function` with the receiving half of an engine's weight sync, on the thread that owns it."""

    def run(core: Any) -> Any:
        return function(core.engine_core.model_executor.driver_worker.worker.weight_transfer_engine)

    return engine._loop.call(run, drain=False).result(60)


@torch.no_grad()
def largest_difference(model: Any, groups: Sequence[Sequence[Completion]], temperature: float = 1.0) -> float:
    """Return the largest distance between the engine's log-probs of its completions and the model's, in nats."""
    largest = 0.0
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for completion in group:
            tokens = torch.tensor(np.concatenate([prompt, completion.token_ids]), dtype=torch.long)[None]
            logprobs = (model(tokens).logits[0] / temperature).log_softmax(-1)
            expected = logprobs[len(prompt) - 1 : -1].gather(1, tokens[0, len(prompt) :, None])[:, 0]
            largest = max(largest, float((torch.tensor(completion.logprobs) - expected).abs().max()))
    return largest


@torch.no_grad()
def perturb(model: torch.nn.Module, seed: int) -> None:
    """Change all weights of a model."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype), alpha=0.05)
