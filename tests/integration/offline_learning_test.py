"""The offline trainers learn: the benchmark of them on one seed, four trainers, fewer rows and smaller batches."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

TOOL = Path(__file__).parents[2] / "tools/bench/run.py"
TIMEOUT_S = 600
BATCH = "--train_batch_size 32 --micro_train_batch_size 32"
# Trainers and their flags, in halves of about the same time. Rows of `kto` have one answer, half of a pair.
HALVES = {("sft", "kto"): f"--max_samples 640 {BATCH}", ("rm", "dpo"): f"--max_samples 448 {BATCH}"}

Rows = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """The benchmark's rows by trainer: two trainers run at a time, because each keeps one core busy."""
    folder = tmp_path_factory.mktemp("offline")
    with ThreadPoolExecutor(len(HALVES)) as pool:
        tables = list(pool.map(lambda names: benchmark(names, HALVES[names], folder / f"{names[0]}.json"), HALVES))
    return {row["name"]: row for table in tables for row in table}


def benchmark(names: tuple[str, ...], flags: str, out: Path) -> list[dict[str, Any]]:
    """Run the benchmark of some trainers with further flags; return its table."""
    words = ["--seeds", "1", "--only", *names, "--out", str(out), "--", *flags.split()]
    command = [sys.executable, str(TOOL), "offline", *words]
    # Bazel's Python does not look beside a script for what it imports.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TOOL.parent), *filter(None, sys.path)])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return json.loads(out.read_text(encoding="utf-8"))["table"]


def test_fine_tuning_makes_held_out_answers_likelier(rows: Rows):
    assert rows["sft"]["after"]["loss"] < 0.5 * rows["sft"]["before"]["loss"]


def test_reward_model_orders_held_out_pairs_better_than_chance(rows: Rows):
    assert rows["rm"]["before"]["accuracy"] == 0.5
    assert rows["rm"]["after"]["accuracy"] > 0.8  # of 256 pairs: chance would be 0.5 with a deviation of 0.03


@pytest.mark.parametrize("name", ["dpo", "kto"])
def test_preferred_answers_gain_on_the_others(rows: Rows, name: str):
    assert rows[name]["before"]["margin"] == 0  # against the reference that it starts as
    assert rows[name]["after"]["margin"] > 0.3
