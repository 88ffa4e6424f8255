"""The memory that `rlhf plan` tells, against the measured peaks of the reports of online runs."""

import json
from pathlib import Path

import pytest

from models import SHAPES
from rlhf_cli.commands.plan import Planner, PlanSection
from rlhf_models.loading import load_config
from rlhf_train.memory import Model, Passes, trainer_memory
from rlhf_train.specs import ModelSpec, OptimizerSpec

RESULTS = Path(__file__).parents[1] / "results"
PEAK = "memory/trainer_peak_bytes"
# The estimate takes every response for as long as it may be. In these runs, few were; it was as much higher.
SHORTER = {
    "online-h100x2-tail-in-turn.json": 0.32,
    "online-h200-w1-tail.json": 0.10,
    "online-h200x2-tail-staleness-4.json": 0.29,
}
# In these runs, at ZeRO 3, the states of policy and critic were on the GPUs at the same time.
AT_ONCE = {
    "online-h100x2-7b-ppo-tp2.json",
    "online-h100x2-7b-ppo.json",
    "online-h200x4-seeds-7b.json",
    "online-h200x4-seeds.json",
}


def reports() -> dict[str, dict]:
    found = {path.name: json.loads(path.read_text()) for path in sorted(RESULTS.glob("online-*.json"))}
    return {name: report for name, report in found.items() if PEAK in report.get("end", {})}


def model_folder(shape: str, folder: Path) -> Path:
    """Write the config of a model of one of `SHAPES`; return its folder."""
    fields = {name: value for name, value in SHAPES[shape].items() if name != "tied"}
    fields |= {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    fields["tie_word_embeddings"] = SHAPES[shape].get("tied", True)
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text(json.dumps(fields))
    return folder / "model"


def planned_bytes(report: dict, folder: Path, *more: str) -> int:
    """Return the bytes of the training process that needs most, for the flags of a report and `more`."""
    options = report["options"]
    model = str(model_folder(options["shape"], folder))
    words = [*report["flags"].split(), "--pretrain", model, *more]
    words += ["--reward_pretrain", model] if options.get("reward_model") else []
    planned = Planner(PlanSection(gpu_memory_gb=140.0), folder)(words)
    return max(planned.memory.needs[kind.name].total for kind in planned.job.plan.trainers)


@pytest.mark.parametrize("name", reports())
def test_plan_meets_the_peaks_of_training_processes_within_ten_percent(name, tmp_path):
    report = reports()[name]
    more = ["--deepspeed_enable_sleep", "false"] if name in AT_ONCE else []
    ratio = planned_bytes(report, tmp_path, *more) / report["end"][PEAK]
    if name in SHORTER:
        assert report["options"]["mean_response_tokens"] < report["options"]["response_tokens"]
        assert ratio == pytest.approx(1 + SHORTER[name], abs=0.02)
    else:
        assert abs(ratio - 1) < 0.1


@pytest.mark.parametrize(("name", "way"), [("1.5b", "overlap"), ("7b", "layers"), ("7b-8k", "layers")])
def test_peaks_of_passes_at_zero_3_are_met_within_ten_percent(name, way, tmp_path):
    """These reports are of one model on two GPUs, before its first update: it has no moments yet."""
    report = json.loads((RESULTS / f"zero3-h100x2-{name}.json").read_text())
    words = report["command"].split()
    config = load_config(model_folder(words[words.index("--shape") + 1], tmp_path))
    num_tokens = int(words[words.index("--num_tokens") + 1])
    spec = ModelSpec(
        path="",
        dtype="bfloat16",
        zero_stage=3,
        gradient_checkpointing=True,
        packing=True,
        optimizer=OptimizerSpec(learning_rate=1e-6),
    )
    passes = Passes(train=(num_tokens, num_tokens), forward=(0, 0), most_targets=num_tokens)
    need = trainer_memory([Model(config, spec, runs_forward=False)], passes, report["num_ranks"])
    assert (need.total - need.items["moments"]) / 2**30 == pytest.approx(report["ways"][way]["peak_gib"], rel=0.1)


def test_reports_are_of_three_sizes_on_one_to_four_gpus():
    found = reports()
    assert len(found) > 30
    assert {report["options"]["shape"] for report in found.values()} == {"qwen2-0.5b", "qwen2-1.5b", "qwen2-7b"}
    assert {len(report["environment"]["gpu"].splitlines()) for report in found.values()} == {1, 2, 4}
    assert found.keys() >= SHORTER.keys() | AT_ONCE
