"""Every weight of every expert in a live vLLM engine, compared with a plain forward pass of transformers."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from rlhf_data.errors import WeightSyncError
from rlhf_models.loading import load_actor
from rlhf_models.testing import tiny_model_dir
from rlhf_models.weights import hf_named_weights
from rlhf_rollout.engines import EngineSpec, build_engine
from rlhf_rollout.protocols import RolloutEngine
from rlhf_rollout.weights.source import WeightSource
from weight_pairs import generate, largest_difference, perturb

# As for models without experts, see weight_sync_vllm_test.py.
BOUND = 1e-5
# Of the names in a checkpoint, those of one expert's three matrices.
ONE_EXPERT = {
    "qwen3_moe": ".layers.1.mlp.experts.2.",
    "qwen2_moe": ".layers.1.mlp.experts.2.",
    "mixtral": ".layers.1.block_sparse_moe.experts.2.",
    "narrow": ".layers.1.mlp.experts.2.",
}


@dataclass(frozen=True)
class Pair:
    """An engine, and the actor whose weights it is to have."""

    kind: str
    engine: RolloutEngine
    actor: Any


@pytest.fixture(scope="module", params=list(ONE_EXPERT))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pytest.importorskip("vllm")
    # On a CPU, vLLM pads the inner size of experts to a multiple of 32.
    options = {"architecture": "qwen3_moe", "moe_intermediate_size": 24} if request.param == "narrow" else {}
    path = tiny_model_dir(tmp_path_factory.mktemp(request.param), **({"architecture": request.param} | options))
    engine = build_engine(
        "vllm", EngineSpec(model=str(path), max_model_len=160, max_num_seqs=16, max_num_batched_tokens=512)
    )
    yield Pair(request.param, engine, load_actor(path, dtype="float32").eval())
    asyncio.run(engine.close())


def send(pair: Pair, policy_version: int, leave_out: str = "nothing") -> None:
    # Buckets so small that the experts of a layer come in different ones.
    sender = WeightSource("shared_memory", bucket_bytes=20_000, checksum=True)
    weights = ((name, weight) for name, weight in hf_named_weights(pair.actor) if leave_out not in name)
    sender.send(weights, [pair.engine], policy_version)


@torch.no_grad()
def perturb_one_expert(pair: Pair) -> None:
    """Change the weights of one expert of one layer."""
    before = {name: weight.clone() for name, weight in hf_named_weights(pair.actor)}
    experts = pair.actor.model.model.layers[1].mlp.experts
    for weight in (experts.gate_up_proj[2], experts.down_proj[2]):
        weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(9)), alpha=0.3)
    changed = [name for name, weight in hf_named_weights(pair.actor) if not torch.equal(weight, before[name])]
    assert len(changed) == 3 and all(ONE_EXPERT[pair.kind] in name for name in changed)


def test_sync_brings_all_weights(pair: Pair) -> None:
    before = generate(pair.engine)
    for version in (1, 2):
        perturb(pair.actor, seed=version)
        assert largest_difference(pair.actor.model, before) > 0.05
        send(pair, version)
        after = generate(pair.engine)
        assert largest_difference(pair.actor.model, after) <= BOUND
        assert {completion.policy_version for group in after for completion in group} == {version}


def test_sync_brings_the_change_of_a_single_expert(pair: Pair) -> None:
    send(pair, 3)
    before = generate(pair.engine)
    perturb_one_expert(pair)
    assert largest_difference(pair.actor.model, before) > 1e-3
    send(pair, 4)
    assert largest_difference(pair.actor.model, generate(pair.engine)) <= BOUND


@pytest.mark.parametrize("whole_layer", [False, True])
def test_sync_without_a_matrix_or_any_of_a_layer_is_refused_and_can_be_made_up_for(
    pair: Pair, whole_layer: bool
) -> None:
    name = next(name for name, _ in hf_named_weights(pair.actor) if ONE_EXPERT[pair.kind] in name)
    with pytest.raises(WeightSyncError, match=r"weights missing: (1|12) did not arrive"):
        send(pair, 5, leave_out=name.partition("2.")[0] if whole_layer else name)
    send(pair, 6)
    assert largest_difference(pair.actor.model, generate(pair.engine)) <= BOUND
