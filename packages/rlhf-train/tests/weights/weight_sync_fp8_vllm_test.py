"""Updates of a vLLM engine in FP8, compared with rounding by hand and with an engine that starts from the weights."""

import asyncio
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rlhf_data.errors import ConfigError
from rlhf_models.testing import tiny_model_dir
from rlhf_models.weights import hf_named_weights
from rlhf_rollout.engines import EngineSpec, build_engine
from rlhf_rollout.host import local_gpus
from rlhf_rollout.protocols import Completion, SamplingParams
from rlhf_rollout.weights.source import WeightSource
from weight_pairs import PROMPTS, ask_receiver, perturb

ON_GPU = local_gpus() > 0
FP8_MAX = 448.0  # of float8_e4m3fn
LEFT: list[Any] = []  # memory of engines that were closed


@dataclass(frozen=True)
class Pair:
    """An engine in FP8, the model of its folder, a changed model, and what an engine that starts from that answers."""

    kind: str
    engine: Any
    model: Any
    changed: Any
    expected: list[Completion]

    def ask(self, function: Callable[[Any], Any]) -> Any:
        return ask_receiver(self.engine, function)

    def send(self, model: Any, version: int) -> None:
        # Buckets so small that the parts of a fused parameter come in different ones.
        sender = WeightSource("shared_memory", bucket_bytes=400_000, checksum=True)
        sender.send(hf_named_weights(model), [self.engine], version)

    def parameters(self) -> dict[str, tuple[int, Tensor]]:
        """The address and the values of each parameter that the engine computes with."""

        def read(receiver: Any) -> dict[str, tuple[int, Tensor]]:
            named = receiver.model.named_parameters()
            return {name: (parameter.data_ptr(), parameter.detach().float().cpu()) for name, parameter in named}

        return self.ask(read)


def start(path: Path, **options: Any) -> Any:
    limits = {"max_model_len": 160, "max_num_seqs": 16, "max_num_batched_tokens": 512}
    memory = {"kv_cache_memory_bytes": 64 << 20, "gpu_memory_utilization": 0.05}
    spec = EngineSpec(model=str(path), dtype="bfloat16", quantization="fp8", **limits, **memory, **options)
    return build_engine("vllm", spec)


def generate(engine: Any) -> list[Completion]:
    # One prompt after another: in bfloat16 a row's logits depend on what else is in its batch.
    greedy = SamplingParams(max_tokens=100, temperature=0)
    return [asyncio.run(engine.generate(prompt, greedy))[0] for prompt in PROMPTS]


def assert_same(completions: list[Completion], expected: list[Completion]) -> None:
    for one, other in zip(completions, expected, strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_array_equal(one.logprobs, other.logprobs)


@pytest.fixture(scope="module")
def own_memory() -> Iterator[None]:
    """Have vLLM not see what other tests take of a GPU meanwhile: it compares the free memory around a sleep."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        if ON_GPU:
            total = torch.cuda.get_device_properties(0).total_memory
            monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda *_: (total, total))
        yield


@pytest.fixture(scope="module", params=["qwen2", "qwen3_moe"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, own_memory: None) -> Iterator[Pair]:
    pytest.importorskip("vllm")
    from transformers import AutoModelForCausalLM

    if request.param == "qwen3_moe" and not ON_GPU:
        pytest.skip("vLLM has no experts in FP8 for CPUs")
    first, second = (tmp_path_factory.mktemp(f"{request.param}{number}") for number in range(2))
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    sizes = {"vocab_size": 500, "hidden_size": 256, "intermediate_size": 512}
    # On a GPU, the widths of vLLM's layers in FP8 are multiples of 16, and so is the number of experts of a router.
    experts = {"moe_intermediate_size": 256, "num_experts": 16} if request.param == "qwen3_moe" else {}
    tiny_model_dir(first, architecture=request.param, dtype=torch.bfloat16, **heads, **sizes, **experts)
    model, changed = (AutoModelForCausalLM.from_pretrained(first, dtype=torch.bfloat16).eval() for _ in range(2))
    perturb(changed, seed=4)
    changed.save_pretrained(second)
    # A process can have one engine at a time. On a GPU, one that can sleep must be the first to use its memory pool.
    fresh = start(second)
    expected = generate(fresh)
    asyncio.run(fresh.close())
    engine = start(first, enable_sleep=True)
    yield Pair(request.param, engine, model, changed, expected)
    asyncio.run(engine.close())
    if ON_GPU:
        # vLLM's memory for engines that can sleep is for one engine in a process: the next one gets its own.
        from vllm.device_allocator.cumem import CuMemAllocator

        LEFT.append(CuMemAllocator.instance)  # what is freed later goes back to it
        CuMemAllocator.instance = None


def rounded(tensor: Tensor) -> Tensor:
    """The nearest values in FP8 with one scale per row, as float32."""
    scale = tensor.float().abs().amax(dim=-1, keepdim=True) / FP8_MAX
    return (tensor.float() / scale).to(torch.float8_e4m3fn).float() * scale


def in_fp8(model: Any) -> Any:
    """Return a copy of the model whose linear layers compute with what FP8 leaves of weights and inputs."""
    model = copy.deepcopy(model)
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and name != "lm_head":
            layer.forward = partial(linear, rounded(layer.weight), layer.bias)
    return model


def linear(weight: Tensor, bias: Tensor | None, inputs: Tensor) -> Tensor:
    outputs = rounded(inputs) @ weight.t()
    return (outputs if bias is None else outputs + bias.float()).to(inputs.dtype)


@torch.no_grad()
def mean_distance(model: Any, completions: list[Completion]) -> float:
    """The mean distance between the engine's log-probs and the model's, in nats."""
    found = []
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        tokens = torch.tensor(np.concatenate([prompt, completion.token_ids]), dtype=torch.long)[None]
        logprobs = model(tokens).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        found.append(logprobs.gather(1, tokens[0, len(prompt) :, None])[:, 0].numpy() - completion.logprobs)
    return float(np.abs(np.concatenate(found)).mean())


def test_engine_after_updates_answers_as_one_that_starts_from_the_weights(pair: Pair) -> None:
    for version in range(2):  # vLLM's loader loads the first update, and later ones repeat its copies
        pair.send(pair.model, 2 * version)
        before = generate(pair.engine)
        pair.send(pair.changed, 2 * version + 1)
        assert_same(generate(pair.engine), pair.expected)
    num_weights = sum(1 for _ in hf_named_weights(pair.changed))
    assert pair.ask(lambda receiver: receiver.num_repeated) == num_weights
    assert [one.token_ids.tolist() for one in before] != [one.token_ids.tolist() for one in pair.expected]


def test_updates_round_new_weights_into_the_memory_that_the_engine_computes_with(pair: Pair) -> None:
    before = pair.parameters()
    model = copy.deepcopy(pair.model)
    for version in (10, 11):
        perturb(model, seed=version)
        pair.send(model, version)
        after = pair.parameters()
        assert {name: address for name, (address, _) in after.items()} == {
            name: address for name, (address, _) in before.items()
        }
        attention = model.model.layers[1].self_attn
        weight = torch.cat([part.weight for part in (attention.q_proj, attention.k_proj, attention.v_proj)]).float()
        scale = weight.abs().amax(dim=1, keepdim=True) / FP8_MAX
        prefix = "model.layers.1.self_attn.qkv_proj"
        torch.testing.assert_close(after[f"{prefix}.weight_scale"][1].reshape(-1, 1), scale)
        # 3 bits of mantissa: at most half of 1/8 off, or half of the smallest step near 0.
        gap = (after[f"{prefix}.weight"][1].t() * scale - weight).abs()
        assert bool((gap <= 1.001 * (weight.abs() / 16 + scale * 2**-10)).all())
        assert gap.mean() > 0.01 * weight.abs().mean()
        assert torch.equal(after["model.embed_tokens.weight"][1][:500], model.model.embed_tokens.weight.float())


def test_logprobs_are_those_of_a_model_that_rounds_as_fp8_does(pair: Pair) -> None:
    if pair.kind == "qwen3_moe":
        pytest.skip("transformers computes experts with other layers")
    pair.send(pair.model, 20)
    completions = generate(pair.engine)
    near, far = (mean_distance(model, completions) for model in (in_fp8(pair.model), pair.model))
    print(near, far)
    # What bfloat16 leaves of an input decides to which side FP8 rounds it, so the engine is not very near.
    assert near < 0.75 * far
    assert 0.1 < far < 0.5  # without FP8: 0.02


def test_sleep_and_wake_up_keep_the_weights_and_updates_reach_them(pair: Pair) -> None:
    from rlhf_rollout.engines.vllm.weights import holds_more_than_weights

    for version, model in ((30, pair.changed), (31, pair.model), (32, pair.changed)):
        pair.send(model, version)
        before = generate(pair.engine)
        asyncio.run(pair.engine.sleep())
        asyncio.run(pair.engine.wake_up())
        assert_same(generate(pair.engine), before)
    assert_same(before, pair.expected)
    if ON_GPU:
        holds_more = pair.ask(lambda receiver: holds_more_than_weights(receiver.model))
        assert holds_more == (pair.kind == "qwen3_moe")
    asyncio.run(pair.engine.sleep(keep_weights=False))
    asyncio.run(pair.engine.wake_up())
    pair.send(pair.changed, 33)
    assert_same(generate(pair.engine), pair.expected)


def test_experts_keep_the_kernels_with_which_graphs_were_captured(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    if pair.kind == "qwen3_moe":
        pytest.skip("it has experts of its own")
    from rlhf_rollout.engines.vllm import weights

    finalize = weights.finalize_layerwise_reload
    method = SimpleNamespace(moe_kernel="captured", moe_quant_config="its scales")

    def with_new_kernels(*args: Any) -> None:
        finalize(*args)
        method.moe_kernel, method.moe_quant_config = "new", "new scales"

    monkeypatch.setattr(weights, "finalize_layerwise_reload", with_new_kernels)
    monkeypatch.setattr(weights, "drop_expert_kernels", lambda model: None)  # on a CPU
    pair.ask(lambda receiver: setattr(receiver.model.model.norm, "quant_method", method))
    pair.send(pair.model, 40)
    pair.ask(lambda receiver: delattr(receiver.model.model.norm, "quant_method"))
    assert (method.moe_kernel, method.moe_quant_config) == ("captured", "its scales")


def test_what_cannot_be_quantized_is_refused_before_vllm_starts(pair: Pair, tmp_path: Path) -> None:
    path = tiny_model_dir(tmp_path)
    with pytest.raises(ConfigError, match="``quantization=fp8`` rounds bfloat16 weights, and the engine's are float32"):
        build_engine("vllm", EngineSpec(model=str(path), quantization="fp8"))
    with pytest.raises(ConfigError, match="int3"):
        EngineSpec(model=str(path), dtype="bfloat16", quantization="int3")  # type: ignore[arg-type]


def test_gpu_that_cannot_multiply_fp8_is_refused(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform

    from rlhf_rollout.engines.vllm.core import build_core

    monkeypatch.setattr(type(current_platform), "has_device_capability", lambda self, capability: capability <= 80)
    spec = EngineSpec(model="m", dtype="bfloat16", quantization="fp8")
    with pytest.raises(ConfigError, match=r"needs a GPU that multiplies FP8 \(compute capability 8.9 or more\)"):
        build_core(spec, Path("m"), {}, on_gpu=True)
