"""Gradients of bfloat16 weights add up in float32, whatever the ZeRO stage."""

import pytest
import torch

from rlhf_rollout.host import free_port
from rlhf_train.engine.deepspeed import DeepSpeedEngine
from rlhf_train.engine.process_group import init_process_group
from rlhf_train.engine.shards import Shards
from rlhf_train.specs import OptimizerSpec
from trainer_testing import run_ranks

NUM_SMALL = 256
SCALES = (1.0, 8.0, 0.125)
STAGES = (1, 2, 3)
SMALL = 1 / 512  # of the second rank's gradient: lost where 1 + SMALL is a bfloat16


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_gradients_small_against_their_sum_are_not_lost(zero_stage, capfd):
    init_process_group(rank=0, world_size=1, master=("127.0.0.1", free_port()), device="cpu")
    model = torch.nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
    before = model.weight.detach().clone()
    spec = OptimizerSpec(learning_rate=0.1, max_norm=0.0, scheduler="constant")
    engine = DeepSpeedEngine(model, spec, zero_stage=zero_stage, dtype=torch.bfloat16, device="cpu")
    ones = torch.ones(1, 4, dtype=torch.bfloat16)
    for _ in range(2):
        engine.backward(engine.forward(ones).float().sum(), is_last=False)
        for index in range(NUM_SMALL):  # each of 1/256: bfloat16 has 1 + 1/128 next to 1
            engine.backward(engine.forward(ones).float().sum() / NUM_SMALL, is_last=index == NUM_SMALL - 1)
        # 16 weights, each with the gradient 1 + 256 / 256; the same again: nothing is left of the step before.
        assert engine.step().grad_norm == pytest.approx(8.0, rel=1e-6)
        check_absence(engine)
    after = engine.state_dict()["weight"]
    torch.testing.assert_close(after, before - 0.2, atol=0.01, rtol=0)
    assert not capfd.readouterr().out


def check_absence(engine):
    """Have the optimizer's states leave and come back: what a checkpoint takes of them is the same all the time."""
    there, away, back = Shards(), Shards(), Shards()
    engine.save_shards(there)
    engine.offload()
    assert {total.untyped_storage().nbytes() for total in engine._sums} <= {0}
    engine.save_shards(away)
    engine.reload()
    engine.save_shards(back)
    assert {name.partition("/")[0] for name in there.tensors} == {"weight", "exp_avg", "exp_avg_sq"}
    for name, part in there.tensors.items():
        assert torch.equal(part, away.tensors[name]) and torch.equal(part, back.tensors[name])
    assert not any(total.any() for total in engine._sums)


def learn(rank, num_ranks, master, zero_stage):
    """Three steps of a layer whose bias is in another group, and one weight of which is frozen."""
    init_process_group(rank=rank, world_size=num_ranks, master=master, device="cpu")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, dtype=torch.bfloat16), torch.nn.Linear(4, 4).bfloat16())
    model[1].requires_grad_(False)
    torch.nn.init.eye_(model[1].weight)
    before = plain(model.state_dict())
    spec = OptimizerSpec(learning_rate=0.1, max_norm=0.5, scheduler="constant")
    engine = DeepSpeedEngine(model, spec, zero_stage=zero_stage, dtype=torch.bfloat16, device="cpu")
    norms = []
    for scale in SCALES:
        loss = engine.forward(torch.ones(1, 4, dtype=torch.bfloat16)).float().sum() * scale
        engine.backward(loss * (SMALL if rank else 1.0), is_last=True)
        norms.append(engine.step().grad_norm)
    return before, plain(engine.state_dict()), norms


def plain(state):
    """Numbers that outlive the process that made them."""
    return {name: value.float().tolist() for name, value in state.items()}


def learn_at_all_stages(rank, num_ranks, master):
    """The steps of each ZeRO stage in one process, which takes longer to import than to learn."""
    return {stage: learn(rank, num_ranks, master, stage) for stage in STAGES}


@pytest.fixture(scope="module")
def results_by_ranks():
    """By number of ranks: what each rank got at each ZeRO stage."""
    alone = learn_at_all_stages(0, 1, ("127.0.0.1", free_port()))
    return {1: [alone], 2: run_ranks(learn_at_all_stages, 2)}


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("zero_stage", STAGES)
def test_whole_groups_are_clipped_and_ranks_add_up_in_float32(results_by_ranks, num_ranks, zero_stage):
    for before, after, norms in [result[zero_stage] for result in results_by_ranks[num_ranks]]:
        total = 1 + SMALL * (num_ranks - 1)
        # 16 weights and 4 biases, each with the gradient `scale * total`.
        assert norms == pytest.approx([scale * total * 20**0.5 for scale in SCALES], rel=1e-6)
        trained = [torch.tensor(before[f"0.{name}"]).requires_grad_() for name in ("weight", "bias")]
        optimizer = torch.optim.AdamW(trained, lr=0.1, betas=(0.9, 0.95), weight_decay=0.0)
        for scale in SCALES:
            for weight in trained:
                weight.grad = torch.full_like(weight, scale * total)
            torch.nn.utils.clip_grad_norm_(trained, 0.5)
            optimizer.step()
        for name, want in zip(("weight", "bias"), trained, strict=True):
            torch.testing.assert_close(torch.tensor(after[f"0.{name}"]), want.detach(), atol=4e-3, rtol=0)
        assert all(after[name] == before[name] for name in ("1.weight", "1.bias"))
