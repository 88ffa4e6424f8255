"""Adapters in a live vLLM engine, compared with the same adapters in peft, which computes them beside transformers."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from rlhf_data.errors import ConfigError, EngineError, WeightSyncError
from rlhf_models.testing import tiny_model_dir
from rlhf_rollout.engines import EngineSpec, build_engine
from rlhf_rollout.protocols import SamplingParams
from rlhf_rollout.weights.source import SyncReport, WeightSource
from weight_pairs import generate, largest_difference

peft = pytest.importorskip("peft")

RANK = 3
ALPHA = 7.0
BOUND = 1e-4  # nats; in float32 two orders of summation differ by about 1e-6
MASKED = (range(480, 512),)
LAYER = "model.layers.0.self_attn.q_proj"
GREEDY = SamplingParams(max_tokens=4, temperature=0)


class Pair(NamedTuple):
    """An engine, and the model with adapters that it is to answer like."""

    engine: Any
    model: Any

    def send(self, version: int, **changes: torch.Tensor | None) -> SyncReport:
        """Send the model's adapters, with `changes`: tensors by name, or None for one that is left out."""
        tensors = {name: tensor for name, tensor in (adapters(self.model) | changes).items() if tensor is not None}
        # Buckets so small that the two matrices of a layer come in different ones.
        sender = WeightSource("shared_memory", bucket_bytes=512, checksum=True)
        report = sender.send(iter(tensors.items()), [self.engine], version)
        assert not report.failures
        return report

    def gap(self, **sampling: Any) -> float:
        return largest_difference(self.model, generate(self.engine, **sampling))


def adapters(model: Any) -> dict[str, torch.Tensor]:
    """The model's adapters by the names of its layers, with alpha / rank in B."""
    found = {}
    for name, tensor in peft.get_peft_model_state_dict(model).items():
        found[name.removeprefix("base_model.model.")] = tensor * (ALPHA / RANK if ".lora_B." in name else 1)
    return found


@torch.no_grad()
def move(model: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)


def adapted(path: str) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.lm_head.register_forward_hook(
        lambda head, inputs, logits: logits.index_fill(-1, torch.tensor(MASKED[0]), -torch.inf)
    )
    config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear")
    return peft.get_peft_model(model, config).eval()


def start(path: str, **options: Any) -> Any:
    limits = {"max_model_len": 320, "max_num_seqs": 16, "max_num_batched_tokens": 512, "masked_ids": MASKED}
    return build_engine("vllm", EngineSpec(model=path, **({"adapter_rank": RANK} | limits | options)))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    pytest.importorskip("vllm")
    return str(tiny_model_dir(tmp_path_factory.mktemp("model"), vocab_size=512))


@pytest.fixture(scope="module")
def pair(path: str) -> Iterator[Pair]:
    engine = start(path, enable_sleep=True)
    yield Pair(engine, adapted(path))
    asyncio.run(engine.close())


def test_engine_answers_like_its_folder_and_then_by_the_adapter_of_each_update(pair: Pair) -> None:
    prompt = np.arange(3, 203, dtype=np.int32)  # longer than a block of the prefix cache
    assert pair.gap() < BOUND  # B is zero
    # rank * (inputs + outputs) numbers of 4 bytes for each linear layer of the 2 blocks
    shapes = [module.base_layer.weight.shape for module in pair.model.modules() if hasattr(module, "lora_A")]
    assert len(shapes) == 2 * 7
    for version in (1, 2):
        move(pair.model, version)
        [cached] = asyncio.run(pair.engine.generate(prompt, GREEDY))
        assert pair.send(version).size_bytes == 4 * RANK * sum(map(sum, shapes))
        [completion] = asyncio.run(pair.engine.generate(prompt, GREEDY))
        assert [span.policy_version for span in completion.spans] == [version]
        assert np.abs(completion.logprobs[0] - cached.logprobs[0]) > 10 * BOUND
        assert pair.gap(seed=version) < BOUND
        with pair.model.disable_adapter():
            assert pair.gap(seed=version) > 100 * BOUND


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({f"{LAYER}.weight": torch.ones(64, 64)}, "arrived at an engine that takes adapters of rank 3"),
        ({f"{LAYER}.lora_A.weight": torch.ones(2, 64)}, r"arrived with shape \(2, 64\); .* has \(3, 64\)"),
        ({f"{LAYER}.lora_B.weight": torch.ones(63, 3)}, r"arrived with shape \(63, 3\); .* has \(64, 3\)"),
        ({f"{LAYER}.lora_B.weight": None}, f"weights missing.*{LAYER}.lora_B.weight"),
        ({f"{LAYER}.lora_A.weight": None, f"{LAYER}.lora_B.weight": None}, f"weights missing.*{LAYER}.lora_A.weight"),
        (
            {"model.other.lora_A.weight": torch.ones(3, 64), "model.other.lora_B.weight": torch.ones(64, 3)},
            "Qwen2ForCausalLM of vLLM applies no adapter to 1 layers, such as model.other",
        ),
    ],
)
def test_adapter_that_does_not_fit_is_refused_until_one_does(
    pair: Pair, changes: dict[str, torch.Tensor | None], message: str
) -> None:
    pair.send(5)
    with pytest.raises(WeightSyncError, match=message):
        pair.send(6, **changes)
    with pytest.raises(EngineError, match="weights are incomplete"):
        pair.gap()
    pair.send(7)
    assert pair.gap() < BOUND


# The end of an engine takes what the other engines of its process need, so the tests of two engines come last.


def test_engine_that_slept_or_starts_again_has_the_weights_under_the_adapter(pair: Pair, path: str) -> None:
    asyncio.run(pair.engine.sleep(keep_weights=False))
    asyncio.run(pair.engine.wake_up())
    assert pair.gap() < BOUND
    other = Pair(start(path), pair.model)
    other.send(3)
    assert other.gap() < BOUND
    asyncio.run(other.engine.close())


def test_engine_draws_the_tokens_that_merged_weights_draw(pair: Pair, path: str) -> None:
    move(pair.model, 4)
    merged = start(path, adapter_rank=0)
    sums = {
        f"{name.removeprefix('base_model.model.')}.weight": module.base_layer.weight
        + module.get_delta_weight("default")
        for name, module in pair.model.named_modules()
        if hasattr(module, "lora_A")
    }
    rest = {name: weight for name, weight in pair.model.get_base_model().named_parameters() if ".lora_" not in name}
    named = {name.replace(".base_layer.", "."): weight for name, weight in rest.items()} | sums
    WeightSource("shared_memory").send(iter(named.items()), [merged], 4)
    pair.send(4)
    for one, other in zip(generate(merged), generate(pair.engine), strict=True):
        for left, right in zip(one, other, strict=True):
            np.testing.assert_array_equal(left.token_ids, right.token_ids)
            np.testing.assert_allclose(left.logprobs, right.logprobs, rtol=0, atol=BOUND)
    asyncio.run(merged.close())


def test_model_that_vllm_applies_no_adapter_to_is_refused_with_a_way_out(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=320, n_embd=32, n_layer=1, n_head=2)).save_pretrained(
        tmp_path
    )
    with pytest.raises(EngineError, match=r"GPT2LMHeadModel does not support LoRA(.|\n)*hint: use ``adapter_rank=0``"):
        start(str(tmp_path), masked_ids=())


def test_engine_takes_adapters_of_a_rank_between_those_of_vllm_and_no_larger_one() -> None:
    from rlhf_rollout.engines.vllm.internals import adapter_options

    assert adapter_options(0) == {}
    assert [adapter_options(rank)["max_lora_rank"] for rank in (1, 8, 9, 512)] == [1, 8, 16, 512]
    with pytest.raises(ConfigError, match="``adapter_rank`` is 513"):
        EngineSpec(model="", adapter_rank=513)


@pytest.mark.parametrize("kind", ["fake", "transformers"])
def test_other_engines_take_no_adapters(kind: str) -> None:
    with pytest.raises(ConfigError, match=f"engine {kind} applies no adapters"):
        EngineSpec(model="", adapter_rank=1).check_kind(kind)
