"""The offline trainers learn: the benchmark of them on one seed, four trainers, fewer rows and smaller batches."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "tools/bench"
# Rows by trainer. Those of `kto` have one answer, half of a pair.
NUM_ROWS = {"sft": 640, "kto": 640, "rm": 448, "dpo": 448}

Rows = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def rows(words: list[str], tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """The benchmark's rows by trainer."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCH)
        from workloads.learning import offline

        patch.setattr(offline, "COMMAND", words)
        for name, number in NUM_ROWS.items():
            flags = f"--max_samples {number} --train_batch_size 32 --micro_train_batch_size 32".split()
            options = Namespace(only=[name], seeds=[1], jobs=1, real_data=None, flags=flags)
            [report] = offline.measure(options, tmp_path_factory.mktemp(name))
            [found[name]] = report["table"]
    return found


def test_fine_tuning_makes_held_out_answers_likelier(rows: Rows):
    assert rows["sft"]["after"]["loss"] < 0.5 * rows["sft"]["before"]["loss"]


def test_reward_model_orders_held_out_pairs_better_than_chance(rows: Rows):
    assert rows["rm"]["before"]["accuracy"] == 0.5
    assert rows["rm"]["after"]["accuracy"] > 0.8  # of 256 pairs: chance would be 0.5 with a deviation of 0.03


@pytest.mark.parametrize("name", ["dpo", "kto"])
def test_preferred_answers_gain_on_the_others(rows: Rows, name: str):
    assert rows[name]["before"]["margin"] == 0  # against the reference that it starts as
    assert rows[name]["after"]["margin"] > 0.3
