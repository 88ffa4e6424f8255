"""AdamW with its states in host memory makes the updates of PyTorch's bit for bit, however the states are divided."""

import dataclasses
import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rlhf_rollout.host import free_port
from rlhf_train.engine import host_adamw
from rlhf_train.engine.deepspeed import DeepSpeedEngine
from rlhf_train.engine.process_group import init_process_group
from rlhf_train.engine.shards import ShardReader
from rlhf_train.run.rank_state import StateWriter
from rlhf_train.specs import OptimizerSpec
from small_net import Net, equal, kept, same
from trainer_testing import run_ranks

SPEC = OptimizerSpec(
    learning_rate=0.05, betas=(0.8, 0.9), eps=1e-4, weight_decay=0.1, max_norm=0.5, scheduler="linear", warmup_steps=2,
    total_steps=9, offload=True,
)  # fmt: skip
NUM_UPDATES = 4


def new_engine(zero_stage=1, offload=True, folder=None):
    spec = dataclasses.replace(SPEC, offload=offload, offload_path=folder)
    return DeepSpeedEngine(Net().bfloat16(), spec, zero_stage=zero_stage, dtype=torch.bfloat16, device="cpu")


def train(engine, updates, rank=0):
    """Two micro-batches per update; returns the gradient norms."""
    norms = []
    for update in updates:
        for part in range(2):
            seed = 100 * update + 10 * part + rank
            rows = torch.randn(8, 5, generator=torch.Generator().manual_seed(seed)).bfloat16()
            engine.backward(engine.forward(rows).float().square().sum(), is_last=part == 1)
        norms.append(engine.step().grad_norm)
    return norms


@pytest.mark.parametrize(
    ("length", "chunk_size"),
    [(20, 1), (20, 7), (20, 20), (1000, 30), (1000, 64), (1000, 1000), (1000, 1 << 23)],
)
def test_chunks_of_any_size_get_the_steps_of_pytorchs_adamw(monkeypatch, length, chunk_size):
    """On tensors, without DeepSpeed: what it would hold is made by hand."""
    monkeypatch.setattr(host_adamw, "CHUNK_SIZE", chunk_size)
    sizes = []
    places = host_adamw._DeviceBuffers
    monkeypatch.setattr(
        host_adamw, "_DeviceBuffers", lambda size, *options: sizes.append(size) or places(size, *options)
    )
    init_process_group(rank=0, world_size=1, master=("127.0.0.1", free_port()), device="cpu")
    generator = torch.Generator().manual_seed(0)
    lengths = (length, 3)
    weights = [torch.randn(size, generator=generator).bfloat16() for size in lengths]
    gradients = [torch.zeros(size) for size in lengths]
    decays = (0.1, 0.0)
    options = {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-4}

    masters = [weight.float().requires_grad_() for weight in weights]
    held = SimpleNamespace(
        fp32_groups_flat_partition=masters,
        fp32_groups_gradient_flat_partition=gradients,
        bf16_partitioned_groups=[[weight] for weight in weights],
    )
    plain = [master.detach().clone().requires_grad_() for master in masters]

    def groups(params):
        return [{"params": [one], "weight_decay": decay} for one, decay in zip(params, decays, strict=True)]

    ours = host_adamw.HostAdamW(groups(masters), fused=False, **options)
    ours.take_over(held, is_sharded=False, rank=0, dtype=torch.float32)
    theirs = torch.optim.AdamW(groups(plain), **options)
    for update in range(5):
        for group in (*ours.param_groups, *theirs.param_groups):
            group["lr"] = 0.01 / (update + 1)
        for gradient, one in zip(gradients, plain, strict=True):
            gradient.normal_(generator=generator)
            one.grad = gradient.clone()
        ours.step()
        theirs.step()
        for master, one, weight in zip(masters, plain, weights, strict=True):
            assert torch.equal(master, one)
            assert torch.equal(weight, one.bfloat16())
            for key in ("step", "exp_avg", "exp_avg_sq"):
                assert torch.equal(ours.state[master][key], theirs.state[one][key])
            assert master.grad is None
    assert len(sizes) == 5 and max(sizes) <= min(chunk_size, length + 63)


def learn(rank, num_ranks, master, folder):
    """Per ZeRO stage: with states in host memory and without; resumed from files; after rests. Returns what differs."""
    init_process_group(rank=rank, world_size=num_ranks, master=master, device="cpu")
    host_adamw.CHUNK_SIZE = 5
    wrong = []
    for stage in (0, 1, 3):
        # The states of one are on a disk: a file of master weights, and one of moments.
        states = str(Path(folder, f"states{stage}"))
        plain, streamed = new_engine(stage, offload=False), new_engine(stage, folder=states)
        if (num_files := Path("/proc/self/maps").read_text().count(states)) != 2:
            wrong.append(f"{num_files} files")
        norms = train(plain, range(NUM_UPDATES), rank)
        if min(norms) < 2 * SPEC.max_norm:
            wrong.append(f"gradients are not clipped: {norms}")
        first = new_engine(stage)
        writer = StateWriter(rank, num_ranks)
        for engine, updates in ((streamed, range(NUM_UPDATES)), (first, range(2))):
            found = train(engine, updates, rank)
            if found != norms[: len(found)]:
                wrong.append(f"norms {found}, not {norms}")
        path = Path(folder, f"{stage}-{num_ranks}")
        path.mkdir(exist_ok=True)
        writer.save({"actor": first}, path)
        train(first, [2], rank)  # the files must not have it
        writer.finish()
        torch.distributed.barrier()
        for offload, engine in ((True, new_engine(stage)), (False, new_engine(stage, offload=False))):
            train(engine, [7], rank)  # all of this update must be gone
            engine.load_shards(ShardReader(sorted(path.glob("*.safetensors"))))
            for update in range(2, NUM_UPDATES):
                before = kept(engine)
                engine.offload()
                if any(total.untyped_storage().nbytes() for total in engine._sums):
                    wrong.append("sums of gradients stay")
                if not same(before, kept(engine)):
                    wrong.append("states change while the device has other work")
                engine.reload()
                train(engine, [update], rank)
            if not equal(engine, plain):
                wrong.append(f"stage {stage}, resumed with offload {offload}")
        if not equal(streamed, plain):
            wrong.append(f"stage {stage}")
    return wrong


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_engine_has_the_weights_and_states_of_one_that_keeps_them_on_the_device(tmp_path, num_ranks):
    assert [*itertools.chain(*run_ranks(learn, num_ranks, str(tmp_path)))] == []
