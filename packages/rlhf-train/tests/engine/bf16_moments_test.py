"""AdamW with moments in bfloat16: near AdamW in float32 at every ZeRO stage, and the same run after a resumption."""

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch

from rlhf_rollout.host import free_port
from rlhf_train.engine import host_adamw
from rlhf_train.engine.deepspeed import DeepSpeedEngine
from rlhf_train.engine.process_group import init_process_group
from rlhf_train.engine.shards import ShardReader, Shards
from rlhf_train.specs import OptimizerSpec
from small_net import Net, equal, kept
from trainer_testing import run_ranks

SPEC = OptimizerSpec(
    learning_rate=0.01, weight_decay=0.1, max_norm=0.5, scheduler="linear", warmup_steps=2, total_steps=99,
    bf16_moments=True,
)  # fmt: skip
STAGES = (0, 1, 2, 3)
DTYPES = (torch.float32, torch.bfloat16)
NUM_UPDATES = 12


def new_engine(stage, dtype, **changes):
    spec = dataclasses.replace(SPEC, **changes)
    return DeepSpeedEngine(Net(17).to(dtype), spec, zero_stage=stage, dtype=dtype, device="cpu")


def train(engine, updates, rank=0):
    for update in updates:
        generator = torch.Generator().manual_seed(10 * update + rank)
        rows = torch.randn(8, 5, generator=generator).to(engine.module.frozen.dtype)
        engine.backward(engine.forward(rows).float().square().sum(), is_last=True)
        engine.step()
    return engine


def save(engine, path):
    shards = Shards()
    engine.save_shards(shards)
    if shards.tensors:
        shards.write(path)
    torch.distributed.barrier()


def load(engine, folder, name):
    engine.load_shards(ShardReader(sorted(Path(folder).glob(f"{name}-*.safetensors"))))
    return engine


def distances(engine, plain, start):
    """How far two runs are apart, and how far they came."""
    pairs = [(engine.state_dict()[name].float(), plain.state_dict()[name].float(), start[name]) for name in start]
    apart, way = zip(*(((one - other).norm(), (other - begin).norm()) for one, other, begin in pairs), strict=True)
    return float(torch.stack(apart).norm()), float(torch.stack(way).norm())


def learn(rank, num_ranks, master, folder):
    """Per stage and dtype: against moments in float32; resumed; after rests; from and to files with the other type.

    Returns what is wrong.
    """
    init_process_group(rank=rank, world_size=num_ranks, master=master, device="cpu")
    wrong = []
    for stage, dtype in itertools.product(STAGES, DTYPES):
        case = f"rank {rank} of {num_ranks}, stage {stage}, {dtype}"
        start = {name: weight.float() for name, weight in Net(17).to(dtype).state_dict().items()}
        straight, plain = new_engine(stage, dtype), new_engine(stage, dtype, bf16_moments=False)
        for engine, name in ((straight, "bf16"), (plain, "fp32")):
            train(engine, range(2), rank)
            save(engine, Path(folder, f"{name}-{stage}-{dtype}-{rank}.safetensors"))
            train(engine, range(2, NUM_UPDATES), rank)
        moments = [part for name, part in kept(straight).items() if name.startswith("exp_avg")]
        if {part.dtype for part in moments} - {torch.bfloat16} or (rank == 0 and not moments):
            wrong.append(f"{case}: moments are {[part.dtype for part in moments]}")
        states = [
            part for state in straight._inner_optimizer.state.values() for part in state.values() if part.numel() > 1
        ]
        if sum(part.nbytes for part in states) != 4 * sum(flat.numel() for flat in straight._inner_optimizer.state):
            wrong.append(f"{case}: bytes of states")
        apart, way = distances(straight, plain, start)
        if not 0 < apart < 0.02 * way:
            wrong.append(f"{case}: {apart} from float32, on a way of {way}")
        resumed = train(new_engine(stage, dtype), [7], rank)  # everything of this update must be gone
        load(resumed, folder, f"bf16-{stage}-{dtype}")
        fresh = load(new_engine(stage, dtype), folder, f"bf16-{stage}-{dtype}")
        for update in range(2, NUM_UPDATES):
            resumed.offload()
            resumed.reload()
            train(resumed, [update], rank)
            train(fresh, [update], rank)
        if not equal(resumed, straight) or not equal(fresh, straight):
            wrong.append(f"{case}: resumed")
        # A run that changes the type of its moments goes on from rounded, or from the same ones.
        if stage not in (0, 1):
            continue
        for bf16_moments, name in ((True, "fp32"), (False, "bf16")):
            changed = load(new_engine(stage, dtype, bf16_moments=bf16_moments), folder, f"{name}-{stage}-{dtype}")
            source = load(new_engine(stage, dtype, bf16_moments=not bf16_moments), folder, f"{name}-{stage}-{dtype}")
            for one, other in zip(kept(changed).values(), kept(source).values(), strict=True):
                if not torch.equal(one, other.to(one.dtype)):
                    wrong.append(f"{case}: {name} as read by the other")
            train(changed, range(2, NUM_UPDATES), rank)
            apart, way = distances(changed, plain, start)
        if not 0 < apart < 0.02 * way:
            wrong.append(f"{case}: {apart} from float32 after a change of {name}, on a way of {way}")
    return wrong


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_every_zero_stage_stays_near_float32_and_resumes_bit_for_bit(tmp_path, num_ranks):
    assert [*itertools.chain(*run_ranks(learn, num_ranks, str(tmp_path)))] == []


@pytest.mark.parametrize("chunk_size", [7, 64, 1 << 23])
def test_states_in_host_memory_make_the_same_updates_bit_for_bit(tmp_path, monkeypatch, chunk_size):
    monkeypatch.setattr(host_adamw, "CHUNK_SIZE", chunk_size)
    init_process_group(rank=0, world_size=1, master=("127.0.0.1", free_port()), device="cpu")
    straight = train(new_engine(1, torch.bfloat16), range(2))
    streamed = train(new_engine(1, torch.bfloat16, offload=True), range(2))
    assert equal(straight, streamed)
    for name, engine in (("device", straight), ("host", streamed)):
        save(engine, tmp_path / f"{name}-0.safetensors")
    train(straight, range(2, 6))
    loaded = [load(new_engine(1, torch.bfloat16, offload=offload), tmp_path, name)
              for offload, name in ((False, "host"), (True, "device"), (True, "host"))]  # fmt: skip
    for engine in (streamed, *loaded):
        assert equal(train(engine, range(2, 6)), straight)
    for state in streamed._inner_optimizer.state.values():
        assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.bfloat16
        assert state["exp_avg"].untyped_storage().nbytes() < 4 * sum(map(len, streamed._inner_optimizer.state)) + 2048
