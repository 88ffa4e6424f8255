"""Updates on long sequences, whose tokens several GPUs divide by sequence parallelism.

    python tools/bench/run.py long_context --shape qwen2-7b --num_tokens 32768 --ranks 1 2 --out long_context.json

Supervised fine-tuning of all weights of a random model, one sequence per update and pass, with gradient checkpointing
and moments in bfloat16. The weights' states are sharded over the ranks (ZeRO 3) if there are several. Every number of
ranks gets the same sequences. "first_update" compares loss and gradient norm of the first update with those of the
first number of ranks.

Without a GPU the times mean nothing, but the script can be tried with `--shape tiny --num_tokens 256`.
"""

import os
import statistics
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from models import SHAPES, random_model
from rlhf_rollout.host import free_port, local_gpus
from runner import from_first_rank, progress

FLAGS = {
    "num_tokens": 32768,
    "ranks": [1, 2],
    "attn_implementation": ("auto", "of packed sequences, such as rlhf_packed_4"),
    "shape": {"choices": SHAPES, "default": "qwen2-7b"},
}
NUM_UPDATES = 4


def train(rank: int, num_ranks: int, options: Namespace, model: str, port: int, results: Connection | None) -> None:
    """Run one rank, and send the metrics of each update and this rank's peak of GPU memory."""
    on_gpu = local_gpus() > 0
    if on_gpu:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(num_ranks)))).split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[rank]
    import numpy as np
    import torch

    from rlhf_data.examples.sft import SftExample
    from rlhf_train.offline.epochs import OfflineSchedule
    from rlhf_train.offline.job import OfflineJob, run_offline
    from rlhf_train.offline.objectives.supervised import SupervisedObjective
    from rlhf_train.run.observer import Observer
    from rlhf_train.specs import ModelSpec, OptimizerSpec

    class Sender(Observer):
        """Sends the metrics of each update, which rank 0 alone has."""

        def update(self, update: int, num_updates: int, metrics: dict[str, float]) -> None:
            peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None
            results.send(metrics | {"peak_gib": peak})

    draw = np.random.default_rng(0)
    trained = np.arange(options.num_tokens) > 0
    examples = [
        SftExample(f"row{number}", draw.integers(300, 500, options.num_tokens), trained)
        for number in range(NUM_UPDATES)
    ]
    spec = ModelSpec(
        path=model,
        dtype="bfloat16" if on_gpu else "float32",
        packing=True,
        attn_implementation=options.attn_implementation,
        gradient_checkpointing=True,
        sequence_parallel_size=num_ranks,
        zero_stage=1 if num_ranks == 1 else 3,
        optimizer=OptimizerSpec(learning_rate=1e-6, scheduler="constant", bf16_moments=True),
    )
    job = OfflineJob(
        objective=SupervisedObjective(),
        model=spec,
        examples=examples,
        schedule=OfflineSchedule(train_batch_size=1, micro_train_batch_size=1),
        model_path=Path(model).with_name(f"trained{num_ranks}"),
        rank=rank,
        num_ranks=num_ranks,
        master=("127.0.0.1", port),
        device="cuda" if on_gpu else "cpu",
    )
    run_offline(job, Sender())


def summary(updates: Sequence[Mapping[str, float]], base: Mapping[str, float]) -> dict[str, Any]:
    """Return the figures of one number of ranks, whose first update is compared with `base`."""
    first = {name: updates[0][name] for name in ("sft/loss", "train/grad_norm")}
    return {
        "seconds": statistics.median(update["time/update"] for update in updates[1:]),
        "peak_gib": updates[-1]["peak_gib"],
        "first_update": {
            name: {"value": value, "relative_error": value / base[name] - 1} for name, value in first.items()
        },
        "updates": updates,
    }


def measure(options: Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Measure every number of ranks."""
    model = random_model(options.shape, folder / "model", max_position_embeddings=options.num_tokens)
    runs: dict[int, dict[str, Any]] = {}
    for num_ranks in options.ranks:
        updates = from_first_rank(train, num_ranks, NUM_UPDATES, num_ranks, options, model, free_port())
        base = next(iter(runs.values()))["updates"][0] if runs else updates[0]
        runs[num_ranks] = summary(updates, base)
        progress({"ranks": num_ranks, "seconds": runs[num_ranks]["seconds"]})
        yield {"ranks": runs}
