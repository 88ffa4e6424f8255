"""Which class of vLLM runs a family of models, with which fields and settings, and which families are refused."""

import dataclasses
import sys
from contextlib import nullcontext
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf_data.errors import ConfigError
from rlhf_rollout.engines import EngineSpec
from rlhf_rollout.engines.vllm.core import register_architectures
from rlhf_rollout.engines.vllm.own_classes import (
    check_images,
    check_on_cpu,
    check_on_gpu,
    fit_to_cpu,
    fit_to_gpu,
    missing_fields,
    model_classes,
    model_impl,
    shortest_prompt,
    state_dtype,
)


@pytest.mark.parametrize("missing", ["torchvision", "timm"])
def test_package_that_vllms_class_of_a_model_needs_is_named(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    def load_model_cls() -> None:
        raise ModuleNotFoundError(name=missing)

    def other() -> None:
        raise RuntimeError

    loads = {"Seeing": load_model_cls, "Other": other, "Known": lambda: int}
    models = {name: SimpleNamespace(load_model_cls=load) for name, load in loads.items()}
    registered = {}
    registry = SimpleNamespace(models=models, register_model=registered.__setitem__)
    monkeypatch.setitem(sys.modules, "rlhf_rollout.engines.vllm.names", SimpleNamespace(ModelRegistry=registry))
    monkeypatch.setattr(metadata, "version", {"torch": "2.11.0+cpu"}.__getitem__)
    assert register_architectures(["Unknown", "Other", "Known"]) == [int]
    assert registered == {"Known": int}
    install = {
        "timm": "pip install timm",
        "torchvision": r"pip install 'torchvision==0\.26\.\*' from the index that torch 2",
    }
    with pytest.raises(ConfigError, match=rf"Seeing needs the package {missing}, [^\n]*\n\nhint: {install[missing]}"):
        register_architectures(["Unknown", "Seeing"])


_WINDOWS = {"use_sliding_window": True, "num_hidden_layers": 3}


@pytest.mark.parametrize(
    ("architecture", "fields", "impl"),
    [
        ("OlmoeForCausalLM", {"clip_qkv": 8.0}, "transformers"),
        ("OlmoeForCausalLM", {"clip_qkv": None}, "auto"),
        ("Qwen2MoeForCausalLM", {"use_sliding_window": True}, "transformers"),
        ("Qwen2ForCausalLM", _WINDOWS | {"max_window_layers": 1}, "transformers"),
        ("Qwen2ForCausalLM", _WINDOWS | {"max_window_layers": 0}, "auto"),
        ("Qwen2ForCausalLM", _WINDOWS | {"max_window_layers": 1, "use_sliding_window": False}, "auto"),
        ("Gemma3nForCausalLM", {}, "transformers"),
        ("Gemma3nForCausalLM", {"text_config": {}}, "auto"),
        ("LlamaForCausalLM", {"clip_qkv": 8.0, "use_sliding_window": True}, "auto"),
    ],
)
def test_vllm_runs_by_transformers_layers_what_its_own_class_computes_otherwise(architecture, fields, impl) -> None:
    classes = model_classes({"architectures": [architecture], **fields})
    assert model_impl(classes) == impl
    assert (classes == [architecture]) == (impl == "auto")


def test_config_without_architectures_names_no_class_of_vllm() -> None:
    assert model_classes({}) == model_classes({"architectures": None}) == []


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("DogeForCausalLM", {}, "vLLM computes a doge model without the mask"),
        ("PhimoeForCausalLM", {"attention_bias": False}, r"a phimoe has biases [^\n]* is false"),
    ],
)
def test_model_that_no_class_of_vllm_computes_as_transformers_is_refused(name, fields, message) -> None:
    with pytest.raises(ConfigError, match=rf"{message}[^\n]*\n\nhint: use a "):
        model_classes({"architectures": [name], **fields})


def test_vllm_is_told_its_own_name_of_a_phimoe() -> None:
    config = {"architectures": ["PhimoeForCausalLM"], "attention_bias": True}
    assert model_classes(config) == ["PhiMoEForCausalLM"]
    assert missing_fields(config) == {"architectures": ["PhiMoEForCausalLM"]}


def test_engine_on_a_gpu_caches_no_prefixes_of_a_mamba_2_and_says_so(caplog) -> None:
    spec = EngineSpec(model="m")
    config = {"architectures": ["Mamba2ForCausalLM"]}
    assert fit_to_gpu(spec, config) == dataclasses.replace(spec, enable_prefix_caching=False)
    assert "cache no common prefixes of this mamba2" in caplog.text
    caplog.clear()
    without = dataclasses.replace(spec, enable_prefix_caching=False)
    assert fit_to_gpu(without, config) is without
    for others in ({"architectures": ["NemotronHForCausalLM"]}, {"architectures": None}, {}):
        assert fit_to_gpu(spec, others) is spec
    assert not caplog.text


@pytest.mark.parametrize("mark", ["has_inner_state", "is_hybrid"])
def test_engine_on_a_cpu_caches_no_prefixes_of_layers_with_a_state(mark: str) -> None:
    spec = EngineSpec(model="m")
    recurrent = type("Recurrent", (), {mark: True})
    assert fit_to_cpu(spec, {"architectures": ["Mamba2ForCausalLM"]}, [int, recurrent]) == dataclasses.replace(
        spec, enable_prefix_caching=False
    )
    assert fit_to_cpu(spec, {"architectures": ["LlamaForCausalLM"]}, [int]) is spec


EXPERTS = "no kernel for the experts of a nemotron_h on a CPU"
LINEAR = ["Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM", "Qwen3NextForCausalLM"]


@pytest.mark.parametrize("name", LINEAR)
def test_linear_attention_on_a_cpu_needs_bfloat16(name: str) -> None:
    with pytest.raises(ConfigError, match=r"only in bfloat16, and not in float32\n\nhint: add ``dtype=bfloat16``"):
        check_on_cpu({"architectures": ["Other", name]}, "float32")
    spec = EngineSpec(model="m", dtype="bfloat16")
    assert fit_to_cpu(spec, {"architectures": [name]}, []) is spec


@pytest.mark.parametrize("field", ["linear_key_head_dim", "linear_value_head_dim"])
def test_linear_attention_on_a_cpu_needs_heads_that_its_kernels_have(field: str) -> None:
    config = {"architectures": ["Qwen3NextForCausalLM"], "linear_key_head_dim": 64, "linear_value_head_dim": 128}
    check_on_cpu(config, "bfloat16")
    with pytest.raises(ConfigError, match=rf"`{field}` is 32; [^\n]* with 64 or 128\n\nhint: use a GPU"):
        check_on_cpu(config | {field: 32}, "bfloat16")
    check_on_cpu({field: 32, "architectures": ["LlamaForCausalLM"]}, "float32")


def test_states_of_linear_attention_are_in_float32_on_a_cpu() -> None:
    for name in LINEAR:
        config = {"architectures": [name]}
        assert state_dtype(config, on_gpu=False) == "float32"
        assert state_dtype(config, on_gpu=True) == "auto"
    assert state_dtype({"architectures": ["Mamba2ForCausalLM"]}, on_gpu=False) == "auto"


def test_prompts_of_linear_attention_have_two_tokens() -> None:
    assert [shortest_prompt({"architectures": [name]}) for name in LINEAR] == [2, 2, 2]
    assert shortest_prompt({"architectures": ["Mamba2ForCausalLM"]}) == shortest_prompt({}) == 1


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("Ernie4_5_MoeForCausalLM", {}, r"of an ernie4_5_moe on a CPU without [^\n]*"),
        ("FalconMambaForCausalLM", {}, r"no kernel for the Mamba layers of FalconMambaForCausalLM on a CPU[^\n]*"),
        ("NemotronHForCausalLM", {"layers_block_type": ["linear_attention", "moe"]}, EXPERTS),
        ("NemotronHForCausalLM", {"layer_types": ["linear_attention", "moe"]}, EXPERTS),
        ("NemotronHForCausalLM", {"hybrid_override_pattern": "M-E*"}, EXPERTS),
        ("NemotronHForCausalLM", {"layers_block_type": ["linear_attention", "mlp"]}, None),
        ("NemotronHForCausalLM", {"hybrid_override_pattern": "M-*"}, None),
        ("NemotronHForCausalLM", {}, None),
        ("MixtralForCausalLM", {"layers_block_type": ["linear_attention", "moe"]}, None),
    ],
)
def test_family_that_vllm_does_not_compute_on_a_cpu_is_refused(name: str, fields: dict[str, Any], message) -> None:
    with nullcontext() if message is None else pytest.raises(ConfigError, match=rf"{message}\n\nhint: use a GPU"):
        check_on_cpu({"architectures": ["Other", name], **fields}, "bfloat16")


def test_a_gemma_3n_for_text_alone_is_refused_on_a_gpu() -> None:
    with pytest.raises(ConfigError, match=r"vLLM's log-probs of a gemma3n_text are far from .* on a GPU"):
        check_on_gpu({"architectures": ["Gemma3nForCausalLM"]})
    for name in ("Gemma3nForConditionalGeneration", "Ministral3ForCausalLM"):
        check_on_gpu({"architectures": [name]})
    check_on_gpu({})


def test_experts_of_deepseek_v3_are_chosen_as_transformers_does_where_its_config_does_not_say_how() -> None:
    config = {"architectures": ["DeepseekV3ForCausalLM"]}
    assert missing_fields(config) == {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    assert missing_fields(config | {"topk_method": "greedy"}) == {"scoring_func": "sigmoid"}


def test_fields_that_vllm_reads_of_lfm2_are_its_width() -> None:
    config = {"architectures": ["Lfm2ForCausalLM"], "hidden_size": 96}
    assert missing_fields(config) == {"conv_dim": 96, "block_dim": 96}
    assert missing_fields(config | {"conv_dim": 64}) == {"block_dim": 96}
    assert missing_fields({"architectures": ["LlamaForCausalLM"], "hidden_size": 96}) == missing_fields({}) == {}


@pytest.mark.parametrize(
    ("name", "fields", "told"),
    [
        (
            "MiniMaxM2ForCausalLM",
            {"head_dim": 128, "rope_parameters": {"partial_rotary_factor": 0.5}},
            {"rotary_dim": 64, "scoring_func": "sigmoid", "use_routing_bias": True},
        ),
        (
            "MiniMaxM2ForCausalLM",
            {"head_dim": 128, "rotary_dim": 32, "scoring_func": "x", "use_routing_bias": True},
            {},
        ),
        ("Glm4MoeLiteForCausalLM", {"mlp_layer_types": ["dense", "dense", "sparse"]}, {"first_k_dense_replace": 2}),
        ("Glm4MoeLiteForCausalLM", {"mlp_layer_types": ["dense"], "first_k_dense_replace": 1}, {}),
        ("Glm4MoeLiteForCausalLM", {"first_k_dense_replace": 1}, {}),
        (
            "HYV3ForCausalLM",
            {"mlp_layer_types": ["dense", "sparse"], "moe_intermediate_size": 48},
            {"first_k_dense_replace": 1, "expert_hidden_dim": 48, "qk_norm": True},
        ),
        (
            "Qwen3VLForConditionalGeneration",
            {"text_config": {"hidden_size": 64}},
            {"text_config": {"architectures": ["Qwen3ForCausalLM"]}},
        ),
        ("LlamaForCausalLM", {"head_dim": 64, "mlp_layer_types": ["dense"], "moe_intermediate_size": 48}, {}),
        ("HYV3ForCausalLM", {"first_k_dense_replace": 1, "expert_hidden_dim": 48, "qk_norm": True}, {}),
    ],
)
def test_fields_that_vllm_reads_are_made_of_those_that_transformers_saves(
    name: str, fields: dict[str, Any], told: dict[str, Any]
) -> None:
    assert missing_fields({"architectures": [name], **fields}) == told


@pytest.mark.parametrize(
    ("fields", "told"), [({}, 1), ({"multi_query": True, "num_key_value_heads": 2}, 1), ({"multi_query": False}, None)]
)
def test_vllm_is_told_that_the_heads_of_a_bigcode_share_one_key(fields, told) -> None:
    found = missing_fields({"architectures": ["GPTBigCodeForCausalLM"], "num_attention_heads": 4, **fields})
    assert found == ({} if told is None else {"num_key_value_heads": told})


def test_images_of_families_that_vllm_computes_otherwise_are_refused() -> None:
    check_images({"model_type": "qwen2_vl"})
    with pytest.raises(ConfigError, match=r"of a llava_onevision in vLLM were not compared [^\n]*\n\nhint: use engine"):
        check_images({"model_type": "llava_onevision"})
    with pytest.raises(ConfigError, match=r"the tokens of an image of a gemma3 see others [^\n]*\n\nhint: use engine"):
        check_images({"model_type": "gemma3"})
