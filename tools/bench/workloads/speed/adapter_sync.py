"""What `rlhf ppo --lora_rank N` costs with `--lora_sync adapter`, against merged weights.

    python tools/bench/run.py adapter_sync --out adapter-sync-cpu.json -- [FLAGS OF rlhf ppo]

Two runs differ in `--lora_sync` alone. Each report has medians over the steps after the first: bytes and seconds of a
weight sync, seconds of generation, and sampled tokens per second of it. It also has the largest gap, and the largest of
the steps' mean gaps, between the log-probs of engine and trainer.
"""

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from runner import MORE_FLAGS, progress, run_ppo

FLAGS = {"steps": (5, "of each run"), "rank": (16, "of the adapters"), "flags": MORE_FLAGS}
SYNCS = ("merge", "adapter")
MEDIANS = ("sync/size_bytes", "time/sync", "time/generate", "time/step")


def measure(options: Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Run both, and report each when it has ended."""
    found: dict[str, Any] = {}
    for sync in SYNCS:
        flags = ["--lora_rank", str(options.rank), "--lora_sync", sync, "--train_steps", str(options.steps)]
        steps = run_ppo([*flags, *options.flags], folder / sync).steps
        later = steps[1:]
        tokens = [step["rollout/response_tokens"] * step["samples/generated"] / step["time/generate"] for step in later]
        found[sync] = {name: median(step[name] for step in later) for name in MEDIANS} | {
            "tokens_per_s": median(tokens),
            "logprob_gap_max": max(step["mismatch/logprob_gap_max"] for step in steps),
            "logprob_gap_mean": max(step["mismatch/logprob_gap_mean"] for step in steps),
        }
        progress({sync: found[sync]})
        yield {"measured": found}
