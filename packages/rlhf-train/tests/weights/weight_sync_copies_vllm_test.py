"""Updates that repeat recorded copies in a live vLLM engine, compared with a plain forward pass of transformers."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlhf_data.errors import EngineError, WeightSyncError
from rlhf_models.testing import tiny_model_dir
from rlhf_rollout.engines import EngineSpec, build_engine
from rlhf_rollout.weights import reader as weight_reader
from rlhf_rollout.weights.source import WeightSource
from weight_pairs import ask_receiver, generate, largest_difference, perturb

NUM_WEIGHTS = {"qwen2": 27, "llama": 20, "packed": 27}
LOGGER = "rlhf_rollout.engines.vllm.weights"


@dataclass(frozen=True)
class Pair:
    """An engine, and the model whose weights it is to have."""

    kind: str
    engine: Any
    model: Any

    def ask(self, function: Callable[[Any], Any]) -> Any:
        return ask_receiver(self.engine, function)

    def send(self, version: int, extra: tuple[tuple[str, torch.Tensor], ...] = (), leave_out: str = "nothing") -> None:
        # Buckets so small that the parts of a fused parameter come in different ones.
        sender = WeightSource("shared_memory", bucket_bytes=40_000, checksum=True)
        weights = [(name, weight) for name, weight in self.model.named_parameters() if name != leave_out]
        sender.send(iter([*weights, *extra]), [self.engine], version)

    @property
    def num_repeated(self) -> int:
        """Weights that the last update has loaded by the record."""
        return self.ask(lambda receiver: receiver.num_repeated)

    @property
    def is_in_place(self) -> bool:
        """Whether the next update copies into the parameters themselves."""
        return self.ask(lambda receiver: receiver._places is not None)


def compute_with_parameters(patch: pytest.MonkeyPatch) -> None:
    """Have vLLM on a CPU compute with the parameters themselves, as on a GPU, and not with packed copies."""
    from vllm.model_executor.layers import linear, utils, vocab_parallel_embedding

    def product(layer: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return torch.nn.functional.linear(x, weight, bias)

    patch.setattr(utils, "dispatch_cpu_unquantized_gemm", lambda layer, remove_weight: None)
    patch.setattr(linear, "dispatch_unquantized_gemm", lambda *_: product)
    patch.setattr(vocab_parallel_embedding, "dispatch_unquantized_gemm", lambda *_: product)


@pytest.fixture(scope="module", params=["qwen2", "llama", "packed"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pytest.importorskip("vllm")
    from transformers import AutoModelForCausalLM

    path: Path = tmp_path_factory.mktemp(request.param)
    # In vLLM, a tied head is a layer of its own with the embedding's parameter. 500 rows are padded to 512.
    architecture = "llama" if request.param == "llama" else "qwen2"
    tiny_model_dir(path, architecture=architecture, tied=architecture == "llama", vocab_size=500)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    if request.param != "llama":  # a folder that does not tell names and shapes in advance
        (path / "model.safetensors").unlink()
        torch.save(model.state_dict(), path / "pytorch_model.bin")
    limits = {"max_model_len": 160, "max_num_seqs": 16, "max_num_batched_tokens": 512}
    with pytest.MonkeyPatch.context() as patch:
        if request.param != "packed":
            compute_with_parameters(patch)
        engine = build_engine("vllm", EngineSpec(model=str(path), weight_transfer="shared_memory", **limits))
        yield Pair(request.param, engine, model)
        asyncio.run(engine.close())


@pytest.fixture(autouse=True)
def first_weights(pair: Pair) -> Iterator[None]:
    """Put the model's first weights back after a test."""
    original = {name: parameter.detach().clone() for name, parameter in pair.model.named_parameters()}
    yield
    restore(pair.model, original)


@torch.no_grad()
def restore(model: Any, weights: dict[str, torch.Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.copy_(weights[name])


def record(pair: Pair, version: int = 0) -> None:
    """Send updates until the next one repeats recorded copies."""
    pair.ask(lambda receiver: receiver._forget("the test begins"))
    pair.send(version)
    assert pair.num_repeated == 0
    assert pair.is_in_place == (pair.kind != "packed")


def test_updates_by_the_record_bring_all_weights_and_bring_them_back(pair: Pair) -> None:
    record(pair)
    original = {name: parameter.detach().clone() for name, parameter in pair.model.named_parameters()}
    before = generate(pair.engine)
    for version in (1, 2):
        perturb(pair.model, seed=version)
        assert largest_difference(pair.model, before) > 0.05
        pair.send(version)
        assert pair.num_repeated == NUM_WEIGHTS[pair.kind] == len(original)
        assert largest_difference(pair.model, generate(pair.engine)) <= 1e-5
    restore(pair.model, original)
    pair.send(3)
    flat = [[completion for group in groups for completion in group] for groups in (before, generate(pair.engine))]
    for first, last in zip(*flat, strict=True):
        np.testing.assert_array_equal(first.token_ids, last.token_ids)
        np.testing.assert_array_equal(first.logprobs, last.logprobs)


def test_update_in_another_dtype_and_in_one_bucket_follows_the_record(pair: Pair) -> None:
    record(pair)
    with torch.no_grad():
        for parameter in pair.model.parameters():
            parameter.copy_(parameter.bfloat16())
    perturbed = ((name, parameter.bfloat16()) for name, parameter in pair.model.named_parameters())
    WeightSource("shared_memory").send(perturbed, [pair.engine], 5)
    assert pair.num_repeated == NUM_WEIGHTS[pair.kind]
    assert largest_difference(pair.model, generate(pair.engine)) <= 1e-5


def test_one_bucket_that_vllm_loads_in_parts_is_recorded_whole(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    record(pair)
    pair.ask(lambda receiver: receiver._forget("it is to be recorded again"))
    monkeypatch.setattr(weight_reader, "PART_BYTES", 40_000)  # parts of a fused parameter lie in different ones
    for version, num_repeated in ((1, 0), (2, NUM_WEIGHTS[pair.kind])):
        perturb(pair.model, seed=version)
        WeightSource("shared_memory").send(iter(pair.model.named_parameters()), [pair.engine], version)
        assert pair.num_repeated == num_repeated
        assert largest_difference(pair.model, generate(pair.engine)) <= 1e-5


@pytest.mark.parametrize("name", ["model.layers.1.self_attn.k_proj.weight", "model.embed_tokens.weight"])
def test_update_by_the_record_without_a_weight_is_refused_and_can_be_made_up_for(pair: Pair, name: str) -> None:
    record(pair)
    perturb(pair.model, seed=7)
    # An engine that does not know names in advance tells vLLM's.
    named = name if pair.kind == "llama" else name.replace("k_proj", "qkv_proj").removesuffix(".weight")
    with pytest.raises(WeightSyncError, match=rf"weights missing: 1 did not arrive in the last update \({named}\)"):
        pair.send(1, leave_out=name)
    with pytest.raises(EngineError, match="the engine's weights are incomplete"):
        generate(pair.engine)
    pair.send(2)
    assert pair.num_repeated == NUM_WEIGHTS[pair.kind]
    assert largest_difference(pair.model, generate(pair.engine)) <= 1e-5


def test_update_with_another_name_is_loaded_by_vllm_and_recorded_again(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    if pair.kind == "llama":
        pytest.skip("this engine knows the names in advance")
    record(pair)
    perturb(pair.model, seed=8)
    unused = ("model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(16))
    with caplog.at_level(logging.WARNING, LOGGER):
        pair.send(1, extra=(unused,))
    assert "rotary_emb.inv_freq did not arrive with shape (16,) before" in caplog.text
    assert pair.num_repeated == NUM_WEIGHTS[pair.kind]
    assert largest_difference(pair.model, generate(pair.engine)) <= 1e-5
    # The next update is recorded with the further weight, although vLLM makes no use of it.
    for version, num_repeated in ((2, 0), (3, NUM_WEIGHTS[pair.kind] + 1)):
        perturb(pair.model, seed=version)
        pair.send(version, extra=(unused,))
        assert pair.num_repeated == num_repeated
        assert largest_difference(pair.model, generate(pair.engine)) <= 1e-5


@pytest.mark.parametrize("place", [0, 11])
def test_weight_that_is_not_in_the_record_changes_nothing_of_those_beside_it(pair: Pair, place: int) -> None:
    if pair.kind == "llama":
        pytest.skip("this engine knows the names in advance")
    record(pair)
    perturb(pair.model, seed=place)
    weights = list(pair.model.named_parameters())
    weights.insert(place, ("model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(16)))
    WeightSource("shared_memory", bucket_bytes=40_000).send(iter(weights), [pair.engine], 1)
    assert pair.num_repeated == NUM_WEIGHTS[pair.kind]
    assert largest_difference(pair.model, generate(pair.engine)) <= 1e-5


def test_update_whose_weights_are_fused_otherwise_than_recorded_is_complete(pair: Pair) -> None:
    if pair.kind == "llama":
        pytest.skip("this engine knows the names in advance")
    record(pair)
    perturb(pair.model, seed=9)
    prefix = "model.layers.1.mlp"
    parts = {name: dict(pair.model.named_parameters())[f"{prefix}.{name}_proj.weight"] for name in ("gate", "up")}
    fused = (f"{prefix}.gate_up_proj.weight", torch.cat([parts["gate"], parts["up"]]))
    weights = {name: weight for name, weight in pair.model.named_parameters() if weight not in set(parts.values())}
    WeightSource("shared_memory", bucket_bytes=40_000).send(iter([*weights.items(), fused]), [pair.engine], 1)
    assert 0 < pair.num_repeated < NUM_WEIGHTS[pair.kind]
    assert largest_difference(pair.model, generate(pair.engine)) <= 1e-5


def test_update_with_a_wrong_shape_is_refused_and_can_be_made_up_for(pair: Pair) -> None:
    record(pair)
    wrong = ("model.norm.weight", torch.ones(65))
    with pytest.raises(WeightSyncError):
        pair.send(1, leave_out="model.norm.weight", extra=(wrong,))
    perturb(pair.model, seed=10)
    pair.send(2)
    assert largest_difference(pair.model, generate(pair.engine)) <= 1e-5


def test_parameters_that_have_moved_are_found_again(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    if pair.kind == "packed":
        pytest.skip("copies go into new tensors in each update")
    record(pair)

    def move(receiver: Any) -> None:
        norm = receiver.model.model.norm
        norm.weight.data = norm.weight.data.clone()

    pair.ask(move)
    for version, num_repeated in ((1, 0), (2, NUM_WEIGHTS[pair.kind])):
        perturb(pair.model, seed=version)
        with caplog.at_level(logging.WARNING, LOGGER):
            pair.send(version)
        assert pair.num_repeated == num_repeated
        assert largest_difference(pair.model, generate(pair.engine)) <= 1e-5
    assert "parameters have moved" in caplog.text


def test_rows_that_pad_the_vocabulary_are_zero_in_layers_that_vllm_processes(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    if pair.kind != "packed":
        pytest.skip("this engine leaves the rows as they are")
    from rlhf_rollout.engines.vllm.patches import recorded_copies

    materialize = recorded_copies.materialize_layer

    def with_old_values(layer: Any, info: Any) -> None:
        materialize(layer, info)
        for parameter in layer.parameters(recurse=False):
            parameter.data.fill_(7.0)

    record(pair)
    monkeypatch.setattr(recorded_copies, "materialize_layer", with_old_values)
    pair.send(1)
    embedding = pair.ask(lambda receiver: receiver.model.model.embed_tokens.weight.detach().clone())
    assert embedding.shape[0] == 512
    assert not embedding[500:].any()
    assert torch.equal(embedding[:500], pair.model.model.embed_tokens.weight)


def test_updates_in_a_kept_buffer_bring_what_was_written_last(pair: Pair) -> None:
    record(pair)
    sender = WeightSource("shared_memory", bucket_bytes=40_000, checksum=True, keep_buffer=True)
    for version in (1, 2, 3):
        perturb(pair.model, seed=version)
        sender.send(iter(pair.model.named_parameters()), [pair.engine], version, ["the engine"])
        assert pair.num_repeated == NUM_WEIGHTS[pair.kind]
        assert largest_difference(pair.model, generate(pair.engine)) <= 1e-5
    sender.close()


def test_update_that_was_given_up_is_followed_by_a_whole_one(pair: Pair) -> None:
    record(pair)
    perturb(pair.model, seed=11)

    async def begin() -> None:
        await pair.engine.begin_weight_update(1)

    asyncio.run(begin())
    pair.send(2)
    assert pair.num_repeated == NUM_WEIGHTS[pair.kind]
    assert largest_difference(pair.model, generate(pair.engine)) <= 1e-5


def test_incomplete_update_is_not_recorded(pair: Pair) -> None:
    pair.ask(lambda receiver: receiver._forget("the test begins"))
    with pytest.raises(WeightSyncError, match="weights missing"):
        pair.send(1, leave_out="model.norm.weight")
    for version, num_repeated in ((2, 0), (3, NUM_WEIGHTS[pair.kind])):
        pair.send(version)
        assert pair.num_repeated == num_repeated


def test_parameters_that_vllm_changes_after_loading_are_not_copied_in_place(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if pair.kind == "packed":
        pytest.skip("copies go into new tensors in each update")
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    def negate(self: Any, layer: Any) -> None:
        layer.weight.data.neg_()

    monkeypatch.setattr(UnquantizedEmbeddingMethod, "process_weights_after_loading", negate)
    pair.ask(lambda receiver: receiver._forget("the test begins"))
    with caplog.at_level(logging.INFO, LOGGER):
        pair.send(1)
    assert not pair.is_in_place
    assert "vLLM changes model.embed_tokens.weight after it has loaded it" in caplog.text
    perturb(pair.model, seed=12)
    pair.send(2)
    assert pair.num_repeated == NUM_WEIGHTS[pair.kind]
    with torch.no_grad():
        for weight in {pair.model.model.embed_tokens.weight, pair.model.lm_head.weight}:
            weight.neg_()
    assert largest_difference(pair.model, generate(pair.engine)) <= 1e-5


def test_copies_that_cannot_be_repeated_are_left_to_vllm_with_one_reason(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    load = type(pair.ask(lambda receiver: receiver.model)).load_weights

    def scale(model: Any, weights: Any) -> Any:
        return load(model, [(name, weight * 2 if name == "model.norm.weight" else weight) for name, weight in weights])

    monkeypatch.setattr(type(pair.ask(lambda receiver: receiver.model)), "load_weights", scale)
    pair.ask(lambda receiver: receiver._forget("the test begins"))
    with caplog.at_level(logging.WARNING, LOGGER):
        for version in range(3):
            perturb(pair.model, seed=version)
            pair.send(version)
            assert pair.num_repeated == 0
    pair.ask(lambda receiver: setattr(receiver, "_can_record", True))
    assert caplog.text.count("model.norm.weight is written with values that are not those of a weight") == 1
    with torch.no_grad():
        pair.model.model.norm.weight.mul_(2)
    assert largest_difference(pair.model, generate(pair.engine)) <= 1e-5
