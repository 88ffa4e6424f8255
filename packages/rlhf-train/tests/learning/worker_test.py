"""One rank in this process: modes, metrics, columns it is given, what it saves, and its rehearsal of a step."""

import dataclasses
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhf_data.errors import EngineError
from rlhf_models.host_states import RestingModel
from rlhf_models.testing import tiny_model_dir, tiny_reward_model_dir
from rlhf_rollout.engines import EngineSpec
from rlhf_train.algorithms.table import make_algorithm
from rlhf_train.algorithms.token_specs import DistributionSpec, EntropySpec
from rlhf_train.cluster.placement import PlacementRequest, plan_placement
from rlhf_train.learning import rehearsal
from rlhf_train.learning.learning_spec import LearningSpec
from rlhf_train.learning.rank_actor import RankActor
from rlhf_train.learning.rehearsal import (
    made_up_step,
    memory_share,
    rehearse,
    run_passes,
    share_beside_engines,
    without_trace,
)
from rlhf_train.run.metrics import results
from rlhf_train.specs import ModelSpec, OptimizerSpec
from rlhf_train.tracing.trace import WORK
from trainer_testing import exact_logprobs, lone_worker, random_rollouts, shard_of, tiny_job

VOCAB_SIZE = 512


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(tiny_model_dir(tmp_path_factory.mktemp("model"), vocab_size=VOCAB_SIZE))


def eight_rollouts():
    """Rollouts, and what a worker loads of them, with a plan of two updates."""
    rollouts = random_rollouts(8, vocab_size=VOCAB_SIZE)
    return shard_of(rollouts, 2, forward_size=3, num_mini_batches=2, rewards=range(8))


@pytest.fixture
def worker(path):
    """An actor with an average, without a critic or a reference, and eight rollouts in two updates."""
    model = ModelSpec(path=path, optimizer=OptimizerSpec(learning_rate=1e-2, scheduler="constant"), zero_stage=0)
    worker = lone_worker({"actor": model}, make_algorithm("rloo", kl_coef=0), ema_beta=0.5)
    worker.shard, *loaded = eight_rollouts()
    worker.load_rollouts(*loaded)
    return worker


def test_old_logprobs_come_from_evaluation_mode_and_updates_from_training_mode(worker):
    modes: list[bool] = []
    module = worker.engines["actor"].module
    module.register_forward_pre_hook(lambda model, _: modes.append(model.training))
    worker.run_model("actor")
    assert modes == [False] * 3
    worker.assign_advantages(0.0)
    worker.update("actor", max_epochs=1, seed=0)
    assert modes == [False] * 3 + [True] * 4


@pytest.mark.parametrize(("is_large", "is_taught"), [(False, False), (True, False), (True, True)])
def test_old_and_new_logprobs_of_a_step_come_from_the_same_head_path(worker, monkeypatch, is_large, is_taught):
    # Passes of three rollouts for old log-probs and of two for updates: the limit lies between them, or above all.
    lengths = sorted((rollout.num_response_tokens for rollout in worker.shard), reverse=True)
    num_bytes = VOCAB_SIZE * 4
    limit = sum(lengths[:3]) * num_bytes - is_large
    assert sum(lengths[:2]) * num_bytes < limit
    monkeypatch.setattr("rlhf_models.actor.MAX_LOGITS_BYTES", limit)
    actor = worker.engines["actor"].module
    chosen = []
    after = actor._after
    monkeypatch.setattr(actor, "_after", lambda *args: chosen.append(args[4]) or after(*args))
    worker.run_model("actor")
    if is_taught:  # which takes whole logits in the updates
        worker._algorithm = make_algorithm("rloo", kl_coef=0, teacher_coef=1.0, distribution=DistributionSpec(top_k=1))
        chosen.clear()
        worker.run_model("actor")
        shape = *worker._experience.loss_mask.shape, 3
        worker._experience.set_column("teacher_logprobs", torch.full(shape, -1.0).index_fill(2, torch.tensor([0]), 5))
    worker.assign_advantages(0.0)
    worker.update("actor", max_epochs=1, seed=0)
    assert chosen == [is_large and not is_taught] * (3 + 4)


def test_passes_and_steps_of_the_optimizer_are_on_the_timeline_with_their_size(worker):
    WORK.take()
    with WORK.doing("call"):
        worker.run_model("actor")
        worker.assign_advantages(0.0)
        worker.update("actor", max_epochs=1, seed=0)
    *inner, call = WORK.take().spans
    assert [span.name for span in inner] == ["forward pass"] * 3 + (
        ["forward and backward pass"] * 2 + ["optimizer step"]
    ) * 2
    assert all(span.depth == 1 and call.begin_s <= span.begin_s <= span.end_s <= call.end_s for span in inner)
    tokens = sum(rollout.num_tokens for rollout in worker.shard)
    for name in ("forward pass", "forward and backward pass"):
        sizes = [span.args for span in inner if span.name == name]
        assert sum(size["rollouts"] for size in sizes) == 8 and sum(size["tokens"] for size in sizes) == tokens


def test_entropy_is_the_mean_over_trained_tokens_of_all_forward_passes(worker, path):
    found = results(worker.run_model("actor"))["policy/entropy"]
    plain = AutoModelForCausalLM.from_pretrained(path).double()
    total, count = 0.0, 0
    for rollout in worker.shard:
        with torch.no_grad():
            logprobs, _ = exact_logprobs(plain, rollout)
        total -= (logprobs.exp() * logprobs).sum().item()
        count += len(logprobs)
    assert found == pytest.approx(total / count, rel=1e-5)


def test_column_of_trained_tokens_from_another_rank_restricts_the_shard(worker):
    before = worker._experience.loss_mask.clone()
    kept = {r.rollout_id: r.loss_mask.astype(np.float32) for r in worker.shard}
    first = worker.shard[0].rollout_id
    kept[first][np.flatnonzero(kept[first])[0]] = 0.0
    worker.adopt_columns({"trained": kept})
    left = worker._experience.loss_mask
    assert left.sum() == before.sum() - 1 and not (left & ~before).any()
    assert left[0].sum() == before[0].sum() - 1


def test_reference_that_rests_comes_once_for_all_passes_of_a_step_and_computes_the_same(path):
    model = ModelSpec(path=path, zero_stage=0, offload=True)  # without effect on a CPU
    worker = lone_worker({"reference": model}, make_algorithm(kl_coef=0.1))
    worker.load_rollouts(*eight_rollouts()[1:])
    module = worker._frozen["reference"]
    assert isinstance(module, torch.nn.Module)
    worker.run_model("reference")
    wanted = worker._experience.columns["ref_logprobs"].clone()
    for weight in module.parameters():
        weight.data = weight.data.clone()  # out of the file, whose memory cannot be given back
    places = []
    run = lambda *args, **options: places.append(first.data_ptr()) or module(*args, **options)  # noqa: E731
    first = next(module.parameters())
    place = first.data
    worker._frozen["reference"] = RestingModel(run, module.parameters())
    worker.offload()
    worker.reload()
    assert place.untyped_storage().nbytes() == 0
    worker.run_model("reference")
    assert place.untyped_storage().nbytes() == 0
    assert len(places) == 3 and len({*places}) == 1 and places[0] != first.data_ptr()
    assert torch.equal(worker._experience.columns["ref_logprobs"], wanted)


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_models_that_train_in_turn_learn_the_same_and_one_has_its_states_on_the_device(path, tmp_path, zero_stage):
    learning = OptimizerSpec(learning_rate=1e-2, scheduler="constant")
    spec = ModelSpec(path=path, optimizer=learning, zero_stage=zero_stage)
    models = {"actor": spec, "critic": spec, "reference": ModelSpec(path=path, zero_stage=0)}
    shard = eight_rollouts()[1:]
    found = []
    for trains_in_turn in (False, True):
        worker = lone_worker(models, make_algorithm(kl_coef=0.1), trains_in_turn=trains_in_turn)
        here = {role for role, engine in worker.engines.items() if not engine._host_states._away}
        assert here == (set() if trains_in_turn else {"actor", "critic"})
        most = [0]
        forward = {role: engine.forward for role, engine in worker.engines.items()}

        def counted(role, *args, worker=worker, most=most, forward=forward, **options):
            here = [name for name, engine in worker.engines.items() if not engine._host_states._away]
            most[0] = max(most[0], len(here))
            if torch.is_grad_enabled():
                assert role in here
            return forward[role](*args, **options)

        for role, engine in worker.engines.items():
            engine.forward = partial(counted, role)
        metrics = []
        for step in range(2):
            worker.load_rollouts(*shard)
            metrics += [worker.run_model(role) for role in ("actor", "reference", "critic")]
            metrics.append(worker.assign_advantages(0.1))
            metrics += [worker.update(role, max_epochs=2, seed=step) for role in ("critic", "actor")]
            worker.offload()
            worker.reload()
        assert most == [1 if trains_in_turn else 2]
        folder = tmp_path / str(trains_in_turn)
        folder.mkdir()
        names = worker.save_state(str(folder))  # those of frozen models are not among them
        assert names == ["actor-0-of-1.safetensors", "critic-0-of-1.safetensors"]
        worker.finish_state()
        weights = {role: dict(engine.named_weights()) for role, engine in worker.engines.items()}
        found.append((metrics, {role: {n: w.clone() for n, w in own.items()} for role, own in weights.items()}))
        worker.update("actor", max_epochs=1, seed=9)
        worker.load_state(str(folder))
        for name, weight in worker.engines["actor"].named_weights():
            assert torch.equal(weight, found[-1][1]["actor"][name])
    (first, weights), (second, others) = found
    assert [results(part) for part in first] == [results(part) for part in second]
    assert all(torch.equal(w, others[role][name]) for role, own in weights.items() for name, w in own.items())


def test_saved_model_has_the_weights_and_the_average_those_of_all_updates(worker, path, tmp_path):
    first = {name: weight.clone() for name, weight in worker.engines["actor"].named_weights()}
    worker.run_model("actor")
    worker.assign_advantages(0.0)
    steps = []
    engine = worker.engines["actor"]
    step = engine.step

    def noting():
        stats = step()
        steps.append({name: weight.clone() for name, weight in engine.named_weights()})
        return stats

    engine.step = noting
    worker.update("actor", max_epochs=1, seed=0)
    worker.save("actor", str(tmp_path / "model"))
    worker.save_average(str(tmp_path / "average"))
    saved, averaged = (
        dict(AutoModelForCausalLM.from_pretrained(tmp_path / name).named_parameters()) for name in ("model", "average")
    )
    assert len(steps) == 2
    for name, weight in saved.items():
        torch.testing.assert_close(weight.detach(), steps[-1][name])
        by_hand = 0.5 * (0.5 * first[name] + 0.5 * steps[0][name]) + 0.5 * steps[1][name]
        torch.testing.assert_close(averaged[name].detach(), by_hand, rtol=0, atol=1e-6)
        assert (saved[name] - averaged[name]).abs().max() > 1e-4


def test_rank_that_is_not_the_first_writes_nothing(worker, tmp_path):
    worker.rank = 1
    worker.save("actor", str(tmp_path / "model"))
    assert not (tmp_path / "model").exists()


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {
        "actor": str(tiny_model_dir(folder / "actor", vocab_size=VOCAB_SIZE)),
        "reference": str(tiny_model_dir(folder / "reference", seed=1, vocab_size=VOCAB_SIZE)),
        "critic": str(tiny_reward_model_dir(folder / "critic", vocab_size=VOCAB_SIZE)),
    }


@pytest.fixture
def job(paths, tmp_path):
    model = ModelSpec(path=paths["reference"], zero_stage=0, packing=True)
    optimizer = OptimizerSpec(learning_rate=1e-2, scheduler="constant")
    models = {role: dataclasses.replace(model, path=paths[role], optimizer=optimizer) for role in ("actor", "critic")}
    return tiny_job(paths["actor"], tmp_path, models=models | {"reference": model})


def started(job, *roles):
    """A worker with these models of the job, or with all."""
    return lone_worker({role: job.models[role] for role in roles or job.models}, job.algorithm, ema_beta=0.5)


def a_step(worker):
    """Metrics, weights, averages and the next random numbers after a step on real rollouts."""
    rollouts = random_rollouts(8, vocab_size=VOCAB_SIZE)
    worker.load_rollouts(*shard_of(rollouts, 2, forward_size=3, num_mini_batches=2)[1:])
    metrics = [worker.run_model(role) for role in ("actor", "reference", "critic")] + [worker.assign_advantages(0.01)]
    metrics += [worker.update(role, max_epochs=1, seed=0, kl_coef=0.01) for role in ("critic", "actor")]
    weights = {
        (role, name): weight for role, engine in worker.engines.items() for name, weight in engine.state_dict().items()
    }
    numbers = [results(part) for part in metrics]
    return numbers, weights | worker._average.values(), torch.rand(4)


def test_a_rehearsal_changes_nothing_bit_for_bit(job):
    plain = a_step(started(job))
    worker = started(job)
    backbone = worker.engines["actor"].module.model.base_model
    backbone.pack_graph = seen = []  # a pass would call it
    with without_trace(worker):
        run_passes(worker, list(job.models), job)
    assert backbone.pack_graph is seen
    del backbone.pack_graph
    assert all(weight.grad is None for engine in worker.engines.values() for weight in engine.module.parameters())
    numbers, tensors, random = a_step(worker)
    assert numbers == plain[0]
    assert torch.equal(random, plain[2])
    for name, tensor in plain[1].items():
        assert torch.equal(tensors[name], tensor), name


def test_every_kind_of_pass_is_rehearsed_with_the_inputs_of_a_real_one(job, monkeypatch):
    worker = started(job)
    calls = []
    for role, engine in worker.engines.items():
        engine.module.register_forward_pre_hook(
            lambda model, args, words, role=role: calls.append((role, torch.is_grad_enabled(), args[0], words)),
            with_kwargs=True,
        )
    frozen = worker._frozen["reference"]
    frozen.register_forward_pre_hook(lambda model, args: calls.append(("reference", False, args[0], {})))
    with without_trace(worker):
        run_passes(worker, list(job.models), job)
    made = [(role, has_grad, len(batch.lengths), batch.input_ids.shape[1]) for role, has_grad, batch, _ in calls]
    # 64 tokens at most per rollout, 8 rollouts per training pass; one response has 11 tokens instead of 12.
    assert made == [
        *(("actor", True, 8, 512), ("actor", True, 8, 511)),
        *(("critic", True, 8, 512), ("critic", True, 8, 511)),
        *(("actor", False, 16, 1023), ("critic", False, 16, 1023), ("reference", False, 16, 1023)),
    ]
    learning = calls[0][3]
    assert learning["stream"].loss_mask.shape == (8 * 12,) and learning["max_tokens"] == 16 * 12
    assert learning["stream"].old_logprobs is not None and learning["stream"].ref_logprobs is None


def test_a_teachers_distributions_are_rehearsed(job):
    algorithm = make_algorithm(kl_coef=0.0, teacher_coef=0.1, distribution=DistributionSpec(top_k=3))
    models = {"actor": job.models["actor"], "critic": job.models["critic"], "teacher": job.models["reference"]}
    taught = SimpleNamespace(**{name: getattr(job, name) for name in ("batch", "engine", "sampling", "seed")})
    taught.models, taught.algorithm = models, algorithm
    taught.column_roles = LearningSpec.column_roles.fget(taught)
    worker = lone_worker(models, algorithm)
    losses = []
    loss = worker._actor_loss
    worker._actor_loss = lambda *args: losses.append(loss(*args)) or losses[-1]
    with without_trace(worker):
        run_passes(worker, list(models), taught)
    assert [metrics["kl/teacher"].count for _, metrics in losses] == [96, 95]


@pytest.mark.parametrize(("target", "is_bonus"), [(0.5, True), (None, False)])
def test_an_adaptive_bonus_is_rehearsed_though_its_weight_begins_at_0(job, target, is_bonus):
    algorithm = dataclasses.replace(job.algorithm, entropy=EntropySpec(target=target))
    worker = started(dataclasses.replace(job, algorithm=algorithm), "actor", "reference")
    coefs = []
    loss = worker._actor_loss
    worker._actor_loss = lambda *args: coefs.append(args[2].entropy_coef) or loss(*args)
    with without_trace(worker):
        run_passes(worker, ["actor", "reference"], dataclasses.replace(job, algorithm=algorithm))
    assert [coef > 0 for coef in coefs] == [is_bonus] * 2


def test_ranks_without_the_actor_rehearse_their_own_models(job):
    worker = started(job, "critic")
    with without_trace(worker):
        run_passes(worker, ["critic"], job)
    assert not worker._experience.token_ids


def test_made_up_step_keeps_to_the_budget_of_tokens_and_to_the_number_of_rollouts(job):
    budget = dataclasses.replace(job.batch, micro_batch_tokens=200)
    columns, plan = made_up_step(dataclasses.replace(job, batch=budget))
    assert plan.mini_batches[0].micro_batches == ((0, 1, 2), (3, 4, 5)) and plan.max_pass_tokens == 200
    assert columns.lengths.tolist() == [64] * 5 + [63]
    assert columns.loss_mask.sum() == 6 * 12 - 1
    assert np.flatnonzero(columns.loss_mask[:64]).tolist() == list(range(52, 64))
    assert (columns.policy_versions == np.where(columns.loss_mask, 0, -1)).all()
    few = dataclasses.replace(job.batch, rollout_batch_size=1, n_samples_per_prompt=1, train_batch_size=1)
    assert made_up_step(dataclasses.replace(job, batch=few))[0].lengths.tolist() == [63]
    unlimited = dataclasses.replace(job.sampling, max_tokens=999)
    columns, _ = made_up_step(dataclasses.replace(job, batch=few, sampling=unlimited))
    assert (columns.lengths.tolist(), columns.loss_mask.sum()) == ([63], 62)  # a prompt has a token


def test_passes_that_do_not_fit_do_not_keep_the_others_from_being_rehearsed(job, monkeypatch, caplog):
    worker = started(job)
    done = []

    def update(role, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(worker, "update", update)
    monkeypatch.setattr(worker, "run_model", done.append)
    with caplog.at_level("INFO", rehearsal.__name__), without_trace(worker):
        run_passes(worker, list(job.models), job)
    assert done == ["actor", "critic", "reference"]
    assert caplog.text.count("CUDA out of memory") == 2


def out_of_memory(*_, **__):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def test_models_that_do_not_fit_beside_engines_end_with_a_hint(job, monkeypatch):
    actor = RankActor.__new__(RankActor)
    actor.prepare()
    monkeypatch.setattr("rlhf_train.learning.worker.TrainWorker", out_of_memory)
    with pytest.raises(EngineError) as caught:
        actor.load(0, 1, {role: job.models[role] for role in ("actor", "critic")}, job, None)
    assert "too little memory beside the engines to load actor, critic: CUDA out of memory" in str(caught.value)
    assert "hint: lower ``gpu_memory_utilization``" in str(caught.value)


def test_passes_that_do_not_fit_end_with_a_hint():
    actor = RankActor.__new__(RankActor)
    actor._worker = SimpleNamespace(update=out_of_memory, load_rollouts=out_of_memory)
    for call in (lambda: actor.work("update", "actor"), lambda: actor.run_block(["actor"], [], None, None)):
        with pytest.raises(EngineError) as caught:
            call()
        assert "too little memory: CUDA out of memory. Tried to allocate 2.00 GiB." in str(caught.value)
        assert "hint: lower ``micro_train_batch_size``" in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [{"torch_compile": "off"}, {"zero_stage": 3}, *({f"{kind}_parallel_size": 2} for kind in ("tensor", "expert"))],
)
def test_frozen_models_are_not_rehearsed_where_they_cannot_be_compiled(job, monkeypatch, changes):
    def never(*_):
        raise AssertionError("a pass was run")

    monkeypatch.setattr(rehearsal, "run_passes", never)
    frozen = dataclasses.replace(job.models["reference"], **changes)
    on_gpu = SimpleNamespace(plan=SimpleNamespace(device="cuda"), models={"reference": frozen})
    assert rehearse(SimpleNamespace(engines={}), ["reference"], on_gpu, 0) == 0.0


def test_layers_that_are_compiled_run_within_the_memory_beside_engines_and_others_not_at_all(job, monkeypatch):
    worker = started(job)
    on_gpu = dataclasses.replace(job, plan=plan_placement(PlacementRequest(ranks=dict.fromkeys(job.models, 1)), [4]))
    for one in (job, on_gpu):
        assert rehearse(worker, list(job.models), one, 0) == 0.0
    log = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", log.append)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(rehearsal, "run_passes", lambda *_: log.append("passes"))
    monkeypatch.setattr(rehearsal, "is_compiled", lambda module: True)
    assert rehearse(worker, list(job.models), on_gpu, 0) > 0
    assert log == [0.95, "passes", 1.0]


def test_share_of_a_rank_leaves_the_engines_their_own():
    ranks = {"actor": 1, "critic": 1}
    plan = plan_placement(PlacementRequest(ranks=ranks, num_engines=2, colocate_all_models=True), [1])
    awake = EngineSpec(model="m", gpu_memory_utilization=0.15)
    assert memory_share(plan, awake, "actor", 0) == pytest.approx(0.65)
    assert memory_share(plan, dataclasses.replace(awake, enable_sleep=True), "actor", 0) == pytest.approx(0.95)
    apart = plan_placement(PlacementRequest(ranks=ranks, num_engines=2), [4])
    assert memory_share(apart, awake, "critic", 0) == pytest.approx(0.95)
    crowded = dataclasses.replace(plan, trainers=plan.trainers * 2)
    assert memory_share(crowded, awake, "actor", 0) == pytest.approx(0.325)
    assert share_beside_engines(crowded, awake, "actor", 0) == pytest.approx(0.65)
