"""Measure tokens per second of supervised fine-tuning, padded and packed, and the share of the GPU's peak in use.

    python tools/bench/sft_throughput.py --shape qwen2-0.5b --lengths gsm8k/train.jsonl --out sft_throughput.json

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

import argparse
import gc
import itertools
import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from products import products_seconds
from rlhf_data.examples.sft import SftExample
from rlhf_rollout.host import free_port
from rlhf_train.offline.epochs import OfflineSchedule
from rlhf_train.offline.job import OfflineJob, run_offline
from rlhf_train.offline.objectives.supervised import SupervisedObjective
from rlhf_train.run.observer import Observer
from rlhf_train.specs import ModelSpec, OptimizerSpec
from runner import arguments, write
from shapes import SHAPES, random_model

PEAK_FLOPS = 989e12  # per second, H200, bfloat16
CHARACTERS_PER_TOKEN = 3


def read_examples(path: Path, count: int) -> list[SftExample]:
    """Return `count` examples of random tokens, with the lengths of the file's rows. Rows repeat if there are fewer."""
    rng = np.random.default_rng(0)
    examples = []
    rows = itertools.cycle(path.read_text(encoding="utf-8").splitlines())
    for number, line in enumerate(itertools.islice(rows, count)):
        row = json.loads(line)
        prompt, answer = (len(row[key]) // CHARACTERS_PER_TOKEN + 1 for key in ("question", "answer"))
        mask = np.arange(prompt + answer) >= prompt
        examples.append(SftExample(f"row{number}", rng.integers(300, 500, prompt + answer), mask))
    return examples


def flops(
    examples: Sequence[SftExample], shape: Mapping[str, float], num_layer_weights: int, *, every_token: bool = False
) -> float:
    """Return the operations of one pass over the examples, forward and backward.

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
    return total


class Keeper(Observer):
    """Keeps the seconds and tokens of every update."""

    def __init__(self) -> None:
        self.updates: list[Mapping[str, float]] = []

    def update(self, update: int, num_updates: int, metrics: dict[str, float]) -> None:
        """See `Observer`."""
        self.updates.append(metrics)


def measure(
    options: argparse.Namespace, model: str, examples: Sequence[SftExample], pack_tokens: int | None
) -> dict[str, Any]:
    """Train on the examples, packed to `pack_tokens`, or padded if it is None. Return medians without the warm-up."""
    packing = pack_tokens is not None
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch._dynamo.reset()
        gc.collect()  # the previous engine is in a reference cycle, which keeps its memory until collected
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    keeper = Keeper()
    with tempfile.TemporaryDirectory() as folder:
        job = OfflineJob(
            objective=SupervisedObjective(),
            model=ModelSpec(
                path=model,
                dtype="bfloat16" if on_gpu else "float32",
                packing=packing,
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
            model_path=Path(folder, "model"),
            master=("127.0.0.1", free_port()),
            device="cuda" if on_gpu else "cpu",
        )
        run_offline(job, keeper)
    steps = keeper.updates[options.warmup :]
    return {
        "layout": f"packed, {pack_tokens} tokens" if packing else f"padded, {options.micro_batch_size} rows",
        "tokens_a_second": statistics.median(step["throughput/tokens"] for step in steps),
        "seconds_a_step": statistics.median(step["time/update"] for step in steps),
        "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
        "num_steps": len(steps),
    }


def main() -> None:
    """Measure both layouts, each twice, and write the report."""
    parser = arguments(
        __doc__,
        batch_size=256,
        micro_batch_size=32,
        pack_tokens=[8192],
        no_padded=(False, "leave the padded layout out"),
        steps=8,
        warmup=2,
        zero_stage=0,
        repeats=(2, "runs of each layout"),
    )
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--lengths", type=Path, required=True)
    parser.add_argument("--torch_compile", choices=["auto", "on", "off"], default="auto")
    options = parser.parse_args()
    shape = SHAPES[options.shape]
    padded = [] if options.no_padded else [None]
    examples = read_examples(options.lengths, options.batch_size * options.steps)
    with tempfile.TemporaryDirectory() as folder:
        model = random_model(options.shape, Path(folder, "model"))
        from rlhf_models.loading import load_actor

        names = dict(load_actor(model, dtype="float32").named_parameters())
        num_layer_weights = sum(weight.numel() for name, weight in names.items() if ".layers." in name)
        products = [weight.shape for name, weight in names.items() if ".layers." in name and weight.ndim == 2]
        runs = [
            measure(options, model, examples, tokens) for tokens in [*padded, *options.pack_tokens] * options.repeats
        ]
    num_tokens = sum(example.num_tokens for example in examples)
    for result in runs:
        for every_token in (False, True):
            name = "model_flops_utilisation" + "_of_every_token" * every_token
            operations = flops(examples, shape, num_layer_weights, every_token=every_token) / num_tokens
            share = result["tokens_a_second"] * operations / PEAK_FLOPS
            result[name] = share if torch.cuda.is_available() else None
        print(json.dumps(result), flush=True)
    best = {
        name: max(run["tokens_a_second"] for run in runs if run["layout"] == name)
        for name in {run["layout"] for run in runs}
    }
    padded_speed = best.pop(f"padded, {options.micro_batch_size} rows", None)
    alone = None
    if torch.cuda.is_available():
        operations = 6 * sum(shape.numel() for shape in products)
        alone = {
            tokens: tokens * operations / products_seconds([(shape, tokens) for shape in products]) / PEAK_FLOPS
            for tokens in options.pack_tokens
        }
    report = {
        "mean_tokens": num_tokens / len(examples),
        "products_alone": alone,
        "packed_over_padded": {name: speed / padded_speed for name, speed in best.items()} if padded_speed else None,
        "runs": runs,
    }
    write(options, "sft_throughput", report)
    print(f"packed / padded: {report['packed_over_padded']}; products alone: {alone}")


if __name__ == "__main__":
    main()
