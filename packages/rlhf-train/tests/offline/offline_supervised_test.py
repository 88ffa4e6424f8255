"""Supervised fine-tuning: the loss by hand, layouts alike, and a real run."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlhf_data.examples.sft import SftExample
from rlhf_models.loading import load_actor
from rlhf_models.testing import tiny_model_dir
from rlhf_rollout.host import free_port
from rlhf_train.batching import Denominators
from rlhf_train.offline.epochs import OfflineSchedule
from rlhf_train.offline.job import OfflineJob, run_offline
from rlhf_train.offline.objectives.supervised import SupervisedObjective
from rlhf_train.run.observer import Observer
from rlhf_train.specs import ModelSpec, OptimizerSpec


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return str(tiny_model_dir(tmp_path_factory.mktemp("models") / "tiny"))


def example(tokens: list[int], num_prompt: int) -> SftExample:
    mask = np.arange(len(tokens)) >= num_prompt
    return SftExample(f"e{tokens[0]}", np.array(tokens), mask)


EXAMPLES = [example([5, 6, 7, 8, 9], 2), example([10, 11, 12], 1), example([20, 21, 22, 23, 24, 25, 26], 6)]


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_objective_equals_transformers_own_loss(model_path, packing):
    actor = load_actor(model_path, dtype="float32", packing=packing)
    engine = SimpleNamespace(forward=actor, device=torch.device("cpu"))
    objective = SupervisedObjective(packing=packing)
    denominators = Denominators(sum(map(objective.num_trained_tokens, EXAMPLES)), 3, 3)
    loss, metrics = objective.loss(engine, EXAMPLES, denominators)
    # 3 + 2 + 1 = 6 trained tokens; transformers averages one example at a time.
    plain = load_actor(model_path, dtype="float32").model
    total = 0.0
    for item in EXAMPLES:
        labels = torch.tensor(np.where(item.loss_mask, item.token_ids, -100).astype(np.int64))[None]
        own = plain(input_ids=torch.tensor(item.token_ids.astype(np.int64))[None], labels=labels).loss
        total += own.item() * objective.num_trained_tokens(item)
    assert denominators.num_tokens == 6
    assert loss.item() == pytest.approx(total / 6, rel=1e-5)
    assert metrics["sft/loss"].result() == pytest.approx(total / 6, rel=1e-5)


def test_objective_first_token_of_a_sequence_is_never_counted(model_path):
    # Pretraining trains all tokens; nothing stands before the first of each, so 4 + 2 of the 5 + 3 are left.
    objective, items = SupervisedObjective(), [example([5, 6, 7, 8, 9], 0), example([10, 11, 12], 0)]
    engine = SimpleNamespace(forward=load_actor(model_path, dtype="float32"), device=torch.device("cpu"))
    assert [objective.num_trained_tokens(item) for item in items] == [4, 2]
    assert objective.loss(engine, items, Denominators(6, 2, 4))[1]["sft/loss"].count == 6


def test_run_offline_supervised_loss_falls_and_the_model_is_saved(model_path, tmp_path):
    steps, evaluations, progress = [], [], []

    class Watch(Observer):
        def progress(self, done, total):
            progress.append((done, total))

        def update(self, update, num_updates, metrics):
            steps.append((update, num_updates, metrics))

        def evaluation(self, step, metrics):
            evaluations.append((step, metrics["eval/loss"]))

    job = OfflineJob(
        objective=SupervisedObjective(),
        model=ModelSpec(
            path=model_path, zero_stage=2, optimizer=OptimizerSpec(learning_rate=5e-3, scheduler="constant")
        ),
        examples=EXAMPLES,
        eval_examples=EXAMPLES,
        schedule=OfflineSchedule(train_batch_size=3, micro_train_batch_size=2, max_epochs=20, seed=1),
        model_path=tmp_path / "model",
        master=("127.0.0.1", free_port()),
    )
    run_offline(job, Watch())
    assert [step for step, _, _ in steps] == list(range(1, 21))
    assert {total for _, total, _ in steps} == {20}
    assert progress == [(0, 20)]  # the first update may take long
    # An untrained model of 512 tokens is near ln 512 = 6.2 nats; three short rows are soon known by heart.
    (first, before), (last, after) = evaluations
    assert (first, last) == (0, 20)
    assert before > 5.0
    assert after < 1.0
    assert all(metrics["samples/trained"] == 3 for _, _, metrics in steps)
    # What was saved is what was trained.
    saved = load_actor(tmp_path / "model", dtype="float32")
    engine = SimpleNamespace(forward=saved, device=torch.device("cpu"))
    loss, _ = SupervisedObjective().loss(engine, EXAMPLES, Denominators(6, 3, 3))
    assert loss.item() == pytest.approx(after, abs=1e-5)
