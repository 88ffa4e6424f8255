"""Invariants 1 to 3 on a trainer's ranks: nothing has happened at step 0; packed equals padded; any split into
micro-batches, data-parallel ranks and ZeRO stages gives the same update."""

import dataclasses
import functools
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from rlhf_data.records import Rollout
from rlhf_models.testing import tiny_model_dir
from rlhf_rollout.host import free_port, local_gpus
from rlhf_train.algorithms import AlgorithmSpec, make_algorithm
from rlhf_train.batching import RankPlan, plan_batches
from rlhf_train.columns import RolloutColumns
from rlhf_train.specs import ModelSpec, OptimizerSpec
from trainer_testing import random_rollouts, run_ranks

NUM_ROLLOUTS, VOCAB_SIZE = 32, 512
# Adam divides by the gradient's own size, which turns rounding of a gradient near 0 into a step of full size; this
# epsilon, above that rounding, keeps the update a smooth function of the gradient.
OPTIMIZER = OptimizerSpec(learning_rate=1e-2, eps=1e-4, scheduler="constant", max_norm=1.0)
# Largest difference of a weight after two updates of about 1e-2 each, in float32.
TOLERANCE = 2e-5


# In bfloat16 the steps of Adam are large and about proportional to the gradient (its epsilon is far above it): a sum of
# gradients that was rounded to bfloat16 then changes many weights. There is no clipping, because the last digits of its
# factor differ between the stages.
BFLOAT16_OPTIMIZER = OptimizerSpec(learning_rate=1.0, eps=1.0, scheduler="constant", max_norm=0.0)
PPO_WITH_KL_LOSS = make_algorithm(kl_coef=0.05, use_kl_loss=True, kl_estimator="k3")


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to split the same work."""

    zero_stage: int = 0
    micro_batch_size: int = 32
    packing: bool = False
    micro_batch_tokens: int | None = None
    algorithm: AlgorithmSpec = PPO_WITH_KL_LOSS
    dtype: str = "float32"
    num_rollouts: int = NUM_ROLLOUTS
    num_mini_batches: int = 2
    first_reward: float | None = None  # in place of the first rollout's own
    lora_rank: int = 0
    sequence_parallel_size: int = 1
    share_prompts: bool = False
    zpg: int = 1
    tensor_parallel_size: int = 1

    @property
    def ranks_per_batch(self) -> int:
        """Ranks that have the same rollouts."""
        return self.sequence_parallel_size * self.tensor_parallel_size


SPLITS = {
    "whole": Case(),
    "micro batches of 8": Case(micro_batch_size=8),
    "micro batches of 4": Case(micro_batch_size=4),
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
# Two neighbouring ranks have the same rollouts and halves of the matrices of the layers.
WEIGHTS_DIVIDED = {
    "divided weights, ZeRO 0": Case(micro_batch_size=5, tensor_parallel_size=2),
    "divided weights, ZeRO 1": Case(zero_stage=1, micro_batch_size=5, packing=True, tensor_parallel_size=2),
    "divided weights, ZeRO 2": Case(zero_stage=2, packing=True, micro_batch_tokens=60, tensor_parallel_size=2),
    "divided weights, shared prompts": Case(
        zero_stage=2, packing=True, share_prompts=True, micro_batch_size=5, tensor_parallel_size=2
    ),
}
# Passes of one rollout, whose gradients do not depend on the split: only how they are added up differs. One update, for
# the forward pass of the next would turn one different bit of a weight into a different gradient.
BFLOAT16 = {
    f"bfloat16, ZeRO {stage}": Case(stage, micro_batch_size=1, dtype="bfloat16", num_rollouts=12, num_mini_batches=1)
    for stage in (1, 2, 3)
}


@functools.cache
def device_of(rank: int, num_ranks: int) -> str:
    """Return where a rank computes: on a GPU of its own where there are enough. Call it before torch is imported."""
    if local_gpus() < num_ranks:
        return "cpu"
    if num_ranks > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
    return "cuda"


def grouped_rollouts(count: int) -> list[Rollout]:
    """Return random rollouts, four to a prompt."""
    rollouts = random_rollouts(count, vocab_size=VOCAB_SIZE)
    prompts = [rollouts[index - index % 4].spans[0] for index in range(count)]
    return [
        dataclasses.replace(rollout, spans=(prompt, *rollout.spans[1:]))
        for rollout, prompt in zip(rollouts, prompts, strict=True)
    ]


def has_copies(model: Any) -> bool:
    """Return whether passes of a model gather its weights from a second copy on some of the ranks."""
    return getattr(next(model.parameters()), "ds_zero_param_process_group", None) is not None


def plan_of(rank: int, num_ranks: int, case: Case, rollouts: list[Rollout]) -> RankPlan:
    """Return the part of the work that this rank gets."""
    return plan_batches(
        [rollout.num_tokens for rollout in rollouts],
        [rollout.num_response_tokens for rollout in rollouts],
        num_ranks=num_ranks // case.ranks_per_batch,
        num_mini_batches=case.num_mini_batches,
        micro_train_batch_size=case.micro_batch_size,
        micro_rollout_batch_size=case.micro_batch_size,
        max_response_tokens=24,
        seed=3,
        micro_batch_tokens=case.micro_batch_tokens,
    )[rank // case.ranks_per_batch]


def one_step(rank: int, num_ranks: int, master: Any, path: str, case: Case) -> dict[str, Any]:
    """Run one step of PPO, usually of two updates per model; return the weights and the metrics."""
    device_of(rank, num_ranks)
    import torch

    from rlhf_models.lora import LoraSpec
    from rlhf_train.engine.shards import part_of
    from rlhf_train.online.worker import TrainWorker
    from rlhf_train.run.metrics import merge_metrics, results

    spec = ModelSpec(
        path=path,
        packing=case.packing,
        sequence_parallel_size=case.sequence_parallel_size,
        share_prompts=case.share_prompts,
        zero_stage=case.zero_stage,
        zpg=case.zpg,
        tensor_parallel_size=case.tensor_parallel_size,
        dtype=case.dtype,
    )
    optimizer = OPTIMIZER if case.dtype == "float32" else BFLOAT16_OPTIMIZER
    lora = LoraSpec(rank=case.lora_rank) if case.lora_rank else None
    trained = dataclasses.replace(spec, optimizer=optimizer, lora=lora)
    worker = TrainWorker(
        {"actor": trained, "critic": trained, "reference": spec},
        case.algorithm,
        temperature=0.8,
        rank=rank,
        num_ranks=num_ranks,
        master=master,
        device=device_of(rank, num_ranks),
        seed=0,
    )
    rollouts = grouped_rollouts(case.num_rollouts)
    rewards = [rollout.verdict.reward for rollout in rollouts]
    if case.first_reward is not None:
        rewards[0] = case.first_reward
    plan = plan_of(rank, num_ranks, case, rollouts)
    worker.load_rollouts(
        RolloutColumns.of([rollouts[row] for row in plan.rows], [rewards[row] for row in plan.rows]), plan
    )
    metrics = [worker.run_model(role) for role in ("actor", "reference", "critic")]
    experience = worker._experience
    before = {name: column.clone() for name, column in experience.columns.items()}
    metrics.append(worker.assign_advantages(case.algorithm.kl_coef))
    options = {"max_epochs": 1, "seed": 5, "kl_coef": case.algorithm.kl_coef}
    metrics += [worker.update(role, **options) for role in ("critic", "actor")]
    models = [engine.module for engine in worker.engines.values()]
    reference = worker._frozen["reference"]
    # Adapters are left out of the policy for the reference, which is then a function; ZeRO-3 wraps a model.
    models += [getattr(reference, "module", reference)] if isinstance(reference, torch.nn.Module) else []
    weights = {
        f"{role}.{name}": tensor.float().cpu().numpy().copy()
        for role in ("actor", "critic")
        for name, tensor in worker.engines[role].state_dict().items()
    }
    return {
        "weights": weights,
        "num_divided": sum(model.sequence_group is not None for model in models),
        "num_in_parts": sum(part_of(weight).count > 1 for model in models for weight in model.parameters()),
        "num_copied": sum(has_copies(model) for model in models),
        "sent": {name: weight.float().cpu().numpy().copy() for name, weight in worker.engines["actor"].named_weights()},
        "metrics": results(merge_metrics(metrics)),
        "same_as_reference": bool(torch.equal(before["old_logprobs"], before["ref_logprobs"])),
        "advantages": experience.export(["advantages"])["advantages"],
        "moved": max(float(np.abs(weights[f"actor.{n}"]).max()) for n in worker.engines["actor"].state_dict()),
    }


def all_cases(rank: int, num_ranks: int, master: Any, path: str, cases: dict[str, Case]) -> dict[str, Any]:
    """Run every case in one process, for the imports take longer than the work."""
    return {name: one_step(rank, num_ranks, master, path, case) for name, case in cases.items()}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> str:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return str(tiny_model_dir(tmp_path_factory.mktemp("model"), vocab_size=VOCAB_SIZE, **heads))


@pytest.fixture(scope="module")
def outcomes(model_path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The cases on one rank, which is this process, and meanwhile those on two, in processes of their own."""
    with ThreadPoolExecutor(1) as pool:
        pair = pool.submit(run_ranks, all_cases, 2, model_path, RANKS | DIVIDED | ADAPTERS_ON_RANKS | BFLOAT16)
        cases = SPLITS | BFLOAT16 | {"one other reward": Case(first_reward=3.0), "adapters": Case(lora_rank=4)}
        return all_cases(0, 1, ("127.0.0.1", free_port()), model_path, cases), pair.result()


@pytest.fixture(scope="module")
def on_one_rank(outcomes) -> dict[str, Any]:
    return outcomes[0]


@pytest.fixture(scope="module")
def on_two_ranks(outcomes) -> list[dict[str, Any]]:
    return outcomes[1]


@pytest.fixture(scope="module", params=[2, 4])
def on_ranks_of_divided_weights(request, model_path) -> list[dict[str, Any]]:
    """DeepSpeed keeps the groups of a process: no other cases may run there."""
    return run_ranks(all_cases, request.param, model_path, WEIGHTS_DIVIDED)


def largest_difference(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    assert one.keys() == other.keys()
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)


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

    from rlhf_train.online.worker import TrainWorker

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


@pytest.mark.parametrize("name", list(WEIGHTS_DIVIDED))
def test_ranks_that_divide_weights_give_the_same_update_and_count_it_once(
    on_one_rank, on_ranks_of_divided_weights, name
):
    whole = on_one_rank["whole"]
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


@pytest.mark.parametrize("name", list(ADAPTERS_ON_RANKS))
def test_split_of_adapters_over_two_ranks_gives_the_same_update_and_sends_the_same_weights(
    on_one_rank, on_two_ranks, name
):
    for outcome in on_two_ranks:
        assert outcome[name]["same_as_reference"]
        for part in ("weights", "sent"):
            assert largest_difference(on_one_rank["adapters"][part], outcome[name][part]) < TOLERANCE
    assert largest_difference(on_one_rank["adapters"]["sent"], on_one_rank["whole"]["sent"]) > 100 * TOLERANCE


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("name", list(BFLOAT16))
def test_split_in_bfloat16_gives_the_same_update(on_one_rank, on_two_ranks, name, num_ranks):
    expected = on_one_rank["bfloat16, ZeRO 1"]
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
