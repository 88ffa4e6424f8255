"""A rank on a GPU: compiled layers and CUDA graphs give the update of plain passes, whatever the passes hold."""

import dataclasses
import gc
from types import SimpleNamespace

import pytest
import torch

from rlhf_models.lora import LoraSpec
from rlhf_models.testing import tiny_model_dir, tiny_reward_model_dir
from rlhf_train.algorithms.table import make_algorithm
from rlhf_train.batching import BatchSizes
from rlhf_train.engine.shards import Shards
from rlhf_train.learning.rehearsal import run_passes, without_trace
from rlhf_train.run.metrics import results
from rlhf_train.specs import ModelSpec, OptimizerSpec
from trainer_testing import lone_worker, random_rollouts, shard_of

SHAPE = {"vocab_size": 1003, "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2}
ROLES = ("actor", "reference", "critic")
NUM_UPDATES = 8  # of the same weights: the later ones replay graphs
# The gradient is what is compared: AdamW makes the same step of gradients that differ by a factor.
FIXED = OptimizerSpec(learning_rate=0.0, scheduler="constant", max_norm=0.0)
PPO = make_algorithm(kl_coef=0.05, use_kl_loss=True, kl_estimator="k3")


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {
        "actor": str(tiny_model_dir(folder / "actor", **SHAPE)),
        "reference": str(tiny_model_dir(folder / "reference", seed=1, **SHAPE)),
        "critic": str(tiny_reward_model_dir(folder / "critic", **SHAPE)),
    }


def learned(paths, *, tokens=None, size=8, takes_turns=False, rehearses=False, **layout):
    """Train on the same rollouts `NUM_UPDATES` times with a learning rate of 0, maybe after a rehearsal.

    Returns the worker; by role, the gradient of each update, [P] float32; and the metrics of each of the actor's.
    """
    spec = ModelSpec(path="", **({"dtype": "bfloat16", "packing": True, "torch_compile": "on"} | layout))
    models = {role: dataclasses.replace(spec, path=paths[role], optimizer=FIXED) for role in ("actor", "critic")}
    models["reference"] = dataclasses.replace(spec, path=paths["reference"], lora=None)
    options = {"device": "cuda", "pack_tokens": tokens or size * 330, "takes_turns": takes_turns}
    worker = lone_worker(models, PPO, temperature=0.8, **options)
    if rehearses:
        rehearse(worker, models, tokens, size)
    rollouts = random_rollouts(48, vocab_size=SHAPE["vocab_size"], max_prompt=100, max_response=200)
    worker.load_rollouts(*shard_of(rollouts, size, longest=400, tokens=tokens)[1:])
    for role in ROLES:
        worker.run_model(role)
    worker.assign_advantages(PPO.kl_coef)
    gradients = {role: [] for role in worker.engines}
    metrics = []
    for role, engine in worker.engines.items():
        keep_gradients(engine, gradients[role])
        for seed in range(NUM_UPDATES):
            numbers = results(worker.update(role, max_epochs=1, seed=seed, kl_coef=PPO.kl_coef))
            metrics += [numbers] if role == "actor" else []
    return worker, gradients, metrics


def rehearse(worker, models, tokens, size):
    batch = BatchSizes(
        rollout_batch_size=48, n_samples_per_prompt=1, train_batch_size=48, micro_train_batch_size=size,
        micro_rollout_batch_size=size, micro_batch_tokens=tokens,
    )  # fmt: skip
    engine, sampling = SimpleNamespace(max_model_len=330), SimpleNamespace(max_tokens=200)
    job = SimpleNamespace(
        models=models, column_roles=ROLES, algorithm=PPO, batch=batch, engine=engine, sampling=sampling
    )
    with without_trace(worker):
        run_passes(worker, ROLES, job)
    worker.compiled_in_rehearsal = torch._dynamo.utils.counters["stats"]["unique_graphs"]


def keep_gradients(engine, kept):
    step = engine.step
    weights = [weight for weight in engine.module.parameters() if weight.requires_grad]

    def noting():
        found = [engine.gradient_sums.get(weight, weight.grad) for weight in weights]
        kept.append(torch.cat([one.flatten().float() for one in found]).cpu())
        return step()

    if engine.gradient_sums or weights[0].dtype == torch.float32:  # else DeepSpeed has sharded them
        engine.step = noting


@pytest.fixture(scope="module")
def truth(paths):
    """The gradients in float32, padded, without anything that makes passes fast."""
    plain = learned(paths, dtype="float32", packing=False, torch_compile="off", zero_stage=0)
    return {role: found[0] for role, found in plain[1].items()}


@pytest.fixture(scope="module")
def plain(paths):
    """In bfloat16, padded."""
    return learned(paths, packing=False, torch_compile="off")


def graphs(worker):
    """The number of shapes of the actor's packs that have CUDA graphs."""
    graph = getattr(worker.engines["actor"].module.model.base_model, "pack_graph", None)
    return len(graph._passes) if graph else 0


@pytest.mark.parametrize(
    ("options", "has_graphs"),
    [
        ({"tokens": 2048}, True),
        ({"size": 8}, True),
        ({"tokens": 1024}, True),
        ({"tokens": 2048, "gradient_checkpointing": True}, False),
        ({"size": 3, "torch_compile": "off"}, False),
    ],
    ids=str,
)
def test_gradients_of_packs_are_as_near_to_float32_as_padded_ones_for_any_split(
    paths, truth, plain, options, has_graphs, caplog
):
    worker, gradients, metrics = learned(paths, **options)
    assert bool(graphs(worker)) == has_graphs
    assert "CUDA graphs failed" not in caplog.text
    for role, found in gradients.items():
        want = truth[role]
        other = plain[1][role][0]
        assert len(found) == NUM_UPDATES
        for got in (found[0], found[-1]):  # kernel by kernel, and from graphs
            assert (got - want).norm() < 1.5 * (other - want).norm() + 1e-3 * want.norm(), role
    for numbers in metrics:
        assert numbers["policy/grad_norm"] == pytest.approx(plain[2][0]["policy/grad_norm"], rel=2e-2)
        assert numbers["kl/loss"] == pytest.approx(plain[2][0]["kl/loss"], rel=2e-2)


def test_updates_after_a_rehearsal_compile_nothing_and_have_the_same_gradients(paths, truth, plain):
    torch._dynamo.reset()
    compiled = torch._dynamo.utils.counters["stats"]
    before = compiled["unique_graphs"]
    worker, gradients, _ = learned(paths, tokens=2048, rehearses=True)
    assert graphs(worker)
    assert before < worker.compiled_in_rehearsal == compiled["unique_graphs"]
    for role, found in gradients.items():
        other = plain[1][role][0]
        for got in (found[0], found[-1]):
            assert (got - truth[role]).norm() < 1.5 * (other - truth[role]).norm() + 1e-3 * truth[role].norm(), role


def test_gradients_of_adapters_are_as_near_to_float32_as_padded_ones(paths):
    pytest.importorskip("peft")
    layout = {"packing": False, "torch_compile": "off", "zero_stage": 0, "lora": LoraSpec(rank=8)}
    truth = learned(paths, dtype="float32", **layout)[1]
    plain = learned(paths, **layout)[1]
    worker, gradients, _ = learned(paths, tokens=2048, lora=layout["lora"])
    assert graphs(worker)
    for role, found in gradients.items():
        [want, *_], [other, *_] = truth[role], plain[role]
        for got in (found[0], found[-1]):
            assert (got - want).norm() < 1.5 * (other - want).norm() + 1e-3 * want.norm(), role


def test_log_ratios_of_an_update_on_unchanged_weights_stay_below_rounding(paths):
    for options, bound in (({"torch_compile": "off"}, 1e-9), ({}, 1e-5), ({"lora": LoraSpec(rank=16)}, 1e-5)):
        for numbers in learned(paths, tokens=2048, **options)[2]:
            assert abs(numbers["policy/ratio"] - 1) < 1e-3
            assert numbers["policy/kl_to_old"] < bound, options


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_trainers_that_take_turns_run_without_graphs_and_free_their_memory(paths, zero_stage):
    layout = {"zero_stage": zero_stage, "torch_compile": "off" if zero_stage == 3 else "on"}
    gc.collect()
    torch.cuda.empty_cache()
    # Graphs of earlier tests that are not collected yet keep their memory.
    of_others = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    worker, _, metrics = learned(paths, tokens=2048, takes_turns=True, **layout)
    assert not graphs(worker)
    engine = worker.engines["actor"]
    num_weights = sum(getattr(weight, "ds_numel", weight.numel()) for weight in engine.module.parameters())
    optimizers = [one._engine.optimizer for one in worker.engines.values()] if zero_stage == 3 else []
    num_bucket_bytes = sum(bucket.buffer.nbytes for one in optimizers for bucket in one.ipg_buckets.values())
    shards = [Shards(), Shards()]
    engine.save_shards(shards[0])
    sent = {name: weight.clone() for name, weight in engine.named_weights()}
    ref_logprobs = worker._experience.columns["ref_logprobs"].clone()
    torch.empty(2**28, dtype=torch.uint8, device="cuda")  # the allocator keeps it
    worker.release_cache()
    assert torch.cuda.memory_reserved() - torch.cuda.memory_allocated() - of_others < 2**28
    for _ in range(2):
        before = torch.cuda.memory_allocated()
        worker.offload()
        freed = before - torch.cuda.memory_allocated() - num_bucket_bytes
        # Master weights, two moments and gradient sums of actor and critic; the reference.
        assert freed > (2 * 16 + 2) * num_weights * 0.9
        engine.save_shards(shards[1])
        assert all(torch.equal(sent[name], weight) for name, weight in engine.named_weights())
        worker.reload()
        # The allocator may round the size of a block up, by 1 MiB at most.
        assert torch.cuda.memory_allocated() == pytest.approx(before, abs=0.1 * freed)
    for name, kept in shards[0].tensors.items():
        assert torch.equal(kept, shards[1].tensors[name]), name
    worker.run_model("reference")
    assert torch.equal(ref_logprobs, worker._experience.columns["ref_logprobs"])
    again = results(worker.update("actor", max_epochs=1, seed=0, kl_coef=PPO.kl_coef))
    assert again["policy/grad_norm"] == pytest.approx(metrics[0]["policy/grad_norm"], rel=1e-3)
