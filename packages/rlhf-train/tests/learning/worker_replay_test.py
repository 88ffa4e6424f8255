"""Which models replay the engine's experts: the actor, in old log-probs and updates, and no other."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from online_fakes import LoggedRanks
from rlhf_data.errors import ConfigError, DataError
from rlhf_data.records import Span, SpanSource
from rlhf_models.batch import TokenBatch
from rlhf_models.experts.routing_replay import replay_routes
from rlhf_models.loading import load_actor
from rlhf_models.lora import LoraSpec
from rlhf_models.testing import tiny_model_dir
from rlhf_train.algorithms.table import make_algorithm
from rlhf_train.engine import accelerate
from rlhf_train.learning.learner import Learner, _replayed_share
from rlhf_train.learning.worker import TrainWorker
from rlhf_train.run.metrics import results
from rlhf_train.specs import ModelSpec, OptimizerSpec
from trainer_testing import lone_worker, random_rollouts, shard_of, tiny_job, with_routes

ROLLOUTS = with_routes(random_rollouts(12, vocab_size=512))


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    return str(tiny_model_dir(tmp_path_factory.mktemp("model"), architecture="qwen3_moe"))


def start(path: str, **options) -> TrainWorker:
    frozen = ModelSpec(path=path, zero_stage=0, packing=True)
    trained = dataclasses.replace(frozen, optimizer=OptimizerSpec(learning_rate=1e-2, scheduler="constant"))
    models = {
        "actor": dataclasses.replace(trained, routing_replay=True, **options),
        "critic": trained,
        "reference": frozen,
    }
    return lone_worker(models, make_algorithm(kl_coef=0.05, use_kl_loss=True))


def of_policy(logprobs: torch.Tensor, rollouts) -> list[torch.Tensor]:
    return [row[: one.num_tokens][one.loss_mask] for row, one in zip(logprobs, rollouts, strict=True)]


@pytest.mark.parametrize("lora", [None, LoraSpec(rank=2, alpha=4.0)], ids=["all weights", "adapters"])
def test_old_logprobs_and_the_first_update_replay_and_reference_and_critic_do_not(path, lora):
    if lora:
        pytest.importorskip("peft")
    worker = start(path, lora=lora)
    rewards = range(len(ROLLOUTS))
    shard, *loaded = shard_of(ROLLOUTS, 5, rewards=rewards, with_routes=True)
    worker.load_rollouts(*loaded)
    for role in ("actor", "reference", "critic"):
        worker.run_model(role)
    columns = {name: column.clone() for name, column in worker._experience.columns.items()}
    worker.assign_advantages(0.0)
    metrics = results(worker.update("actor", max_epochs=1, seed=0, kl_coef=0.1))
    assert metrics["policy/ratio"] == 1.0

    batch = TokenBatch.padded([one.token_ids for one in shard], 0)
    actor = load_actor(path, dtype="float32")
    own = actor(batch).logprobs.detach()
    replay_routes(actor.model.base_model)
    nothing = np.zeros((0, 2, 2), np.uint8)
    routed = batch.routed([nothing if one.routes is None else one.routes for one in shard])
    replayed = actor(routed).logprobs.detach()
    for found, want in (("old_logprobs", replayed), ("ref_logprobs", own)):
        for values, expected in zip(of_policy(columns[found], shard), of_policy(want, shard), strict=True):
            torch.testing.assert_close(values, expected, atol=2e-5, rtol=0)
    assert (replayed - own).abs().max() > 0.1

    worker.load_rollouts(*shard_of(ROLLOUTS, 5, rewards=rewards)[1:])  # no routes: the critic's values are the same
    worker.run_model("critic")
    assert torch.equal(worker._experience.columns["values"], columns["values"])


def test_routes_of_another_model_are_refused(path):
    worker = start(path)
    rollouts = with_routes(random_rollouts(4, vocab_size=512), layers=3)
    with pytest.raises(DataError, match=r"routes have 3 layers .*the model has 2 layers"):
        worker.load_rollouts(*shard_of(rollouts, 5, with_routes=True)[1:])


@pytest.mark.usefixtures("results_stand_for_references")
@pytest.mark.parametrize("replays", [False, True])
def test_routes_go_to_the_actor_that_replays_them_and_their_share_is_told(replays, tmp_path):
    job = tiny_job("model", tmp_path)
    actor = dataclasses.replace(job.models["actor"], routing_replay=replays)
    rollouts = with_routes(random_rollouts(32, vocab_size=64))
    ranks, others = LoggedRanks([], "actor", count=2), LoggedRanks([], "critic", "reference")
    metrics = Learner(dataclasses.replace(job, models=job.models | {"actor": actor}), [ranks, others]).deal(rollouts, 1)
    assert [columns.routes for columns, *_ in others.shards] == [None]
    assert [columns.routes is not None for columns, *_ in ranks.shards] == [replays] * 2
    known = sum(len(one.routes) for one in rollouts[1:])
    assert sum(columns.num_routed.sum() for columns, *_ in ranks.shards) == replays * known
    share = {"routing/replayed": known / sum(one.num_tokens - 1 for one in rollouts)}
    assert {name: value for name, value in metrics.items() if name.startswith("routing/")} == (share if replays else {})


def test_share_of_replayed_tokens_leaves_out_the_last_one_of_each_rollout():
    whole = [dataclasses.replace(one, routes=np.zeros((one.num_tokens, 2, 2), int)) for one in ROLLOUTS]
    assert _replayed_share(whole) == 1.0
    alone = dataclasses.replace(whole[0], spans=whole[0].spans[:1], routes=None)
    assert _replayed_share([dataclasses.replace(alone, spans=(Span(SpanSource.PROMPT, [1]),))]) == 0.0


def test_layers_whose_routers_get_their_experts_are_not_compiled(monkeypatch):
    monkeypatch.setattr(accelerate, "compile_unavailable_reason", lambda *args, **kwargs: None)
    monkeypatch.setattr(accelerate, "compile_layers", lambda model: pytest.fail("compiled"))
    spec = ModelSpec(path="m", packing=True, routing_replay=True, torch_compile="auto")
    assert not accelerate.compile_model(SimpleNamespace(model="model"), spec, "cuda")
    with pytest.raises(ConfigError, match=r"(?s)cannot be compiled: routing replay .*hint: leave ``torch_compile``"):
        accelerate.compile_model(SimpleNamespace(model="model"), dataclasses.replace(spec, torch_compile="on"), "cuda")
