"""A gradient that is not finite on one rank: no rank updates anything, and training goes on as if it had never been."""

import dataclasses
import math

import pytest
import torch

from rlhf_train.engine.deepspeed import DeepSpeedEngine
from rlhf_train.engine.process_group import init_process_group
from rlhf_train.specs import OptimizerSpec
from trainer_testing import run_ranks

CASES = [(stage, dtype, "") for stage in (0, 1, 2, 3) for dtype in ("float32", "bfloat16")]
CASES += [(0, "float32", "bf16_moments"), (1, "bfloat16", "bf16_moments"), (1, "bfloat16", "offload")]
GOOD = (1.0, 8.0)  # scales of the loss in the updates before and after the bad one


def learn(num_ranks, rank, zero_stage, dtype, states, bad):
    """Two updates with a bad one in between, if any: the weights around it, the final ones, and the reports."""
    torch.manual_seed(0)
    dtype = getattr(torch, dtype)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)).to(dtype)
    # The schedule changes with each update: an update that is not made must not count.
    spec = OptimizerSpec(learning_rate=0.1, max_norm=0.5, scheduler="linear", total_steps=4)
    if states:
        spec = dataclasses.replace(spec, **{states: True})
    engine = DeepSpeedEngine(model, spec, zero_stage=zero_stage, dtype=dtype, device="cpu")

    def update(scale):
        loss = engine.forward(torch.ones(1, 8, dtype=dtype)).float().square().sum()
        engine.backward(loss, is_last=False)
        loss = engine.forward(torch.full((1, 8), 0.5, dtype=dtype)).float().square().sum()
        engine.backward(loss * scale, is_last=True)
        stats = engine.step()
        return {name: value.clone() for name, value in engine.state_dict().items()}, stats

    before, _ = update(GOOD[0])
    after, bad_stats = update(bad if rank == num_ranks - 1 else 1.0) if bad is not None else (before, None)
    final, stats = update(GOOD[1])
    same = all(torch.equal(before[name], after[name]) for name in before)
    moved = any(not torch.equal(after[name], final[name]) for name in final)
    weights = {name: value.float().tolist() for name, value in final.items()}
    return same, moved, weights, tuple(stats), None if bad_stats is None else bad_stats.grad_norm


def all_cases(rank, num_ranks, master):
    """Every case without a bad update, with one of NaN, and with one of infinity."""
    init_process_group(rank=rank, world_size=num_ranks, master=master, device="cpu")
    return {case: [learn(num_ranks, rank, *case, bad) for bad in (None, math.nan, math.inf)] for case in CASES}


@pytest.fixture(scope="module")
def results():
    return run_ranks(all_cases, 2)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"ZeRO {case[0]} {case[1]} {case[2]}".strip())
def test_bad_gradient_of_one_rank_leaves_weights_optimizer_and_schedule_as_they_were(results, case):
    for rank in results:
        (_, moved, weights, stats, _), *spoiled = rank[case]
        assert moved and math.isfinite(stats[0])
        for same, moved_later, later, later_stats, bad_norm in spoiled:
            assert not math.isfinite(bad_norm)
            assert same and moved_later
            # Adam's moments and its count of updates decide the next update: it is that of a run without the bad one.
            assert (later, later_stats) == (weights, stats)
