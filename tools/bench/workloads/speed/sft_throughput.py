"""Tokens per second of supervised fine-tuning, padded and packed, and the share of the GPU's peak in use.

    python tools/bench/run.py sft_throughput --shape qwen2-0.5b --lengths gsm8k/train.jsonl --out sft_throughput.json

Trains all weights of a random model. The lengths of its sequences come from the rows of a file with `question` and
`answer`, at three characters per token. The layouts take turns on one machine in one run, with the same examples in the
same order: padded to the longest of `--micro_batch_size` rows, and packed to `--pack_tokens` tokens per pass.

Floating-point operations, forward and backward, are counted per token: 6 per weight of the layers, 6 per weight of the
head if the token is trained, and 12 x layers x width per earlier token of its sequence for attention. Recomputation
does not count. "model_flops_utilisation" is their share of 989 TFLOP/s, the H200's peak in bfloat16 without sparsity.
"model_flops_utilisation_of_every_token" counts the head for untrained tokens as well, as is usual (Chowdhery et al.
2022, PaLM, appendix B), although they do not reach the head here.

"products_alone" is the share that the same GPU reaches in the same run when it computes only the matrix products of the
layers' weights, with inputs of a pack's size. It is the practical bound: no GPU sustains its peak, and GPUs differ.
"""

import itertools
import json
import math
import statistics
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from models import SHAPES, layer_products, peak_of, place, products_seconds, random_model
from rlhf_data.examples.sft import SftExample
from rlhf_models.loading import load_actor
from rlhf_rollout.host import free_port
from rlhf_train.offline.epochs import OfflineSchedule
from rlhf_train.offline.job import OfflineJob, run_offline
from rlhf_train.offline.objectives.supervised import SupervisedObjective
from rlhf_train.run.observer import Observer
from rlhf_train.specs import ModelSpec, OptimizerSpec
from runner import progress

FLAGS = {
    "lengths": {"type": Path, "required": True, "help": "file of rows that give the lengths"},
    "batch_size": 256,
    "micro_batch_size": 32,
    "pack_tokens": [8192],
    "no_padded": (False, "leave the padded layout out"),
    "steps": 8,
    "warmup": (2, "steps that are left out of medians"),
    "zero_stage": 0,
    "repeats": (2, "runs of each layout"),
    "shape": {"choices": SHAPES, "default": "tiny"},
    "torch_compile": {"choices": ["auto", "on", "off"], "default": "auto"},
}
PEAK_FLOPS = 989e12  # per second, H200, bfloat16
CHARACTERS_PER_TOKEN = 3


def read_examples(path: Path, count: int) -> list[SftExample]:
    """Return `count` examples of random tokens, with the lengths of the file's rows. Rows repeat if there are fewer."""
    rng = np.random.default_rng(0)
    examples = []
    rows = itertools.cycle(path.read_text(encoding="utf-8").rstrip().split("\n"))
    for number, line in enumerate(itertools.islice(rows, count)):
        row = json.loads(line)
        prompt, answer = (len(row[key]) // CHARACTERS_PER_TOKEN + 1 for key in ("question", "answer"))
        mask = np.arange(prompt + answer) >= prompt
        examples.append(SftExample(f"row{number}", rng.integers(300, 500, prompt + answer), mask))
    return examples


def flops(
    examples: Sequence[SftExample], shape: Mapping[str, float], num_layer_weights: int, *, every_token: bool
) -> float:
    """Return the operations per token of a pass over the examples, forward and backward.

    Args:
        examples: trained once each.
        shape: fields of the model's config.
        num_layer_weights: weights of all layers.
        every_token: count the head for every token and not only for trained ones.
    """
    head = shape.get("vocab_size", 0) * shape.get("hidden_size", 0)
    attention = shape.get("num_hidden_layers", 0) * shape.get("num_attention_heads", 0) * shape.get("head_dim", 0)
    total = 0.0
    for example in examples:
        length = example.num_tokens
        through_head = length if every_token else int(example.loss_mask.sum())
        total += 6 * num_layer_weights * length + 6 * head * through_head + 6 * attention * length**2
    return total / sum(example.num_tokens for example in examples)


class Keeper(Observer):
    """Keeps the seconds and tokens of every update."""

    def __init__(self) -> None:
        self.updates: list[Mapping[str, float]] = []

    def update(self, update: int, num_updates: int, metrics: dict[str, float]) -> None:
        """See `Observer`."""
        self.updates.append(metrics)


def train(
    options: Namespace, model: str, examples: Sequence[SftExample], pack_tokens: int | None, folder: Path
) -> dict[str, Any]:
    """Train on the examples, packed to `pack_tokens`, or padded if it is None. Return medians without the warm-up."""
    here = place()
    keeper = Keeper()
    job = OfflineJob(
        objective=SupervisedObjective(),
        model=ModelSpec(
            path=model,
            dtype=here.dtype_name,
            packing=pack_tokens is not None,
            zero_stage=options.zero_stage,
            torch_compile=options.torch_compile,
            optimizer=OptimizerSpec(learning_rate=1e-6, scheduler="constant"),
        ),
        examples=examples,
        schedule=OfflineSchedule(
            train_batch_size=options.batch_size,
            micro_train_batch_size=options.micro_batch_size,
            micro_batch_tokens=pack_tokens,
        ),
        model_path=folder / "trained",
        master=("127.0.0.1", free_port()),
        device=here.device.type,
    )
    if here.device.type == "cuda":
        torch._dynamo.reset()
        peak_gib = peak_of(lambda: run_offline(job, keeper)) / 2**30
    else:
        run_offline(job, keeper)
        peak_gib = None
    steps = keeper.updates[options.warmup :]
    return {
        "layout": f"packed, {pack_tokens} tokens" if pack_tokens else f"padded, {options.micro_batch_size} rows",
        "tokens_a_second": statistics.median(step["throughput/tokens"] for step in steps),
        "seconds_a_step": statistics.median(step["time/update"] for step in steps),
        "peak_memory_gib": peak_gib,
        "num_steps": len(steps),
    }


def measure(options: Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Measure all layouts in turn."""
    on_gpu = torch.cuda.is_available()
    examples = read_examples(options.lengths, options.batch_size * options.steps)
    path = random_model(options.shape, folder / "model")
    model = load_actor(path, dtype="float32")
    num_layer_weights = sum(weight.numel() for name, weight in model.named_parameters() if ".layers." in name)
    products = layer_products(model)
    del model
    runs = []
    for tokens in [*([] if options.no_padded else [None]), *options.pack_tokens] * options.repeats:
        run = train(options, path, examples, tokens, folder)
        for ending, every_token in (("", False), ("_of_every_token", True)):
            operations = flops(examples, SHAPES[options.shape], num_layer_weights, every_token=every_token)
            share = run["tokens_a_second"] * operations / PEAK_FLOPS
            run[f"model_flops_utilisation{ending}"] = share if on_gpu else None
        progress(run)
        runs.append(run)
    best: dict[str, float] = {}
    for run in runs:
        best[run["layout"]] = max(run["tokens_a_second"], best.get(run["layout"], 0.0))
    padded = best.pop(f"padded, {options.micro_batch_size} rows", None)
    operations = 6 * sum(map(math.prod, products))
    alone = {
        tokens: tokens * operations / products_seconds([(shape, tokens) for shape in products]) / PEAK_FLOPS
        for tokens in (options.pack_tokens if on_gpu else ())
    }
    yield {
        "mean_tokens": sum(example.num_tokens for example in examples) / len(examples),
        "products_alone": alone or None,
        "packed_over_padded": {name: speed / padded for name, speed in best.items()} if padded else None,
        "runs": runs,
    }
