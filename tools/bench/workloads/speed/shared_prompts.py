"""What shared prompts change in a training pass: seconds and memory.

    python tools/bench/run.py shared_prompts --shape qwen2-0.5b --response_tokens 512 --out shared_prompts.json

A random model with compiled layers runs forward and backward over one pack of `--prompts` prompts with `--samples`
responses each, whose tokens are trained with the fused policy loss. The pack has one copy of the prompt for each
response, or shares it. The two take turns; seconds are medians. Before anything is timed, the log-probs of both are
compared.

"share_of_products" says which part of a pass's seconds the matrix products of its weights take when the same GPU
computes nothing else, in the same run: a practical bound, because no GPU sustains its peak.
"""

from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from models import SHAPES, in_turn, layer_products, peak_of, place, products_seconds, random_model
from rlhf_kernels import PolicyObjective, PolicyStream
from rlhf_models.actor import Actor
from rlhf_models.batch import TokenBatch
from rlhf_models.fast.compiled import compile_layers, compile_unavailable_reason
from rlhf_models.loading import load_actor

FLAGS = {
    "prompts": 2,
    "samples": 8,
    "prompt_tokens": 256,
    "response_tokens": 512,
    "rounds": 15,
    "attn_implementation": ("auto", "of packed sequences, such as rlhf_packed_4"),
    "shape": {"choices": SHAPES, "default": "qwen2-0.5b"},
}
MAX_GAP = 0.05  # nats, of the mean of absolute differences between log-probs in bfloat16


def packs(options: Namespace, device: torch.device) -> dict[str, TokenBatch]:
    """Return the same sequences as a pack of copies and as one with shared prompts."""
    draw = np.random.default_rng(0)
    prompts = [draw.integers(3, 500, options.prompt_tokens) for _ in range(options.prompts)]
    rows = [
        np.concatenate([prompt, draw.integers(3, 500, options.response_tokens)])
        for prompt in prompts
        for _ in range(options.samples)
    ]
    lengths = [options.prompt_tokens] * len(rows)
    return {
        "copies": TokenBatch.packed(rows, device),
        "shared": TokenBatch.packed(rows, device, prompt_lengths=lengths),
    }


def run(actor: Actor, batch: TokenBatch, prompt_tokens: int) -> torch.Tensor:
    """Run both passes over a pack; return the log-probs of all responses."""
    mask = batch.lay_out([np.arange(length) >= prompt_tokens for length in batch.lengths], torch.bool, device="cpu")
    count = int(mask.sum())
    bounds = np.cumsum([0, *(length - prompt_tokens for length in batch.lengths)])
    device = batch.input_ids.device
    stream = PolicyStream(
        advantages=torch.linspace(-1, 1, count, device=device),
        loss_mask=torch.ones(count, dtype=torch.bool, device=device),
        cu_seqlens=torch.as_tensor(bounds, device=device),
        num_tokens=count,
        num_sequences=len(batch.lengths),
    )
    actor.zero_grad()
    output = actor(batch, logits_mask=mask, stream=stream, objective=PolicyObjective())
    output.loss.backward()
    return output.logprobs[mask.to(device)]


def measure(options: Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Compare both packs, and time them in turn."""
    here = place()
    path = random_model(options.shape, folder / "model")
    attention = {"packing": True, "attn_implementation": options.attn_implementation}
    actor = load_actor(path, dtype=here.dtype_name, **attention).to(here.device).train()
    if compile_unavailable_reason(actor.model, here.device) is None:
        compile_layers(actor.model)
    batches = packs(options, here.device)
    passes = {name: partial(run, actor, batch, options.prompt_tokens) for name, batch in batches.items()}
    logprobs = {name: call() for name, call in passes.items()}
    gap = float((logprobs["copies"] - logprobs["shared"]).abs().mean())
    if not gap < MAX_GAP:
        raise RuntimeError(f"log-probs of shared prompts are {gap} nats off in the mean")
    found = in_turn(passes, options.rounds)
    for name, batch in batches.items():
        stored = batch.input_ids if batch.shared is None else batch.shared.input_ids
        found[name] |= {"tokens_in_layers": stored.shape[1], "peak_bytes": peak_of(passes[name])}
        if here.device.type == "cuda":
            products = [(shape, stored.shape[1]) for shape in layer_products(actor)]
            products.append((tuple(actor.model.lm_head.weight.shape), len(logprobs[name])))
            seconds = products_seconds(products)
            found[name] |= {"products_seconds": seconds, "share_of_products": seconds / found[name]["seconds"]}
    copies, shared = found["copies"], found["shared"]
    yield {
        "logprob_gap_mean": gap,
        **found,
        "seconds_ratio": shared["seconds"] / copies["seconds"],
        "tokens_ratio": shared["tokens_in_layers"] / copies["tokens_in_layers"],
    }
