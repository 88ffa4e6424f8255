"""Measure what shared prompts change in a training pass: seconds and memory.

    python tools/bench/shared_prompts.py --shape qwen2-0.5b --response_tokens 512 --out shared_prompts.json

A random model with compiled layers runs forward and backward over one pack of `--prompts` prompts with `--samples`
responses each, whose tokens are trained with the fused policy loss. The pack has one copy of the prompt for each
response, or shares it. The two take turns; seconds are medians. Before anything is timed, the log-probs of both are
compared.

"share_of_products" says which part of a pass's seconds the matrix products of its weights take when the same GPU
computes nothing else, in the same run: a practical bound, because no GPU sustains its peak.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from products import products_seconds
from rlhf_kernels import PolicyObjective, PolicyStream
from rlhf_models.actor import Actor
from rlhf_models.batch import TokenBatch
from rlhf_models.fast.compiled import compile_layers, compile_unavailable_reason
from rlhf_models.loading import load_actor
from runner import arguments, write
from shapes import SHAPES, random_model

MAX_GAP = 0.05  # nats, of the mean of absolute differences between log-probs in bfloat16


def packs(options: argparse.Namespace, device: torch.device) -> dict[str, TokenBatch]:
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
    stream = PolicyStream(
        advantages=torch.linspace(-1, 1, count, device=batch.input_ids.device),
        loss_mask=torch.ones(count, dtype=torch.bool, device=batch.input_ids.device),
        cu_seqlens=torch.as_tensor(bounds, device=batch.input_ids.device),
        num_tokens=count,
        num_sequences=len(batch.lengths),
    )
    for weight in actor.parameters():
        weight.grad = None
    output = actor(batch, logits_mask=mask, stream=stream, objective=PolicyObjective())
    output.loss.backward()
    return output.logprobs[mask.to(output.logprobs.device)]


def seconds_of(actor: Actor, batch: TokenBatch, prompt_tokens: int) -> float:
    """Return the seconds of both passes, with the device idle before and after."""
    synchronize = torch.cuda.synchronize if batch.input_ids.is_cuda else lambda: None
    synchronize()
    started = time.perf_counter()
    run(actor, batch, prompt_tokens)
    synchronize()
    return time.perf_counter() - started


def products(actor: Actor, num_tokens: int, num_targets: int) -> list[tuple[torch.Size, int]]:
    """Return the products of a pass (`products_seconds`) over so many tokens, of which `num_targets` reach the head."""
    layers = [weight.shape for name, weight in actor.named_parameters() if ".layers." in name and weight.ndim == 2]
    return [(shape, num_tokens) for shape in layers] + [(actor.model.lm_head.weight.shape, num_targets)]


def measure(actor: Actor, batches: dict[str, TokenBatch], options: argparse.Namespace) -> dict[str, Any]:
    """Return seconds, memory and the ratio of both packs."""
    logprobs = {name: run(actor, batch, options.prompt_tokens) for name, batch in batches.items()}
    gap = float((logprobs["copies"] - logprobs["shared"]).abs().mean())
    if not gap < MAX_GAP:
        raise RuntimeError(f"log-probs of shared prompts are {gap} nats off in the mean")
    report: dict[str, Any] = {"logprob_gap_mean": gap}
    peaks = {}
    for name, batch in batches.items():
        if batch.input_ids.is_cuda:
            torch.cuda.reset_peak_memory_stats()
            run(actor, batch, options.prompt_tokens)
            peaks[name] = torch.cuda.max_memory_allocated()
    times: dict[str, list[float]] = {name: [] for name in batches}
    for _ in range(options.rounds):
        for name, batch in batches.items():
            times[name].append(seconds_of(actor, batch, options.prompt_tokens))
    for name, batch in batches.items():
        stored = batch.input_ids if batch.shared is None else batch.shared.input_ids
        report[name] = {
            "tokens_in_layers": stored.shape[1],
            "seconds": statistics.median(times[name]),
            "seconds_range": [min(times[name]), max(times[name])],
            "peak_bytes": peaks.get(name),
        }
        if batch.input_ids.is_cuda:
            seconds = products_seconds(products(actor, stored.shape[1], len(logprobs[name])))
            report[name] |= {"products_seconds": seconds, "share_of_products": seconds / report[name]["seconds"]}
    report["seconds_ratio"] = report["shared"]["seconds"] / report["copies"]["seconds"]
    report["tokens_ratio"] = report["shared"]["tokens_in_layers"] / report["copies"]["tokens_in_layers"]
    return report


def main() -> None:
    """Measure and write the report."""
    parser = arguments(
        __doc__,
        prompts=2,
        samples=8,
        prompt_tokens=256,
        response_tokens=512,
        rounds=15,
        attn_implementation=("auto", "of packed sequences, such as rlhf_packed_4"),
    )
    parser.add_argument("--shape", choices=SHAPES, default="qwen2-0.5b")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as folder:
        path = random_model(options.shape, Path(folder))
        dtype = "bfloat16" if device.type == "cuda" else "float32"
        actor = (
            load_actor(path, dtype=dtype, packing=True, attn_implementation=options.attn_implementation)
            .to(device)
            .train()
        )
    if compile_unavailable_reason(actor.model, device) is None:
        compile_layers(actor.model)
    result = measure(actor, packs(options, device), options)
    write(options, "shared_prompts", result)
    for name in ("copies", "shared"):
        own = result[name]
        share = f", products alone {own['share_of_products']:.2f} of it" if "share_of_products" in own else ""
        print(f"{name:<8} {own['tokens_in_layers']:8} tokens {own['seconds'] * 1e3:9.2f} ms{share}")
    print(f"ratio    {result['tokens_ratio']:8.3f} tokens {result['seconds_ratio']:9.3f} seconds")


if __name__ == "__main__":
    main()
