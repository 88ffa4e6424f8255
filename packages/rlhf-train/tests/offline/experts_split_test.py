"""Training mixtures of experts: any split into passes, ranks and ZeRO stages gives the same update with the
load-balancing loss, by AdamW and by Muon, and with the experts of the engine, and ranks whose tokens go to different
experts do not wait for each other."""

import dataclasses
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_data.examples.sft import SftExample
from rlhf_models.testing import tiny_model_dir
from rlhf_rollout.host import free_port
from rlhf_train.algorithms.table import make_algorithm
from rlhf_train.offline.epochs import OfflineSchedule
from rlhf_train.offline.job import OfflineJob, run_offline
from rlhf_train.offline.objectives.supervised import SupervisedObjective
from rlhf_train.specs import ModelSpec, OptimizerSpec
from trainer_testing import DESCENT, Watch, random_rollouts, run_ranks, shard_of, with_routes

# As in tests/support/split_cases.py, an epsilon above rounding.
ADAMW = OptimizerSpec(learning_rate=1e-2, eps=1e-4, scheduler="constant")
MUON = dataclasses.replace(ADAMW, learning_rate=3e-3, muon_momentum=0.9)
COEF = 2.0  # far above a useful one, so that a wrong loss shows
TOLERANCE = 5e-5


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to train on the same rollouts."""

    zero_stage: int = 0
    micro_batch_size: int = 16
    packing: bool = False
    coef: float = COEF
    optimizer: OptimizerSpec = ADAMW
    gradient_checkpointing: bool = False
    sequence_parallel_size: int = 1
    expert_parallel_size: int = 1
    routing_replay: bool = False


ONE_RANK = {
    "whole": Case(),
    "without": Case(coef=0.0),
    "passes of 5": Case(micro_batch_size=5),
    "packed passes of 3, checkpointed": Case(packing=True, micro_batch_size=3, gradient_checkpointing=True),
    "ZeRO 1": Case(zero_stage=1, micro_batch_size=5),
    "ZeRO 2": Case(zero_stage=2, micro_batch_size=5),
    "ZeRO 3": Case(zero_stage=3, micro_batch_size=5),
    "muon": Case(optimizer=MUON),
    "replay": Case(routing_replay=True),
    "replay, packed passes of 5": Case(packing=True, micro_batch_size=5, routing_replay=True),
    "replay, ZeRO 3, checkpointed": Case(
        zero_stage=3, micro_batch_size=3, gradient_checkpointing=True, routing_replay=True
    ),
}
TWO_RANKS = {
    "ZeRO 0": Case(),
    "ZeRO 2, passes of 3": Case(zero_stage=2, micro_batch_size=3),
    "ZeRO 3, packed passes of 3": Case(zero_stage=3, micro_batch_size=3, packing=True),
    "ZeRO 1, divided passes of 3": Case(zero_stage=1, micro_batch_size=3, packing=True, sequence_parallel_size=2),
    "divided experts, ZeRO 0": Case(expert_parallel_size=2),
    "divided experts, ZeRO 1, divided passes of 3": Case(
        zero_stage=1, micro_batch_size=3, packing=True, sequence_parallel_size=2, expert_parallel_size=2
    ),
    "divided experts, ZeRO 2, packed passes of 3, checkpointed": Case(
        zero_stage=2, micro_batch_size=3, packing=True, gradient_checkpointing=True, expert_parallel_size=2
    ),
    "muon, ZeRO 2": Case(zero_stage=2, optimizer=MUON),
    "muon, ZeRO 3": Case(zero_stage=3, optimizer=MUON),
    "replay, ZeRO 3, packed passes of 3": Case(zero_stage=3, micro_batch_size=3, packing=True, routing_replay=True),
    "replay, divided experts": Case(micro_batch_size=5, expert_parallel_size=2, routing_replay=True),
    "replay, divided passes of 3": Case(
        micro_batch_size=3, packing=True, sequence_parallel_size=2, routing_replay=True
    ),
}


def one_step(rank: int, num_ranks: int, master: Any, path: str, case: Case) -> dict[str, Any]:
    """Run a step of two updates of the actor; return its weights, what a sync sends, and the metrics."""
    from rlhf_train.learning.worker import TrainWorker
    from rlhf_train.run.metrics import merge_metrics

    fields = dataclasses.asdict(case) | {"optimizer": case.optimizer}
    fields = {name: value for name, value in fields.items() if name not in ("coef", "micro_batch_size")}
    worker = TrainWorker(
        {"actor": ModelSpec(path=path, aux_loss_coef=case.coef, **fields)},
        make_algorithm(estimator="reinforce", kl_coef=0.0),
        temperature=0.8, rank=rank, num_ranks=num_ranks, master=master, device="cpu", seed=0,
    )  # fmt: skip
    rollouts = with_routes(random_rollouts(15, vocab_size=512))
    size = case.sequence_parallel_size
    place = {"rank": rank // size, "num_ranks": num_ranks // size, "num_mini_batches": 2, "seed": 3}
    worker.load_rollouts(*shard_of(rollouts, case.micro_batch_size, **place, with_routes=case.routing_replay)[1:])
    worker.run_model("actor")
    worker.assign_advantages(0.0)
    engine = worker.engines["actor"]
    metrics = merge_metrics([worker.update("actor", max_epochs=1, seed=5)])
    return {
        "weights": {name: tensor.numpy().copy() for name, tensor in engine.state_dict().items()},
        "sent": {name: weight.numpy().copy() for name, weight in engine.named_weights()},
        "metrics": metrics,
    }


def all_cases(rank: int, num_ranks: int, master: Any, path: str, cases: Mapping[str, Case]) -> dict[str, Any]:
    """Run every case in one process."""
    return {name: one_step(rank, num_ranks, master, path, case) for name, case in cases.items()}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> str:
    return str(tiny_model_dir(tmp_path_factory.mktemp("model"), architecture="qwen3_moe"))


@pytest.fixture(scope="module")
def outcomes(model_path):
    with ThreadPoolExecutor(1) as pool:
        pair = pool.submit(run_ranks, all_cases, 2, model_path, TWO_RANKS)
        return all_cases(0, 1, ("127.0.0.1", free_port()), model_path, ONE_RANK), pair.result()


def gap(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> float:
    assert one.keys() == other.keys()
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)


def like(name: str) -> str:
    """The case on one rank, in one pass, that another case must equal."""
    return next((kind for kind in ("muon", "replay") if name.startswith(kind)), "whole")


@pytest.mark.parametrize("name", [name for name in ONE_RANK if name not in ("whole", "without", "muon", "replay")])
def test_split_on_one_rank_gives_the_same_update(outcomes, name):
    alone, _ = outcomes
    assert gap(alone[like(name)]["weights"], alone[name]["weights"]) < TOLERANCE
    assert gap(alone[like(name)]["sent"], alone[name]["sent"]) < TOLERANCE


def test_experts_of_the_engine_give_another_update(outcomes):
    alone, _ = outcomes
    assert gap(alone["whole"]["weights"], alone["replay"]["weights"]) > 100 * TOLERANCE


@pytest.mark.parametrize("name", list(TWO_RANKS))
def test_split_over_two_ranks_gives_the_same_update_and_sends_the_same_experts(outcomes, name):
    alone, pair = outcomes
    for outcome in pair:
        assert gap(alone[like(name)]["weights"], outcome[name]["weights"]) < TOLERANCE
        assert gap(alone[like(name)]["sent"], outcome[name]["sent"]) < TOLERANCE


def test_metric_is_the_loss_of_the_update_however_it_is_split(outcomes):
    from rlhf_train.run.metrics import merge_metrics, results

    alone, pair = outcomes
    expected = results(alone["whole"]["metrics"])["policy/aux_loss"]
    assert 2.0 < expected < 4.0  # k is 2, and all tokens to the same 2 of 4 experts would be 4
    found = [results(alone[name]["metrics"]) for name in ONE_RANK if like(name) == "whole" and name != "without"]
    names = [name for name in TWO_RANKS if like(name) == "whole"]
    found += [results(merge_metrics([outcome[name]["metrics"] for outcome in pair])) for name in names]
    assert [each["policy/aux_loss"] for each in found] == pytest.approx([expected] * len(found), rel=1e-4)
    assert "policy/aux_loss" not in results(alone["without"]["metrics"])


def test_loss_moves_the_routers(outcomes, model_path):
    alone, _ = outcomes
    moved = gap(alone["whole"]["weights"], alone["without"]["weights"])
    assert moved > 100 * TOLERANCE


def test_update_moves_every_expert(outcomes, model_path):
    from safetensors.numpy import load_file

    before = load_file(Path(model_path) / "model.safetensors")
    for name in ("whole", "muon"):
        after = outcomes[0][name]["sent"]
        assert after.keys() == before.keys()
        experts = [key for key in before if ".experts." in key]
        assert len(experts) == 24
        assert not [key for key in experts if np.abs(after[key] - before[key]).max() < 1e-4], name


def gradients_by_hand(path: str, coef: float) -> dict[str, np.ndarray]:
    """Gradients of an SFT update with the load-balancing loss in float64, from plain transformers' own loss."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, experts_implementation="eager")
    total, count, router_logits = 0.0, 0, []
    for example in examples():
        ids = torch.tensor(example.token_ids)[None]
        output = model(input_ids=ids, output_router_logits=True)
        router_logits.append(output.router_logits)
        logprobs = output.logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        mask = torch.tensor(example.loss_mask[1:])
        total = total - logprobs[mask].sum()
        count += int(mask.sum())
    layers = tuple(torch.cat(layer) for layer in zip(*router_logits, strict=True))
    loss = total / count + coef * load_balancing_loss_func(layers, 4, 2)
    loss.backward()
    return {name: weight.grad.numpy() for name, weight in model.named_parameters()}


def examples(count: int = 7) -> list[SftExample]:
    rng = np.random.default_rng(4)
    found = []
    for index in range(count):
        tokens = rng.integers(3, 500, rng.integers(3, 20))
        found.append(SftExample(f"e{index}", tokens, np.arange(len(tokens)) >= 2))
    return found


def offline_update(
    rank: int, num_ranks: int, master: Any, path: str, folder: str, found: list[SftExample], fields: Mapping[str, Any]
) -> Any:
    """Run one update of SFT by gradient descent; return the gradient and the metrics, of rank 0."""
    from safetensors.numpy import load_file

    layout = {name: value for name, value in fields.items() if name != "micro"}
    micro = fields.get("micro", len(found))
    job = OfflineJob(
        objective=SupervisedObjective(),
        model=ModelSpec(path=path, optimizer=DESCENT, aux_loss_coef=COEF, **layout),
        examples=found, schedule=OfflineSchedule(train_batch_size=len(found), micro_train_batch_size=micro),
        model_path=Path(folder) / "model", master=master, rank=rank, num_ranks=num_ranks,
    )  # fmt: skip
    watch = Watch()
    run_offline(job, watch)
    if rank:
        return None
    before, after = (load_file(Path(place) / "model.safetensors") for place in (path, Path(folder) / "model"))
    return {name: (before[name] - after[name]) * 10 for name in before}, watch.steps


def named_like_checkpoint(gradients: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Gradients under the names of published checkpoints, split by hand."""
    found = {}
    for name, gradient in gradients.items():
        base = name.removesuffix("gate_up_proj").removesuffix("down_proj")
        if ".experts." not in name:
            found[name] = gradient
        elif name.endswith("gate_up_proj"):
            for expert, part in enumerate(gradient):
                found[f"{base}{expert}.gate_proj.weight"] = part[:32]
                found[f"{base}{expert}.up_proj.weight"] = part[32:]
        else:
            found |= {f"{base}{expert}.down_proj.weight": part for expert, part in enumerate(gradient)}
    return found


@pytest.mark.parametrize("fields", [{}, {"micro": 3, "packing": True}, {"micro": 2, "zero_stage": 3}])
def test_offline_update_is_the_gradient_of_the_loss_in_float64(model_path, tmp_path, fields):
    master = ("127.0.0.1", free_port())
    moved, [metrics] = offline_update(0, 1, master, model_path, str(tmp_path), examples(), fields)
    expected = named_like_checkpoint(gradients_by_hand(model_path, COEF))
    assert moved.keys() == expected.keys()
    for name, gradient in expected.items():
        assert np.abs(moved[name] - gradient).max() < 2e-5 + 1e-4 * np.abs(gradient).max(), name
    plain = named_like_checkpoint(gradients_by_hand(model_path, 0.0))
    gate = "model.layers.0.mlp.gate.weight"
    assert np.abs(plain[gate] - expected[gate]).max() > 0.02
    assert metrics["train/aux_loss"] > 2.0


def experts_of(path: str, token: int) -> list[set[int]]:
    """The experts that a sequence of one repeated token goes to, by layer."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[token, token]]), output_router_logits=True).router_logits
    return [set(layer.argmax(-1).tolist()) for layer in logits]


def are_apart(one: list[set[int]], other: list[set[int]]) -> bool:
    """Whether two routes share no expert in any layer."""
    return not any(a & b for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("layout", [{"zero_stage": 3}, {"zero_stage": 2, "expert_parallel_size": 2}], ids=str)
def test_ranks_whose_tokens_go_to_different_experts_do_not_wait_for_each_other(tmp_path, layout):
    path = str(tiny_model_dir(tmp_path / "m", architecture="qwen3_moe", num_experts_per_tok=1, num_experts=8))
    routes = {token: experts_of(path, token) for token in range(40, 80)}
    one, other = next(pair for pair in combinations(routes, 2) if are_apart(routes[pair[0]], routes[pair[1]]))
    pair = [SftExample(str(token), np.array([token, token]), np.array([False, True])) for token in (one, other)]
    fields = {"micro": 1} | layout
    together, [metrics] = run_ranks(offline_update, 2, path, str(tmp_path / "two"), pair, fields)[0]
    master = ("127.0.0.1", free_port())
    alone, [expected] = offline_update(0, 1, master, path, str(tmp_path / "one"), pair, {"zero_stage": 0})
    assert gap(alone, together) < 1e-4
    assert metrics["train/aux_loss"] == pytest.approx(expected["train/aux_loss"], rel=1e-5)
    # Each expert has a gradient from one rank or from none.
    hit = [name for name, value in together.items() if name.endswith("down_proj.weight") and np.abs(value).max() > 0]
    assert len(hit) == sum(len(a | b) for a, b in zip(routes[one], routes[other], strict=True))
