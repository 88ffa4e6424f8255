"""The trainer's weights in a live vLLM engine, compared with a plain forward pass of transformers."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlhf_models.loading import load_actor
from rlhf_models.testing import tiny_model_dir
from rlhf_models.weights import hf_named_weights
from rlhf_rollout.engines import EngineSpec, build_engine
from rlhf_rollout.engines.spec import VLLM_PATCHES
from rlhf_rollout.protocols import RolloutEngine
from rlhf_rollout.weights import Medium
from rlhf_rollout.weights.source import WeightSource
from weight_pairs import ask_receiver, generate, largest_difference, perturb


@dataclass(frozen=True)
class Pair:
    """An engine, the model whose weights it is to have, and who sends them."""

    engine: RolloutEngine
    model: Any
    sender: WeightSource
    medium: Medium


@pytest.fixture(scope="module", params=["tied", "untied"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pytest.importorskip("vllm")
    from transformers import AutoModelForCausalLM

    # vLLM pads 500 rows of vocabulary to 512, rows that no update ever brings.
    vocab_size = 500 if request.param == "tied" else 512
    path: Path = tmp_path_factory.mktemp(request.param)
    tiny_model_dir(path, tied=request.param != "untied", vocab_size=vocab_size)
    medium = "shared_memory" if request.param == "tied" else "nccl"
    limits = {"max_model_len": 320, "max_num_seqs": 16, "max_num_batched_tokens": 512}
    spec = EngineSpec(model=str(path), weight_transfer=medium, **limits)
    engine = build_engine("vllm", spec)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    # Buckets small enough that a layer's query, key and value weights come in different ones.
    sender = WeightSource(medium, bucket_bytes=40_000, checksum=True)
    yield Pair(engine, model, sender, medium)
    asyncio.run(engine.close())


def send(pair: Pair, policy_version: int) -> None:
    report = pair.sender.send(iter(pair.model.named_parameters()), [pair.engine], policy_version, ["the engine"])
    assert not report.failures


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_engine_logprobs_equal_the_models_after_temperature(pair: Pair, temperature: float) -> None:
    assert largest_difference(pair.model, generate(pair.engine, temperature=temperature), temperature) <= 1e-5


def test_engine_greedy_logprobs_equal_the_models(pair: Pair) -> None:
    assert largest_difference(pair.model, generate(pair.engine, temperature=0.0, num_samples=1)) <= 1e-5


def test_sync_makes_the_engines_logprobs_the_models(pair: Pair) -> None:
    before = generate(pair.engine)
    perturb(pair.model, seed=1)
    # A stale weight shows: the old completions are far from what the new weights say of them.
    assert largest_difference(pair.model, before) > 0.05
    send(pair, 1)
    after = generate(pair.engine)
    assert largest_difference(pair.model, after) <= 1e-5
    assert {completion.policy_version for group in after for completion in group} == {1}


def test_sync_perturbed_and_reverted_gives_the_same_tokens_bit_for_bit(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(pair, 2)
    original = {name: parameter.detach().clone() for name, parameter in pair.model.named_parameters()}
    before = generate(pair.engine)
    perturb(pair.model, seed=2)
    send(pair, 3)
    moved = generate(pair.engine)
    with torch.no_grad():
        for name, parameter in pair.model.named_parameters():
            parameter.copy_(original[name])
    # An engine leaves the group of one sender for that of another, so a second sender would hold up the first for ever.
    monkeypatch.setattr(pair.sender, "_bucket_bytes", 1 << 20)
    send(pair, 4)
    reverted = generate(pair.engine)
    flat = [[completion for group in groups for completion in group] for groups in (before, moved, reverted)]
    assert any(a.token_ids.tolist() != b.token_ids.tolist() for a, b in zip(flat[0], flat[1], strict=True))
    for first, last in zip(flat[0], flat[2], strict=True):
        np.testing.assert_array_equal(first.token_ids, last.token_ids)
        np.testing.assert_array_equal(first.logprobs, last.logprobs)


def test_sync_many_times_keeps_the_engines_memory(pair: Pair) -> None:
    import psutil

    for version in range(10):
        send(pair, version)
    before = psutil.Process().memory_info().rss
    for version in range(30):
        send(pair, version)
    # 30 copies of 0.4 MB would be 12 MB.
    assert psutil.Process().memory_info().rss - before < 6 << 20


@pytest.mark.parametrize("skipped", [(), VLLM_PATCHES], ids=["patched", "without patches"])
def test_sync_brings_persistent_buffers_and_leaves_alone_those_that_are_not_sent(tmp_path: Path, skipped) -> None:
    pytest.importorskip("vllm")
    path = tiny_model_dir(tmp_path, architecture="apertus", tied=False)
    limits = {"max_model_len": 320, "max_num_seqs": 16, "max_num_batched_tokens": 512}
    engine = build_engine("vllm", EngineSpec(model=str(path), skip_patches=skipped, **limits))
    model = load_actor(path, dtype="float32").eval().model
    pair = Pair(engine, model, WeightSource("shared_memory", bucket_bytes=40_000), "shared_memory")
    repeated: list[int] = []
    bound = 5e-3  # vLLM holds the numbers of this activation in bfloat16
    try:
        send(pair, 1)  # the parameters only
        assert largest_difference(pair.model, generate(pair.engine)) <= bound
        for version, beta in ((2, 1.5), (3, -2.0), (4, 0.7)):
            for layer in model.model.layers:
                layer.mlp.act_fn.beta.fill_(beta)
            assert largest_difference(pair.model, generate(pair.engine)) > 0.05
            pair.sender.send(hf_named_weights(model), [engine], version, ["the engine"])
            repeated.append(ask_receiver(engine, lambda receiver: receiver.num_repeated))
            assert largest_difference(pair.model, generate(pair.engine)) <= bound
        # The first update had no buffers. Copies into them are recorded in the one after the next, and then repeated.
        num_parameters = len([*model.parameters()])
        num_buffers = len([name for name, _ in model.named_buffers() if name in model.state_dict()])
        assert repeated == ([0, 0, 0] if skipped else [num_parameters, 0, num_parameters + num_buffers])
    finally:
        asyncio.run(engine.close())
