"""Gradients of bfloat16 weights add up in float32, whatever the ZeRO stage."""

import pytest
import torch

from rlhf_train.engine.deepspeed import DeepSpeedEngine, init_process_group
from rlhf_train.placement import free_port
from rlhf_train.specs import OptimizerSpec

NUM_SMALL = 256


@pytest.mark.parametrize("zero_stage", [0, 1, 2])
def test_gradients_small_against_their_sum_are_not_lost(zero_stage, capfd):
    init_process_group(rank=0, world_size=1, master_addr="127.0.0.1", master_port=free_port(), device="cpu")
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
    after = engine.state_dict()["weight"]
    torch.testing.assert_close(after, before - 0.2, atol=0.01, rtol=0)
    assert not capfd.readouterr().out
