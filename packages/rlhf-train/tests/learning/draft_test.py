"""A draft model that is trained along: its loss and gradient by transformers, its state, and when it is updated."""

import dataclasses
import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from online_fakes import LoggedRanks
from rlhf_data.errors import ConfigError
from rlhf_models.testing import tiny_model_dir
from rlhf_train.algorithms.table import make_algorithm
from rlhf_train.cluster.placement import PlacementRequest, plan_placement
from rlhf_train.learning.learner import Learner
from rlhf_train.learning.rehearsal import run_passes
from rlhf_train.run.metrics import results
from rlhf_train.specs import ModelSpec, OptimizerSpec
from trainer_testing import exact_logprobs, lone_worker, random_rollouts, shard_of, tiny_job

TEMPERATURE = 0.7
LEARNING = OptimizerSpec(learning_rate=1e-2, scheduler="constant")


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    sizes = {"actor": {}, "draft": {"num_hidden_layers": 1, "seed": 5}}
    return {role: str(tiny_model_dir(folder / role, **size)) for role, size in sizes.items()}


def loaded(paths, **options):
    """A worker with an actor and its draft model, four of whose rollouts are trained in one update."""
    specs = {role: ModelSpec(path=path, optimizer=LEARNING, **options) for role, path in paths.items()}
    worker = lone_worker(specs, make_algorithm("rloo", kl_coef=0), temperature=TEMPERATURE)
    shard, *given = shard_of(random_rollouts(4, vocab_size=512), 3, rewards=range(4))
    worker.load_rollouts(*given)
    worker.run_model("actor")
    worker.assign_advantages(0.0)
    return worker, shard


def weights_of(worker, role):
    return {name: weight.clone() for name, weight in worker.engines[role].state_dict().items()}


@pytest.mark.parametrize("options", [{"packing": False}, {"packing": True, "zero_stage": 2}], ids=str)
def test_draft_model_learns_the_cross_entropy_of_the_policys_tokens(paths, options):
    worker, shard = loaded(paths, **options)
    plain = AutoModelForCausalLM.from_pretrained(paths["draft"], dtype=torch.float64)
    parts = []
    for rollout in shard:
        logprobs, tokens = exact_logprobs(plain, rollout, TEMPERATURE)
        parts.append(-logprobs.gather(1, tokens[:, None]))
    loss = torch.cat(parts).mean()
    loss.backward()
    norm = torch.nn.utils.get_total_norm([weight.grad for weight in plain.parameters()])
    actor = weights_of(worker, "actor")
    metrics = results(worker.update("draft", max_epochs=1, seed=0))
    assert metrics["draft/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["draft/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert metrics["draft/rollout_passes"] == 4 and metrics["draft/learning_rate"] == 1e-2
    assert results(worker.update("draft", max_epochs=1, seed=0))["draft/loss"] < loss.item()
    assert all(torch.equal(weight, actor[name]) for name, weight in weights_of(worker, "actor").items())


def test_gradient_that_is_not_finite_is_skipped_and_counted(paths, monkeypatch):
    worker, _ = loaded(paths)
    before, draft = weights_of(worker, "draft"), worker.engines["draft"]
    backward = draft.backward
    monkeypatch.setattr(draft, "backward", lambda loss, **options: backward(loss * math.inf, **options))
    skipped = {"draft/skipped_updates": 1.0, "draft/rollout_passes": 4.0, "draft/learning_rate": 1e-2}
    assert results(worker.update("draft", max_epochs=1, seed=0)) == skipped
    assert all(torch.equal(weight, before[name]) for name, weight in weights_of(worker, "draft").items())
    monkeypatch.undo()
    learned = results(worker.update("draft", max_epochs=1, seed=0))
    assert learned["draft/skipped_updates"] == 0 and math.isfinite(learned["draft/loss"])


def test_its_state_goes_on_and_its_model_is_saved(paths, tmp_path):
    first, second = loaded(paths)[0], loaded(paths)[0]
    first.update("draft", max_epochs=1, seed=0)
    first.save_state(str(tmp_path))
    first.finish_state()
    second.load_state(str(tmp_path))
    for worker in (first, second):
        worker.update("draft", max_epochs=1, seed=1)
    found, expected = (weights_of(worker, "draft") for worker in (second, first))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    first.save("draft", str(tmp_path / "saved"))
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert saved.config.num_hidden_layers == 1
    assert torch.equal(saved.model.embed_tokens.weight, expected["model.model.embed_tokens.weight"])


@pytest.fixture
def job(paths, tmp_path):
    job = tiny_job(paths["actor"], tmp_path, num_frozen_steps=1)
    ranks = {"actor": 1, "critic": 1, "draft": 0, "reference": 1}
    plan = plan_placement(PlacementRequest(ranks=ranks), [4])
    assert [placed.roles for placed in plan.trainers] == [("actor", "draft"), ("critic",), ("reference",)]
    models = {**job.models, "draft": dataclasses.replace(job.models["actor"], path=paths["draft"])}
    engine = dataclasses.replace(job.engine, draft_model=paths["draft"])
    return dataclasses.replace(
        job, models=models, plan=plan_placement(PlacementRequest(ranks=ranks), []), engine=engine
    )


@pytest.mark.usefixtures("results_stand_for_references")
def test_it_is_updated_with_the_policy_and_not_without_it(job):
    log: list = []
    learner = Learner(job, [LoggedRanks(log, "actor", "critic", "draft", "reference")])
    learner.fill_columns()
    assert [role for _, role in log] == ["actor", "reference", "critic"]
    for step, updated in ((1, ["critic"]), (2, ["critic", "draft", "actor"])):
        log.clear()
        learner.update(step)
        assert [role for _, role in log] == updated


def test_its_passes_are_rehearsed(job, monkeypatch):
    worker = lone_worker(job.models, job.algorithm)
    called = []
    for name in ("update", "run_model"):
        own = getattr(worker, name)
        monkeypatch.setattr(worker, name, lambda role, own=own, **more: called.append(role) or own(role, **more))
    run_passes(worker, list(job.models), job)
    assert sorted(called) == ["actor", "actor", "critic", "critic", "draft", "reference"]


def test_without_a_draft_model_of_the_engines_nothing_can_be_trained(job):
    with pytest.raises(ConfigError, match=r"engines have none(.|\n)*hint: set ``draft_model``"):
        dataclasses.replace(job, engine=dataclasses.replace(job.engine, draft_model=None))
