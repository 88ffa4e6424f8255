"""States and frozen models in host memory on a GPU: pinned, with the results of a run that keeps them on the device."""

import asyncio
import dataclasses
import gc

import numpy as np
import pytest
import torch

from rlhf_models.host_states import RestingModel
from rlhf_models.testing import tiny_model_dir, tiny_reward_model_dir
from rlhf_rollout.host import free_port
from rlhf_rollout.rewards.model import LocalScorer
from rlhf_train.algorithms.table import make_algorithm
from rlhf_train.engine import host_adamw
from rlhf_train.engine.deepspeed import DeepSpeedEngine
from rlhf_train.engine.process_group import init_process_group
from rlhf_train.engine.shards import ShardReader, Shards
from rlhf_train.run.metrics import results
from rlhf_train.specs import ModelSpec, OptimizerSpec
from small_net import equal
from trainer_testing import lone_worker, random_rollouts, shard_of

SPEC = OptimizerSpec(
    learning_rate=1e-3, weight_decay=0.1, max_norm=0.5, scheduler="linear", warmup_steps=2, total_steps=9
)
VOCAB_SIZE = 1003
SHAPE = {"vocab_size": VOCAB_SIZE, "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2}
MIB = 2**20


def new_engine(*, offload, width, bf16_moments=False, zero_stage=1):
    init_process_group(rank=0, world_size=1, master=("127.0.0.1", free_port()), device="cuda")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Tanh(), torch.nn.Linear(width, 3)).bfloat16()
    spec = dataclasses.replace(SPEC, offload=offload, bf16_moments=bf16_moments)
    return DeepSpeedEngine(model, spec, zero_stage=zero_stage, dtype=torch.bfloat16, device="cuda")


def backward(engine, update):
    width = engine.module[0].in_features
    for part in range(2):
        generator = torch.Generator().manual_seed(10 * update + part)
        rows = torch.randn(16, width, generator=generator).to("cuda", torch.bfloat16)
        engine.backward(engine.forward(rows).float().square().sum(), is_last=part == 1)


def train(engine, updates):
    norms = []
    for update in updates:
        backward(engine, update)
        norms.append(engine.step().grad_norm)
    return norms


@pytest.mark.parametrize("width", [1024, 1022])  # of the second, no vectors of four elements have all master weights
@pytest.mark.parametrize("chunk_size", [1 << 16, 70_000, 1 << 23])
@pytest.mark.parametrize("bf16_moments", [False, True])
@pytest.mark.parametrize("zero_stage", [1, 3])
def test_updates_by_chunks_are_those_of_states_on_the_device_bit_for_bit(
    tmp_path, monkeypatch, width, chunk_size, bf16_moments, zero_stage
):
    monkeypatch.setattr(host_adamw, "CHUNK_SIZE", chunk_size)
    options = {"width": width, "bf16_moments": bf16_moments, "zero_stage": zero_stage}
    plain, streamed = (new_engine(offload=offload, **options) for offload in (False, True))
    norms = train(plain, range(5))
    assert min(norms) > SPEC.max_norm
    assert train(streamed, range(3)) == norms[:3]
    shards = Shards()
    streamed.save_shards(shards)
    shards.write(tmp_path / "0.safetensors")
    streamed.offload()
    assert all(total.untyped_storage().nbytes() == 0 for total in streamed._sums)
    streamed.reload()
    resumed = new_engine(offload=True, **options)
    resumed.load_shards(ShardReader([tmp_path / "0.safetensors"]))
    for engine in (streamed, resumed):
        assert train(engine, range(3, 5)) == norms[3:]
        assert equal(engine, plain)


def test_states_are_in_pinned_memory_and_an_update_needs_little_of_the_device():
    gc.collect()
    start = torch.cuda.memory_allocated()
    engine = new_engine(offload=True, width=8192)
    num_weights = sum(weight.numel() for weight in engine.module.parameters())
    inner = engine._inner_optimizer
    for place in engine._slices:
        for part in (place.flat, *(inner.state[place.flat][key] for key in ("exp_avg", "exp_avg_sq"))):
            assert part.device.type == "cpu" and part.is_pinned()
    # bfloat16 weights and float32 sums of gradients; states would take 12 bytes more.
    assert torch.cuda.memory_allocated() - start < 6 * num_weights + 16 * MIB
    for update in range(2):
        backward(engine, update)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        engine.step()
        chunks = host_adamw._NUM_BUFFERS * 12 * host_adamw.CHUNK_SIZE
        assert chunks < 12 * num_weights / 2
        assert torch.cuda.max_memory_allocated() - before < chunks + 16 * MIB
        assert torch.cuda.memory_allocated() < before + MIB
    assert all(part.is_pinned() for part in inner.state[engine._slices[0].flat].values() if part.ndim)


def test_moments_in_bfloat16_are_half_as_large_on_the_device_and_the_update_needs_nothing_else():
    gc.collect()
    start = torch.cuda.memory_allocated()
    engine = new_engine(offload=False, width=8192, bf16_moments=True)
    num_weights = sum(weight.numel() for weight in engine.module.parameters())
    train(engine, [0])
    # Weights, sums of gradients, master weights and moments.
    assert torch.cuda.memory_allocated() - start < (2 + 4 + 4 + 4) * num_weights + 16 * MIB
    backward(engine, 1)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    engine.step()
    assert torch.cuda.max_memory_allocated() - before < 16 * MIB


def reference_of(paths, *, offload, compiled):
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    options = {"dtype": "bfloat16", "packing": True, "torch_compile": "on" if compiled else "off"}
    spec = ModelSpec(path=paths["reference"], offload=offload, **options)
    worker = lone_worker({"reference": spec}, make_algorithm(kl_coef=0.05), temperature=0.8, device="cuda")
    rollouts = random_rollouts(24, vocab_size=VOCAB_SIZE, max_prompt=100, max_response=200)
    worker.load_rollouts(*shard_of(rollouts, 8, longest=400)[1:])
    return worker, torch.cuda.memory_allocated() - before


@pytest.mark.parametrize("compiled", [False, True])
def test_reference_leaves_the_device_between_its_passes_and_computes_the_same(tmp_path, compiled):
    paths = {"reference": str(tiny_model_dir(tmp_path, seed=1, **SHAPE))}
    plain, taken = reference_of(paths, offload=False, compiled=compiled)
    plain.run_model("reference")
    wanted = plain._experience.columns["ref_logprobs"].clone()
    worker, taken_at_rest = reference_of(paths, offload=True, compiled=compiled)
    model = worker._frozen["reference"]
    assert isinstance(model, RestingModel)
    num_bytes = sum(weight.nbytes for weight in model._weights)
    assert taken > num_bytes > MIB
    assert taken_at_rest < taken - 0.9 * num_bytes
    for _ in range(2):
        worker.run_model("reference")
        assert torch.equal(worker._experience.columns["ref_logprobs"], wanted)
        assert all(weight.device.type == "cpu" and weight.is_pinned() for weight in model._weights)
        worker.offload()
        worker.reload()


def test_reward_model_leaves_the_device_between_calls_and_scores_the_same(tmp_path):
    folder = str(tiny_reward_model_dir(tmp_path, **(SHAPE | {"hidden_size": 1024})))
    sequences = [np.arange(3, 3 + length, dtype=np.int32) for length in (5, 1, 40, 12)]
    plain = LocalScorer(folder, device="cuda")
    wanted = asyncio.run(plain.score(sequences))
    scorer = LocalScorer(folder, device="cuda", offload=True)
    model = scorer._awake.args[0]
    num_bytes = sum(weight.nbytes for weight in model._weights)
    for _ in range(2):
        assert asyncio.run(scorer.score(sequences)) == wanted
        with model.awake():
            awake = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        assert awake[0] - torch.cuda.memory_allocated() >= num_bytes
        assert torch.cuda.memory_reserved() < awake[1]  # other processes can have it
    for one in (plain, scorer):
        one.close()


def trained_pair(path, *, trains_in_turn):
    """Return metrics of two steps of policy and critic, and the peak of their memory in bytes."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    frozen = ModelSpec(path=path, dtype="bfloat16", packing=True)
    trained = dataclasses.replace(frozen, optimizer=SPEC)
    models = {"actor": trained, "critic": trained, "reference": frozen}
    options = {"temperature": 0.8, "device": "cuda", "trains_in_turn": trains_in_turn}
    worker = lone_worker(models, make_algorithm(kl_coef=0.05), **options)
    rollouts = random_rollouts(8, vocab_size=VOCAB_SIZE, max_prompt=20, max_response=40)
    metrics = {}
    for step in range(2):
        worker.load_rollouts(*shard_of(rollouts, 8, longest=100)[1:])
        for role in ("actor", "reference", "critic"):
            worker.run_model(role)
        worker.assign_advantages(0.05)
        for role in ("critic", "actor"):
            found = results(worker.update(role, max_epochs=1, seed=step))
            metrics |= {f"{step} {name}": value for name, value in found.items()}
        worker.offload()
        worker.reload()
    num_weights = sum(weight.numel() for weight in worker.engines["actor"].module.parameters())
    return metrics, worker.peak_memory_bytes() - before, num_weights


def test_models_that_train_in_turn_need_the_states_of_one_and_learn_the_same(tmp_path):
    path = str(tiny_model_dir(tmp_path, **(SHAPE | {"hidden_size": 2048, "intermediate_size": 4096})))
    wanted, at_once, num_weights = trained_pair(path, trains_in_turn=False)
    found, in_turn, _ = trained_pair(path, trains_in_turn=True)
    assert found == pytest.approx(wanted, rel=1e-3, abs=1e-5)
    # The other model's master weights and moments, in float32, and the reference in bfloat16.
    assert at_once - in_turn > 0.9 * (12 + 2) * num_weights > 100 * MIB
