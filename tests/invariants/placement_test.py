"""Where models run changes nothing of what they learn: together or in processes of their own, on one rank or on two,
also if ranks divide the tokens of each pass or the weights, with one engine or with two, to which weights are
broadcast."""

import asyncio
import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_models.checkpoint.files import write_fields
from rlhf_models.process_reward import StepFormat, StepJudge
from rlhf_models.testing import tiny_model_dir
from rlhf_rollout.rewards.sources import RewardSource
from rlhf_train.algorithms.table import make_algorithm
from rlhf_train.cluster.places import Place, PlacementPlan, ProcessPlan
from rlhf_train.generation.run_spec import RewardSpec
from rlhf_train.online import run_online
from rlhf_train.online_job import OnlineJob
from rlhf_train.run.observer import Observer
from trainer_testing import running_engine, tiny_job
from warm_commands import warm_commands

PLACES = {
    "together": {("actor", "critic", "reference", "teacher"): 1},
    "apart": {("actor",): 1, ("critic",): 2, ("reference", "teacher"): 1},
    "divided weights": {("actor", "reference"): 4, ("critic", "teacher"): 2},
}
ENGINES = {"together": 1, "apart": 2, "divided weights": 1}
LAYOUTS = {"divided weights": {"packing": True, "tensor_parallel_size": 2}}
SCORERS = ProcessPlan("reward", ("reward",), (Place(),))
# Adam's division by the gradient's own size turns rounding into steps; what is compared are means of a whole step.
TOLERANCE = 1e-4
COMPARED = (
    "policy/loss",
    "value/loss",
    "value/mean",
    "value/return",
    "policy/advantage_abs",
    "kl/teacher",
    "rollout/reward",
)


def plan_of(groups: dict[tuple[str, ...], int], num_engines: int) -> PlacementPlan:
    """All on CPUs."""
    placed = tuple(ProcessPlan("+".join(roles), roles, (Place(),) * ranks) for roles, ranks in groups.items())
    engines = ProcessPlan("engines", (), (Place(),) * num_engines)
    return PlacementPlan("cpu", (0,), placed, engines, True, scorers=SCORERS)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, tuple[list[dict[str, float]], np.ndarray]]:
    """The steps' metrics and the final embedding, by placement."""
    heads = {"num_key_value_heads": 2}
    model_path = str(tiny_model_dir(tmp_path_factory.mktemp("model"), **heads))
    teacher = str(tiny_model_dir(tmp_path_factory.mktemp("teacher"), seed=1, **heads))
    write_fields(Path(teacher), StepFormat(placeholder=0, good=10, bad=12).fields)
    folders = {name: tmp_path_factory.mktemp("run") for name in PLACES}
    plans = {name: plan_of(groups, ENGINES[name]) for name, groups in PLACES.items()}
    job = broadcasting(tiny_job(model_path, folders["together"]))
    with warm_commands(["worker"]), running_engine(job, num_engines=2) as engines:
        done = {
            name: run(model_path, teacher, folders[name], plan, LAYOUTS.get(name, {})) for name, plan in plans.items()
        }
        for engine, other in itertools.pairwise(engines):
            assert asyncio.run(engine.health()) == asyncio.run(other.health())  # both have the last weights
        return done


def broadcasting(job: OnlineJob) -> OnlineJob:
    """Return the job with weights that are broadcast to its engines."""
    return dataclasses.replace(job, engine=dataclasses.replace(job.engine, weight_transfer="nccl"))


def run(
    model_path: str, teacher: str, folder: Path, plan: PlacementPlan, layout: dict[str, Any]
) -> tuple[list[dict[str, float]], np.ndarray]:
    """Run the job as planned, with `layout` for all models; return the steps' metrics and the final embedding."""
    from safetensors.numpy import load_file

    spec = make_algorithm(kl_coef=0.05, bootstrap_truncated=True, gamma=0.99, lambd=0.9, teacher_coef=0.1)
    job = broadcasting(tiny_job(model_path, folder))
    models = {
        role: dataclasses.replace(
            model, optimizer=model.optimizer and dataclasses.replace(model.optimizer, eps=1e-4), **layout
        )
        for role, model in job.models.items()
    }
    models["teacher"] = dataclasses.replace(models["reference"], path=teacher)
    # The teacher also judges steps, which end with an "a".
    source = RewardSource(kind="model", targets=(teacher,))
    changes = {"reward": RewardSpec(sources=(source,), process_models=(teacher,), step_separator="a")}
    changes |= {"models": models, "algorithm": spec, "plan": plan, "num_frozen_steps": 1, "eval_prompts": ()}
    job = dataclasses.replace(job, **changes)
    run_online(job, Observer())
    lines = Path(job.save_path, "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [line for line in map(json.loads, lines) if "time/step" in line]
    check_steps(Path(job.save_path), teacher)
    [embedding] = [w for n, w in load_file(f"{job.save_path}/model/model.safetensors").items() if "embed" in n]
    return steps, embedding


def check_steps(folder: Path, teacher: str) -> None:
    """Check the rewards of steps in a run's rollouts against the model that judged them."""
    records = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text(encoding="utf-8").splitlines()]
    options = {"dtype": "float32", "attn_implementation": "auto", "device": "cpu", "batch_size": 1}
    samples = []
    for record in records:
        is_policy = [span["source"] == "policy" for span in record["spans"] for _ in range(span["num_tokens"])]
        samples.append((np.array(record["token_ids"]), np.array(is_policy)))
    for record, steps in zip(records, StepJudge(teacher, "a", **options)(samples), strict=True):
        assert [position for position, _ in record["token_rewards"]] == [position for position, _ in steps]
        assert [value for _, value in record["token_rewards"]] == pytest.approx([value for _, value in steps])
        assert record["reward"] == pytest.approx(sum(value for _, value in steps))
    assert max(len(record["token_rewards"]) for record in records) > 1


@pytest.mark.parametrize("name", [name for name in PLACES if name != "together"])
def test_models_learn_what_models_together_learn(runs, name):
    (steps, embedding), (expected_steps, expected) = runs[name], runs["together"]
    assert len(steps) == len(expected_steps) == 3
    for step, other in zip(steps, expected_steps, strict=True):
        assert ("policy/loss" in step) == ("policy/loss" in other)
        for metric in (metric for metric in COMPARED if metric in other):
            assert step[metric] == pytest.approx(other[metric], abs=TOLERANCE), metric
    assert np.abs(embedding - expected).max() < TOLERANCE


def test_models_moved(runs):
    steps, _ = runs["together"]
    assert "policy/loss" not in steps[0] and steps[0]["value/loss"] > 0
    assert steps[1]["kl/reference"] == 0.0 < abs(steps[2]["kl/reference"])
    assert steps[0]["kl/teacher"] != 0.0
