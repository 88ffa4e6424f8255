"""Invariant 3 on ranks that divide the weights of layers: they give the update of one rank that has all of them."""

from typing import Any

import numpy as np
import pytest

from rlhf_rollout.host import free_port
from split_cases import TOLERANCE, Case, all_cases, largest_difference, one_step, split_model
from trainer_testing import run_ranks

# Two neighbouring ranks have the same rollouts and halves of the matrices of the layers.
WEIGHTS_DIVIDED = {
    "divided weights, ZeRO 0": Case(micro_batch_size=5, tensor_parallel_size=2),
    "divided weights, ZeRO 1": Case(zero_stage=1, micro_batch_size=5, packing=True, tensor_parallel_size=2),
    "divided weights, ZeRO 2": Case(zero_stage=2, packing=True, micro_batch_tokens=60, tensor_parallel_size=2),
    "divided weights, shared prompts": Case(
        zero_stage=2, packing=True, share_prompts=True, micro_batch_size=5, tensor_parallel_size=2
    ),
}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> str:
    return split_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def whole(model_path) -> dict[str, Any]:
    """All weights on one rank, which is this process."""
    return one_step(0, 1, ("127.0.0.1", free_port()), model_path, Case())


@pytest.fixture(scope="module")
def on_ranks_of_divided_weights(model_path) -> list[dict[str, Any]]:
    """DeepSpeed keeps the groups of a process: no other cases may run there."""
    return run_ranks(all_cases, 4, model_path, WEIGHTS_DIVIDED)


@pytest.mark.parametrize("name", list(WEIGHTS_DIVIDED))
def test_ranks_that_divide_weights_give_the_same_update_and_count_it_once(whole, on_ranks_of_divided_weights, name):
    outcomes = [outcome[name] for outcome in on_ranks_of_divided_weights]
    for outcome in outcomes:
        for part in ("weights", "sent"):
            assert largest_difference(whole[part], outcome[part]) < TOLERANCE
        # Per layer: queries, keys and values with biases, the output, and three of the MLP.
        assert outcome["num_in_parts"] == 3 * 2 * 10
    assert whole["num_in_parts"] == 0
    # Ranks of one group are given the same, and work out the same to the last bit. Only the first of them counts.
    for first, second in zip(outcomes[::2], outcomes[1::2], strict=True):
        assert largest_difference(first["advantages"], second["advantages"]) == 0.0
        assert largest_difference(first["weights"], second["weights"]) == 0.0
        assert first["metrics"].keys() == whole["metrics"].keys() and not second["metrics"]
    for key in ("policy/loss", "value/loss", "policy/grad_norm", "value/grad_norm"):
        counted = [outcome["metrics"][key] for outcome in outcomes[::2]]
        assert np.mean(counted) == pytest.approx(whole["metrics"][key], rel=1e-3, abs=1e-5), key
