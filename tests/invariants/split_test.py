"""Invariants 1 to 3 on a trainer's ranks: nothing has happened at step 0; packed equals padded; any split into
micro-batches, data-parallel ranks and ZeRO stages gives the same update."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from rlhf_rollout.host import free_port, local_gpus
from rlhf_train.algorithms.table import make_algorithm
from rlhf_train.batching import plan_batches
from rlhf_train.learning.columns import RolloutColumns
from rlhf_train.specs import ModelSpec
from split_cases import (
    NUM_ROLLOUTS,
    OPTIMIZER,
    TOLERANCE,
    VOCAB_SIZE,
    Case,
    all_cases,
    grouped_rollouts,
    largest_difference,
    split_model,
)
from trainer_testing import random_rollouts, run_ranks

SPLITS = {
    "whole": Case(),
    "micro batches of 5": Case(micro_batch_size=5),
    "packed": Case(packing=True),
    "packed micro batches of 5": Case(packing=True, micro_batch_size=5),
    "shared prompts": Case(packing=True, share_prompts=True),
    "shared prompts in micro batches of 5": Case(packing=True, share_prompts=True, micro_batch_size=5),
    "ZeRO 1, packed to 60 tokens": Case(zero_stage=1, packing=True, micro_batch_tokens=60),
    "ZeRO 2": Case(zero_stage=2, micro_batch_size=8),
    "ZeRO 3": Case(zero_stage=3, micro_batch_size=8),
}
RANKS = {
    "ZeRO 0": Case(zero_stage=0, micro_batch_size=5),
    "ZeRO 1": Case(zero_stage=1, micro_batch_size=5),
    "ZeRO 2": Case(zero_stage=2, micro_batch_size=5),
    "ZeRO 3": Case(zero_stage=3, micro_batch_size=5, packing=True),
    "ZeRO 3, copies": Case(zero_stage=3, micro_batch_size=5, zpg=2),
}
ADAPTERS_ON_RANKS = {
    "adapters, ZeRO 2": Case(zero_stage=2, micro_batch_size=5, lora_rank=4),
    "adapters, ZeRO 3": Case(zero_stage=3, micro_batch_size=5, packing=True, lora_rank=4),
}
# Both ranks have all rollouts, and each computes one half of every pass. A batch of an odd number of tokens is padded.
DIVIDED = {
    "divided sequences, ZeRO 0": Case(micro_batch_size=5, packing=True, sequence_parallel_size=2),
    "divided sequences, ZeRO 2": Case(zero_stage=2, micro_batch_size=8, packing=True, sequence_parallel_size=2),
    "divided sequences, ZeRO 3": Case(zero_stage=3, packing=True, micro_batch_tokens=60, sequence_parallel_size=2),
}
# Two pairs of ranks divide sequences, or keep a second copy of the weights each.
ON_FOUR_RANKS = {
    "divided sequences, ZeRO 2": DIVIDED["divided sequences, ZeRO 2"],
    "ZeRO 3, copies": RANKS["ZeRO 3, copies"],
    "adapters, ZeRO 3": ADAPTERS_ON_RANKS["adapters, ZeRO 3"],
}
DRAFT = {"draft": Case(zero_stage=2, micro_batch_size=5, has_draft=True)}
# Passes of one rollout, whose gradients do not depend on the split: only how they are added up differs. One update, for
# the forward pass of the next would turn one different bit of a weight into a different gradient.
BFLOAT16 = {
    f"bfloat16, ZeRO {stage}": Case(stage, micro_batch_size=1, dtype="bfloat16", num_rollouts=12, num_mini_batches=1)
    for stage in (1, 2, 3)
}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> str:
    return split_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def outcomes(model_path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The cases on one rank, which is this process, and meanwhile those on two, in processes of their own."""
    with ThreadPoolExecutor(1) as pool:
        pair = pool.submit(run_ranks, all_cases, 2, model_path, RANKS | DIVIDED | ADAPTERS_ON_RANKS | DRAFT | BFLOAT16)
        cases = SPLITS | BFLOAT16 | {"one other reward": Case(first_reward=3.0), "adapters": Case(lora_rank=4)}
        cases["draft"] = Case(has_draft=True)
        return all_cases(0, 1, ("127.0.0.1", free_port()), model_path, cases), pair.result()


@pytest.fixture(scope="module")
def on_one_rank(outcomes) -> dict[str, Any]:
    return outcomes[0]


@pytest.fixture(scope="module")
def on_two_ranks(outcomes) -> list[dict[str, Any]]:
    return outcomes[1]


@pytest.fixture(scope="module")
def on_four_ranks(model_path) -> list[dict[str, Any]]:
    return run_ranks(all_cases, 4, model_path, ON_FOUR_RANKS)


def share_of_different(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    assert one.keys() == other.keys()
    return float(np.mean(np.concatenate([(one[name] != other[name]).ravel() for name in one])))


def test_step_zero_policy_equals_reference_exactly(on_one_rank):
    for name, outcome in on_one_rank.items():
        assert outcome["same_as_reference"], name
        assert outcome["metrics"]["kl/reference"] == 0.0, name


def test_first_update_ratio_is_exactly_one(model_path):
    assert ratio_of_first_update(model_path, Case(algorithm=make_algorithm(kl_coef=0.05))) == 1.0


def ratio_of_first_update(path: str, case: Case) -> float:
    """Return the largest ratio that the first update sees, or its inverse if that is farther from 1."""
    import torch

    from rlhf_train.learning.worker import TrainWorker

    spec = ModelSpec(path=path, zero_stage=0, optimizer=OPTIMIZER)
    frozen = ModelSpec(path=path)
    worker = TrainWorker(
        {"actor": spec, "critic": spec, "reference": frozen},
        case.algorithm,
        temperature=1.0,
        rank=0,
        num_ranks=1,
        master=("127.0.0.1", free_port()),
        device="cuda" if torch.cuda.is_available() else "cpu",
        seed=0,
    )
    rollouts = random_rollouts(8, vocab_size=VOCAB_SIZE)
    lengths = [rollout.num_tokens for rollout in rollouts]
    plan = plan_batches(
        lengths, lengths, num_ranks=1, num_mini_batches=1, micro_train_batch_size=8, micro_rollout_batch_size=8,
        max_response_tokens=24, seed=0,
    )[0]  # fmt: skip
    worker.load_rollouts(RolloutColumns.of([rollouts[row] for row in plan.rows], [0.0] * 8), plan)
    for role in ("actor", "critic", "reference"):
        worker.run_model(role)
    worker.assign_advantages(kl_coef=0.05)
    engine, seen = worker.engines["actor"], []
    forward = engine.forward

    def recorded(batch: Any, **options: Any) -> Any:
        output = forward(batch, **options)
        ratios = torch.exp(output.logprobs[options["logits_mask"].to(engine.device)] - options["stream"].old_logprobs)
        seen.append(torch.maximum(ratios, 1 / ratios).max())
        return output

    engine.forward = recorded
    worker.update("actor", max_epochs=1, seed=0)
    [largest] = seen
    return float(largest)


@pytest.mark.parametrize("name", [name for name in SPLITS if name != "whole"])
def test_split_on_one_rank_gives_the_same_update(on_one_rank, name):
    assert largest_difference(on_one_rank["whole"]["weights"], on_one_rank[name]["weights"]) < TOLERANCE


@pytest.mark.parametrize("name", list(RANKS))
def test_split_over_two_ranks_gives_the_same_update(on_one_rank, on_two_ranks, name):
    for outcome in on_two_ranks:
        assert largest_difference(on_one_rank["whole"]["weights"], outcome[name]["weights"]) < TOLERANCE


def test_all_models_have_a_second_copy_where_it_is_asked_for(on_two_ranks):
    for outcome in on_two_ranks:
        assert {name: result["num_copied"] for name, result in outcome.items() if result["num_copied"]} == {
            "ZeRO 3, copies": 3
        }


@pytest.mark.parametrize("name", list(DIVIDED))
def test_two_ranks_that_divide_sequences_give_the_same_update_and_count_it_once(on_one_rank, on_two_ranks, name):
    whole = on_one_rank["whole"]
    for outcome in on_two_ranks:
        assert outcome[name]["same_as_reference"] and outcome[name]["num_divided"] == 3
        assert largest_difference(whole["weights"], outcome[name]["weights"]) < TOLERANCE
        assert largest_difference(whole["advantages"], outcome[name]["advantages"]) < 1e-5
    assert whole["num_divided"] == 0
    first, second = (outcome[name]["metrics"] for outcome in on_two_ranks)
    assert not second
    assert first.keys() == whole["metrics"].keys()
    for key, value in first.items():
        assert value == pytest.approx(whole["metrics"][key], rel=1e-3, abs=1e-5), key


@pytest.mark.parametrize("name", list(ADAPTERS_ON_RANKS))
def test_split_of_adapters_over_two_ranks_gives_the_same_update_and_sends_the_same_weights(
    on_one_rank, on_two_ranks, name
):
    for outcome in on_two_ranks:
        assert outcome[name]["same_as_reference"]
        for part in ("weights", "sent", "sent_adapters"):
            assert largest_difference(on_one_rank["adapters"][part], outcome[name][part]) < TOLERANCE
    assert largest_difference(on_one_rank["adapters"]["sent"], on_one_rank["whole"]["sent"]) > 100 * TOLERANCE


def test_draft_model_on_two_ranks_gets_the_same_update(on_one_rank, on_two_ranks):
    for outcome in on_two_ranks:
        assert largest_difference(on_one_rank["draft"]["weights"], outcome["draft"]["weights"]) < TOLERANCE


@pytest.mark.parametrize("name", list(ON_FOUR_RANKS))
def test_split_over_four_ranks_gives_the_same_update(on_one_rank, on_four_ranks, name):
    whole = on_one_rank["adapters" if name in ADAPTERS_ON_RANKS else "whole"]
    for outcome in on_four_ranks:
        assert outcome[name]["same_as_reference"] and outcome[name]["metrics"].get("kl/reference", 0.0) == 0.0
        assert largest_difference(whole["weights"], outcome[name]["weights"]) < TOLERANCE
        assert outcome[name]["num_divided"] == (3 if name in DIVIDED else 0)
        assert outcome[name]["num_copied"] == (3 if name == "ZeRO 3, copies" else 0)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("name", list(BFLOAT16))
def test_split_in_bfloat16_gives_the_same_update(on_one_rank, on_two_ranks, name, num_ranks):
    # One GPU is for one rank: two ranks are on the CPU then, which rounds products in bfloat16 otherwise.
    computed_alike = on_two_ranks[0] if num_ranks == 2 and local_gpus() == 1 else on_one_rank
    expected = computed_alike["bfloat16, ZeRO 1"]
    for outcome in [on_one_rank] if num_ranks == 1 else on_two_ranks:
        # Sums of float32 in another order differ in their last bit, which changes few weights after rounding.
        assert share_of_different(expected["weights"], outcome[name]["weights"]) < 0.005
        for metric in ("policy/grad_norm", "value/grad_norm"):
            assert outcome[name]["metrics"][metric] == pytest.approx(expected["metrics"][metric], rel=1e-4)


@pytest.mark.parametrize("name", list(RANKS))
def test_two_ranks_whiten_over_both(on_one_rank, on_two_ranks, name):
    together = on_two_ranks[0][name]["advantages"] | on_two_ranks[1][name]["advantages"]
    alone = on_one_rank["whole"]["advantages"]
    assert together.keys() == alone.keys() and len(alone) == NUM_ROLLOUTS
    assert max(float(np.abs(alone[key] - together[key]).max()) for key in alone) < 1e-5
    # Mean 0 and deviation 1 over the trained tokens of both ranks, and of neither rank's alone.
    masks = {rollout.rollout_id: rollout.loss_mask for rollout in grouped_rollouts(NUM_ROLLOUTS)}
    whole, *shards = (
        np.concatenate([columns[key][masks[key]] for key in columns], dtype=np.float64)
        for columns in (together, *(rank[name]["advantages"] for rank in on_two_ranks))
    )
    assert (whole.mean(), whole.std()) == pytest.approx((0.0, 1.0), abs=1e-5)
    assert all(abs(shard.mean()) > 1e-3 and abs(shard.std() - 1) > 1e-3 for shard in shards)


def test_gradient_norm_does_not_depend_on_the_split(on_one_rank, on_two_ranks):
    for name in ("policy/grad_norm", "value/grad_norm"):
        expected = on_one_rank["whole"]["metrics"][name]
        assert expected > 0
        in_float32 = [{split: on_one_rank[split] for split in SPLITS}]
        in_float32 += [{split: outcome[split] for split in RANKS} for outcome in on_two_ranks]
        for outcomes in in_float32:
            norms = [outcome["metrics"][name] for outcome in outcomes.values()]
            assert norms == pytest.approx([expected] * len(norms), rel=1e-4)


def test_update_moves_every_weight(on_one_rank, model_path):
    from rlhf_models.loading import load_actor

    before = {
        f"actor.{name}": p.detach().numpy() for name, p in load_actor(model_path, dtype="float32").named_parameters()
    }
    after = on_one_rank["whole"]["weights"]
    still = [name for name, value in before.items() if np.array_equal(value, after[name])]
    assert not still


def test_one_other_reward_of_all_gives_a_different_update(on_one_rank):
    moved = on_one_rank["one other reward"]["weights"]
    for role in ("actor", "critic"):
        own = {name: weight for name, weight in moved.items() if name.startswith(role)}
        whole = {name: on_one_rank["whole"]["weights"][name] for name in own}
        assert largest_difference(whole, own) > 100 * TOLERANCE, role
