"""Ways of gathering weights and reducing gradients at ZeRO stage 3.

    python tools/bench/run.py zero3 --shape qwen2-7b --num_tokens 2048 --out zero3.json

Two ranks run forward and backward passes of a random model over `--num_tokens` tokens each, with gradient
checkpointing. "layers" is what `rlhf_train` does: whole layers at a time. "parts" is each matrix and norm by itself,
"overlap" is "layers" with `--overlap_comm`. "fast" and "compiled" are "overlap" with DeepSpeed's fast fetches of whole
layers, and with compiled layers (`--torch_compile on`). The ways take turns, each time in new processes. "seconds" is
the median of their passes without the first two of each process, "host_seconds" what the last process took to launch
them, and "ratio" the seconds over those of the first way. "loss" and "grad_norm" show whether all compute the same.
"""

import os
import statistics
import time
from argparse import Namespace
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from models import SHAPES, random_model
from rlhf_rollout.host import free_port, local_gpus
from runner import UsageError, from_first_rank

WAYS = ("parts", "layers", "overlap", "fast", "compiled")
FLAGS = {
    "num_tokens": 64,
    "passes": (10, "that are measured, in each process"),
    "turns": 2,
    "shape": {"choices": SHAPES, "default": "small"},
    "ways": {"nargs": "+", "choices": WAYS, "default": ["parts", "layers"]},
}
NUM_RANKS = 2
NUM_FIRST = 2  # passes that compile, allocate, and record the order of weights


def run_passes(rank: int, way: str, options: Namespace, model: str, port: int, outbox: Connection | None) -> None:
    """Run one rank. Send the seconds of each pass, and the results: loss, norm of the gradients, peak of GPU memory."""
    on_gpu = local_gpus() > 0
    if on_gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
    import torch

    from rlhf_models.batch import TokenBatch
    from rlhf_models.fast.compiled import compile_forwards
    from rlhf_models.loading import load_actor
    from rlhf_train.engine import deepspeed
    from rlhf_train.engine.process_group import init_process_group
    from rlhf_train.specs import OptimizerSpec

    device = "cuda" if on_gpu else "cpu"
    init_process_group(rank=rank, world_size=NUM_RANKS, master=("127.0.0.1", port), device=device)
    if way == "parts":
        deepspeed.layers_taken_whole = lambda model: []
    if way == "fast":
        configure = deepspeed._deepspeed_config

        def with_fetches(*arguments: Any) -> dict[str, Any]:
            config = configure(*arguments)
            config["zero_optimization"]["stage3_module_granularity_threshold"] = 1  # 1 chooses no layers by itself
            return config

        deepspeed._deepspeed_config = with_fetches
    dtype = torch.bfloat16 if on_gpu else torch.float32
    actor = load_actor(model, dtype=dtype, packing=True, gradient_checkpointing=True)
    if way == "compiled":
        compile_forwards(deepspeed.layers_taken_whole(actor))
    spec = OptimizerSpec(learning_rate=1e-6, scheduler="constant", bf16_moments=on_gpu)
    settings = {"dtype": dtype, "device": device, "overlap_comm": way in ("overlap", "fast", "compiled")}
    engine = deepspeed.DeepSpeedEngine(actor, spec, zero_stage=3, **settings)
    draw = torch.Generator().manual_seed(rank)
    tokens = torch.randint(3, 200, (options.num_tokens,), generator=draw).numpy()
    batch = TokenBatch.packed([tokens], device)
    num_passes = NUM_FIRST + options.passes
    seconds = []
    host_seconds = []
    for number in range(num_passes):
        torch.distributed.barrier()
        started = time.perf_counter()
        loss = -engine.forward(batch).logprobs.mean()
        engine.backward(loss, is_last=number == num_passes - 1)
        host_seconds.append(time.perf_counter() - started)
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None
    found = {"loss": loss.item(), "grad_norm": engine.step().grad_norm, "peak_gib": peak}
    found["host_seconds"] = statistics.median(host_seconds[NUM_FIRST:])
    if outbox is not None:
        outbox.send((seconds[NUM_FIRST:], found))


def measure(options: Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Measure the ways in turn."""
    if "compiled" in options.ways and not local_gpus():
        raise UsageError("compiled layers need a GPU: packed attention has no kernel for the CPU")
    seconds: dict[str, list[float]] = {way: [] for way in options.ways}
    results: dict[str, dict[str, float | None]] = {}
    model = random_model(options.shape, folder / "model")
    for _ in range(options.turns):
        for way in options.ways:
            [(more, results[way])] = from_first_rank(run_passes, NUM_RANKS, 1, way, options, model, free_port())
            seconds[way] += more
    medians = {way: statistics.median(found) for way, found in seconds.items()}
    yield {
        "ways": {
            way: {
                "seconds": medians[way],
                "seconds_range": [min(found), max(found)],
                "ratio": medians[way] / medians[options.ways[0]],
                **results[way],
            }
            for way, found in seconds.items()
        },
    }
