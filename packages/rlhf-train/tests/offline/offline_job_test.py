"""Offline runs: what they refuse, that they learn what can be learned, which weights are kept, and what is stored."""

import dataclasses
import json
import math
import socket
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rlhf_data.errors import CheckpointError, ConfigError, DataError, EngineError
from rlhf_data.examples.preference import PreferenceExample, UnpairedExample
from rlhf_data.examples.sft import SftExample
from rlhf_models.batch import TokenBatch
from rlhf_models.loading import load_actor, load_reward_model
from rlhf_models.lora import LoraSpec
from rlhf_models.testing import tiny_model_dir
from rlhf_train.offline.epochs import MicroBatch, OfflineSchedule
from rlhf_train.offline.job import OfflineJob, run_offline, score_moments
from rlhf_train.offline.objectives.distillation import DistillationObjective
from rlhf_train.offline.objectives.dpo import PreferenceObjective
from rlhf_train.offline.objectives.kto import KtoObjective
from rlhf_train.offline.objectives.process_reward import ProcessRewardObjective
from rlhf_train.offline.objectives.reward_model import RewardModelObjective
from rlhf_train.offline.objectives.supervised import SupervisedObjective
from rlhf_train.run.checkpoint import Checkpoints, CheckpointSpec
from rlhf_train.run.observer import Observer
from rlhf_train.specs import ModelSpec, OptimizerSpec


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


def single(made: list[PreferenceExample]) -> list[UnpairedExample]:
    """The answers of pairs, apart."""
    both = [(pair.chosen, True) for pair in made] + [(pair.rejected, False) for pair in made]
    return [UnpairedExample("row", row.token_ids, row.loss_mask, verdict) for row, verdict in both]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return str(tiny_model_dir(tmp_path_factory.mktemp("models") / "tiny"))


def job(model_path: str, folder: Any, **changes: Any) -> OfflineJob:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    optimizer = OptimizerSpec(learning_rate=2e-3, scheduler="constant")
    fields = {
        "objective": SupervisedObjective(),
        "model": ModelSpec(path=model_path, zero_stage=2, optimizer=optimizer),
        "examples": [pair.chosen for pair in pairs(32, 0)],
        "schedule": OfflineSchedule(train_batch_size=16, micro_train_batch_size=16, max_epochs=5),
        "model_path": folder / "model",
        "best_path": folder / "best_model",
        "master": ("127.0.0.1", port),
    }
    return OfflineJob(**(fields | changes))


def run(made: OfflineJob) -> dict[int, dict[str, float]]:
    """Carry a job out; return its evaluations."""
    seen: dict[int, dict[str, float]] = {}
    observer = Observer()
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


@pytest.mark.parametrize("lora", [None, LoraSpec(rank=4)], ids=["full", "lora"])
def test_reward_model_orders_held_out_pairs_and_stores_the_moments_of_their_scores(model_path, tmp_path, lora):
    held_out = pairs(24, 1)
    made = job(model_path, tmp_path, objective=RewardModelObjective(), examples=pairs(32, 0), eval_examples=held_out)
    made = dataclasses.replace(made, model=dataclasses.replace(made.model, lora=lora))
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
    assert (made.model_path / "adapter" / "adapter_config.json").exists() == (lora is not None)


def test_reward_model_without_held_out_pairs_stores_the_moments_of_its_own(model_path, tmp_path):
    made = job(model_path, tmp_path, objective=RewardModelObjective(), examples=pairs(16, 0))
    assert run(made) == {}
    assert load_reward_model(made.model_path, dtype="float32", normalize=True).moments is not None


@pytest.mark.parametrize(
    ("loss_type", "dtype"), [("dpo", "bfloat16"), ("ipo", "float32"), ("simpo", "bfloat16"), ("orpo", "float32")]
)
def test_preference_run_raises_the_margin_of_held_out_pairs(model_path, tmp_path, loss_type, dtype):
    model = ModelSpec(
        path=model_path, dtype=dtype, zero_stage=2, optimizer=OptimizerSpec(learning_rate=2e-3, scheduler="constant")
    )
    objective = PreferenceObjective(loss_type=loss_type)
    made = job(
        model_path, tmp_path, objective=objective, model=model, examples=pairs(32, 0), eval_examples=pairs(24, 1)
    )
    seen = run(made)
    assert seen[10]["eval/margin"] > seen[0]["eval/margin"] + 0.05
    assert seen[10]["eval/accuracy"] > 0.9
    assert load_actor(made.model_path, dtype=dtype)


def test_kto_run_raises_desirable_above_undesirable_answers(model_path, tmp_path):
    made = job(
        model_path,
        tmp_path,
        objective=KtoObjective(beta=0.2),
        examples=single(pairs(32, 0)),
        eval_examples=single(pairs(12, 1)),
    )
    seen = run(made)
    assert seen[0]["eval/loss"] == pytest.approx(0.5, abs=1e-5)  # 1 - sigmoid(0)
    assert seen[0]["eval/kl"] == pytest.approx(0.0, abs=1e-5)
    assert seen[20]["eval/desirable_reward"] > seen[20]["eval/undesirable_reward"] + 0.2
    assert seen[20]["eval/kl"] >= 0


def test_distillation_brings_a_student_to_its_teacher(model_path, tmp_path):
    teacher = ModelSpec(path=str(tiny_model_dir(tmp_path / "teacher", seed=5, vocab_size=640)))
    made = job(model_path, tmp_path, objective=DistillationObjective(kd_coef=1.0), reference=teacher)
    made = dataclasses.replace(made, eval_examples=made.examples, best_metric="distillation")
    seen = run(made)
    assert json.loads((made.best_path / "state.json").read_text())["step"] == 10
    assert seen[0]["eval/loss"] == seen[0]["eval/distillation"]
    assert seen[10]["eval/distillation"] < seen[0]["eval/distillation"] - 0.2


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
    seen = run(made)
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


def test_kto_items_set_each_prompt_before_the_answer_of_another():
    rows = [
        UnpairedExample("a", np.array([1, 2, 11, 12]), np.array([0, 0, 1, 1]), True),
        UnpairedExample("b", np.array([3, 21, 22, 23, 24]), np.array([0, 1, 1, 0, 1]), False),
    ]
    first, second = KtoObjective().items(rows)
    # The longest has 5 tokens: [1, 2] + [21, 22, 23, 24] is cut there, its mask with it.
    assert first.sequences[1].token_ids.tolist() == [1, 2, 21, 22, 23]
    assert first.sequences[1].loss_mask.tolist() == [False, False, True, True, False]
    assert second.sequences[1].token_ids.tolist() == [3, 11, 12]
    assert KtoObjective().num_tokens(first) == 9
    assert KtoObjective().num_trained_tokens(first) == 2


@pytest.mark.parametrize(("ratios", "kl"), [([3.0, 1.0, -1.0], 1.0), ([-3.0, 1.0, -1.0], 0.0)])
def test_kto_divergence_by_hand_is_the_mean_over_real_rows_and_never_negative(monkeypatch, ratios, kl):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)

    def forward(batch, logits_mask):
        # The log-prob of every token is what its id says.
        return SimpleNamespace(logprobs=batch.input_ids.float() * logits_mask)

    def reference(batch, logits_mask):
        return SimpleNamespace(logprobs=torch.zeros(batch.input_ids.shape))

    engine = SimpleNamespace(forward=forward, device=torch.device("cpu"), module=torch.nn.Linear(1, 1))
    items = []
    for ratio in ratios:
        mismatched = SimpleNamespace(token_ids=np.array([7, ratio]), loss_mask=np.array([False, True]))
        items.append(SimpleNamespace(sequences=(None, mismatched), ref_logprobs=None))
    batches = [MicroBatch(items[:2], [0, 1]), MicroBatch(items[2:], [2]), MicroBatch(items[:1], [])]
    assert KtoObjective(reference=reference).for_batch(engine, batches).kl == pytest.approx(kl)


def test_score_moments_by_hand():
    # Scores 1, 3, 5, 7: mean 4, mean square 21, variance 5.
    assert score_moments({"eval/score": 4.0, "eval/squared_score": 21.0}) == (4.0, pytest.approx(math.sqrt(5)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"loss_type": "dpoo"}, "dpoo"),
        ({"beta": 0.0}, "beta 0.0"),
        ({"label_smoothing": 0.5}, "label_smoothing 0.5"),
        ({"nll_loss_coef": -1.0}, "nll_loss_coef -1.0"),
        ({"simpo_gamma": 1.0}, "simpo_gamma has no effect on the loss dpo"),
        ({"loss_type": "ipo", "label_smoothing": 0.1}, "label_smoothing has no effect"),
        ({"loss_type": "orpo", "nll_loss_coef": 0.1}, "nll_loss_coef has no effect"),
        ({"loss_type": "simpo", "length_average": True}, "length_average has no effect"),
    ],
)
def test_preference_options_that_do_not_fit_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        PreferenceObjective(**fields)


@pytest.mark.parametrize(
    "make",
    [
        lambda: KtoObjective(beta=0.0),
        lambda: KtoObjective(desirable_loss_weight=-1.0),
        lambda: DistillationObjective(kd_coef=0.0),
        lambda: ProcessRewardObjective(reward_tokens=(5, 5)),
    ],
)
def test_options_of_objectives_out_of_range_are_refused(make):
    with pytest.raises(ConfigError):
        make()


def test_margins_that_examples_lack_are_refused():
    with pytest.raises(DataError, match=r"3 of 3 pairs have no margin(.|\n)*hint: give ``margin_key``"):
        RewardModelObjective(margin_loss=True).items(pairs(3, 0))


def test_kto_of_one_example_is_refused():
    with pytest.raises(DataError, match="two examples"):
        KtoObjective().items(single(pairs(1, 0))[:1])


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
