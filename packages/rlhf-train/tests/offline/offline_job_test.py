"""Offline runs: what they refuse, that they learn what can be learned, which weights are kept, and what is stored."""

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest
import torch

from rlhf_data.errors import CheckpointError, ConfigError, EngineError
from rlhf_data.examples.preference import PreferenceExample
from rlhf_data.examples.sft import SftExample
from rlhf_models.batch import TokenBatch
from rlhf_models.loading import load_actor, load_reward_model
from rlhf_models.lora import LoraSpec
from rlhf_models.testing import tiny_model_dir
from rlhf_rollout.host import free_port
from rlhf_train.offline.epochs import OfflineSchedule
from rlhf_train.offline.job import OfflineJob, run_offline
from rlhf_train.offline.objectives.distillation import DistillationObjective
from rlhf_train.offline.objectives.reward_model import RewardModelObjective
from rlhf_train.offline.objectives.supervised import SupervisedObjective
from rlhf_train.run.checkpoint import Checkpoints, CheckpointSpec
from rlhf_train.run.observer import Observer
from rlhf_train.run.recorder import Recorder
from rlhf_train.specs import ModelSpec, OptimizerSpec
from trace_events import check


def sequence(tokens: list[int], num_prompt: int) -> SftExample:
    return SftExample("row", np.array(tokens), np.arange(len(tokens)) >= num_prompt)


def pairs(count: int, seed: int) -> list[PreferenceExample]:
    """Pairs whose chosen answers are of other tokens than the rejected ones."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        prompt = rng.integers(3, 250, rng.integers(2, 6)).tolist()
        good, bad = (rng.integers(low, low + 8, rng.integers(2, 6)).tolist() for low in (260, 270))
        made.append(
            PreferenceExample("pair", sequence(prompt + good, len(prompt)), sequence(prompt + bad, len(prompt)))
        )
    return made


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return str(tiny_model_dir(tmp_path_factory.mktemp("models") / "tiny"))


def job(model_path: str, folder: Any, **changes: Any) -> OfflineJob:
    optimizer = OptimizerSpec(learning_rate=2e-3, scheduler="constant")
    fields = {
        "objective": SupervisedObjective(),
        "model": ModelSpec(path=model_path, zero_stage=2, optimizer=optimizer),
        "examples": [pair.chosen for pair in pairs(32, 0)],
        "schedule": OfflineSchedule(train_batch_size=16, micro_train_batch_size=16, max_epochs=5),
        "model_path": folder / "model",
        "best_path": folder / "best_model",
        "master": ("127.0.0.1", free_port()),
    }
    return OfflineJob(**(fields | changes))


def run(made: OfflineJob, progress: list[tuple[int, int]] | None = None) -> dict[int, dict[str, float]]:
    """Carry a job out; return its evaluations, and add what it says of its progress to `progress`."""
    seen: dict[int, dict[str, float]] = {}
    observer = Observer()
    if progress is not None:
        observer.progress = lambda *done: progress.append(done)
    observer.evaluation = seen.__setitem__
    run_offline(made, observer)
    return seen


def test_run_continues_with_its_own_examples_only(model_path, tmp_path):
    made = job(model_path, tmp_path, examples_digest="a")
    saved = json.loads(json.dumps(made.order()))
    made.check_order(saved)
    dataclasses.replace(made, examples_digest="").check_order(saved)
    made.check_order({name: value for name, value in saved.items() if name != "examples"})  # as older checkpoints
    other = dataclasses.replace(made, examples_digest="b")
    with pytest.raises(CheckpointError, match=r"other rows: their digest was a, and that of these is b\s+hint: "):
        other.check_order(saved)
    fewer = dataclasses.replace(made, examples=made.examples[1:])
    with pytest.raises(CheckpointError, match="the checkpoint's run had num_examples 32, and this one has 31"):
        fewer.check_order(saved)


def test_reward_model_orders_held_out_pairs_and_stores_the_moments_of_their_scores(model_path, tmp_path):
    held_out = pairs(24, 1)
    made = job(model_path, tmp_path, objective=RewardModelObjective(), examples=pairs(32, 0), eval_examples=held_out)
    made = dataclasses.replace(made, model=dataclasses.replace(made.model, lora=LoraSpec(rank=4)))
    seen = run(made)
    # A head of zeros ties every pair: ln 2, and half of a guess.
    assert seen[0]["eval/loss"] == pytest.approx(math.log(2))
    assert seen[0]["eval/accuracy"] == 0.5
    assert seen[10]["eval/accuracy"] > 0.9
    assert seen[10]["eval/margin"] > 0.5
    saved = load_reward_model(made.model_path, dtype="float32", normalize=True)
    tokens = [row.token_ids for pair in held_out for row in (pair.chosen, pair.rejected)]
    scores = saved(TokenBatch.padded(tokens, 0)).detach()
    assert scores.mean().item() == pytest.approx(0.0, abs=1e-3)
    assert scores.std(unbiased=False).item() == pytest.approx(1.0, abs=1e-3)
    assert (made.model_path / "adapter" / "adapter_config.json").exists()


def test_reward_model_without_held_out_pairs_stores_the_moments_of_its_own(model_path, tmp_path):
    made = job(model_path, tmp_path, objective=RewardModelObjective(), examples=pairs(16, 0))
    assert run(made) == {}
    assert load_reward_model(made.model_path, dtype="float32", normalize=True).moments is not None


def test_evaluations_come_when_due_and_the_best_weights_are_kept(model_path, tmp_path):
    # Ten steps at a rate that memorizes 16 examples and forgets what others have in common: the best is not the last.
    optimizer = OptimizerSpec(learning_rate=2e-2, scheduler="constant")
    made = job(
        model_path,
        tmp_path,
        model=ModelSpec(path=model_path, zero_stage=0, optimizer=optimizer),
        eval_examples=[pair.rejected for pair in pairs(8, 3)],
        eval_steps=4,
        best_metric="loss",
        checkpoints=CheckpointSpec(every=4, max_num=1),
    )
    progress: list[tuple[int, int]] = []
    seen = run(made, progress)
    assert progress == [(0, 10)]  # the first update may take long
    assert list(seen) == [0, 4, 8, 10]
    best = min(seen, key=lambda step: seen[step]["eval/loss"])
    state = json.loads((made.best_path / "state.json").read_text())
    assert (state["step"], state["metric"]) == (best, "eval/loss")
    assert state["value"] == seen[best]["eval/loss"]
    assert best != 10
    kept = {checkpoint.step: checkpoint.metric for checkpoint in Checkpoints(made.checkpoints.home(tmp_path)).all()}
    assert kept == {4: seen[4]["eval/loss"], max(kept): seen[max(kept)]["eval/loss"]}
    assert kept[4] < kept[max(kept)]  # so it is kept besides the newest
    again = dataclasses.replace(
        job(str(made.best_path), tmp_path / "again", eval_examples=made.eval_examples), examples=made.examples[:1]
    )
    assert run(again)[0]["eval/loss"] == pytest.approx(state["value"], rel=1e-4)


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_gradient_that_is_not_finite_ends_the_run_with_the_weights_before_it(model_path, tmp_path, monkeypatch, number):
    factors = iter([1.0, number, 1.0])  # of the three updates' losses
    plain = SupervisedObjective.loss

    def loss(*args):
        share, metrics = plain(*args)
        return share * next(factors), metrics

    monkeypatch.setattr(SupervisedObjective, "loss", loss)
    schedule = OfflineSchedule(train_batch_size=16, micro_train_batch_size=16, max_epochs=1)
    examples = [pair.chosen for pair in pairs(48, 0)]
    with pytest.raises(EngineError, match=r"the gradient of update 2 is not finite"):
        run(job(model_path, tmp_path, examples=examples, schedule=schedule))
    before, saved = (
        dict(load_actor(path, dtype="float32").named_parameters()) for path in (model_path, str(tmp_path / "model"))
    )
    assert all(weight.isfinite().all() for weight in saved.values())
    assert any(not torch.equal(saved[name], weight) for name, weight in before.items())  # the first update


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": ModelSpec(path="p")}, "optimizer"),
        ({"schedule": OfflineSchedule(train_batch_size=4, micro_train_batch_size=1, micro_batch_tokens=9)}, "packed"),
        ({"objective": DistillationObjective()}, "teacher"),
        ({"reference": ModelSpec(path="p")}, "no effect"),
        ({"precompute_reference": True}, "this objective uses no reference"),
        ({"eval_steps": 0}, "eval_steps is 0"),
        ({"eval_steps": 5}, "need examples"),
        ({"best_metric": "loss"}, "need examples"),
        ({"best_metric": "loss", "eval_examples": [1], "best_path": None}, "folder"),
    ],
)
def test_job_fields_that_do_not_fit_are_refused(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        job("model", tmp_path, **changes)


def test_unknown_best_metric_is_refused_before_training_with_those_there_are(model_path, tmp_path):
    held_out = [pair.chosen for pair in pairs(4, 1)]
    with pytest.raises(ConfigError, match=r"(?s)acuracy.*loss"):
        run(job(model_path, tmp_path, eval_examples=held_out, best_metric="acuracy"))


def test_example_longer_than_the_tokens_of_a_pass_is_refused_before_training(model_path, tmp_path):
    schedule = OfflineSchedule(train_batch_size=4, micro_train_batch_size=1, micro_batch_tokens=6)
    model = ModelSpec(path=model_path, packing=True, optimizer=OptimizerSpec(learning_rate=1e-3))
    with pytest.raises(ConfigError, match=r"``micro_batch_tokens`` is 6, and the longest example has \d+ tokens"):
        job(model_path, tmp_path, schedule=schedule, model=model)


def test_timeline_shows_updates_evaluations_and_saves(model_path, tmp_path):
    examples = [pair.chosen for pair in pairs(32, 0)]
    made = job(model_path, tmp_path, timeline=True, eval_examples=examples[:4], eval_steps=4)
    with Recorder(str(tmp_path), "") as recorder:
        run_offline(made, Observer(), recorder)
    found = check(tmp_path / "timeline.json")
    assert found.is_complete
    # 32 examples in updates of 16, five times.
    assert [each.name for each in found.of("controller", "steps")] == ["startup"] + [
        f"update {n}" for n in range(1, 11)
    ]
    phases = [(each.depth, each.name) for each in found.of("controller", "phases")]
    # Evaluated before, after updates 4 and 8, and after the last one, whose weights are saved.
    assert phases == [(0, "evaluate"), (0, "train"), *[(1, "evaluate")] * 3, (0, "save")]
