"""The report of a large run: seconds and memory to write the page, and its size.

    python tools/bench/run.py large_report --out large-report.json

The run is made up: groups of 8 responses as in `records`, the same in each step, in columns, with the values that a
trainer records for each token. `rlhf report` then runs as a process of its own with its default limits.
"""

import resource
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_rollout.records_io import RolloutWriter
from rlhf_train.tracing.token_values import COLUMNS, TokenValues, halves, write_values
from workloads.speed.records import made_up_groups

FLAGS = {"steps": 200, "groups": (128, "of 8 responses, per step"), "response_tokens": 1000}


def write_run(folder: Path, options: Namespace) -> int:
    """Write the folder of a run; return its number of sampled tokens."""
    folder.mkdir()
    groups = made_up_groups(options.groups, options.response_tokens)
    ids = [rollout.rollout_id for group in groups for rollout in group.rollouts]
    counts = np.full(len(ids), options.response_tokens)
    rng = np.random.default_rng(1)
    values = TokenValues(ids, counts, {name: halves(rng.normal(size=counts.sum())) for name in COLUMNS})
    writer = RolloutWriter(folder / "rollouts.columns")
    for step in range(1, options.steps + 1):
        writer.write(*groups, step=step, kept=True)
        write_values(folder / "token_values", step, [values])
    writer.close()
    lines = (f'{{"step": {step}, "rollout/reward": 0.5}}\n' for step in range(1, options.steps + 1))
    (folder / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
    return options.steps * int(counts.sum())


def measure(options: Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Write the run, then its page."""
    run = folder / "run"
    num_tokens = write_run(run, options)
    page = folder / "report.html"
    start = time.monotonic()
    command = [sys.executable, "-m", "rlhf_cli.main", "report", str(run), "--output_path", str(page)]
    subprocess.run(command, check=True)
    seconds = time.monotonic() - start
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    yield {
        "num_rollouts": options.steps * options.groups * 8,
        "num_tokens": num_tokens,
        "size_bytes": sum(path.stat().st_size for path in run.rglob("*") if path.is_file()),
        "seconds": seconds,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "peak_mib": usage.ru_maxrss / 1024,
        "page_bytes": page.stat().st_size,
    }
