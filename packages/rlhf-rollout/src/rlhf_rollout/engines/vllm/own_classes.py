"""Models that vLLM's own classes compute otherwise than transformers, and so than the trainer, or only in part.

Where a class leaves something out, a model runs by vLLM's backend for models of transformers, which takes from vLLM
only the attention, the experts and the products of matrices. docs/models.md has the differences of all families.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlhf_data.errors import ConfigError
from rlhf_rollout.engines.spec import EngineSpec
from rlhf_rollout.engines.vllm.rotary import rotary_difference

_logger = logging.getLogger(__name__)


def _always(config: Mapping[str, Any]) -> bool:
    return True


def _clips(config: Mapping[str, Any]) -> bool:
    return config.get("clip_qkv") is not None


def _has_windows(config: Mapping[str, Any]) -> bool:
    return bool(config.get("use_sliding_window"))


def _has_windows_in_some_layers(config: Mapping[str, Any]) -> bool:
    return _has_windows(config) and 0 < config.get("max_window_layers", 0) < config.get("num_hidden_layers", 0)


# By architecture, whether vLLM's class leaves out something that a model with this config has.
_LEAVES_OUT: dict[str, Callable[[Mapping[str, Any]], bool]] = {
    "Gemma3nForCausalLM": _always,  # the embedding that each token has in each layer
    "Ministral3ForCausalLM": _always,  # the scale of queries by position, and `mscale` of YaRN
    "OlmoeForCausalLM": _clips,  # the bound on queries, keys and values
    "Qwen2ForCausalLM": _has_windows_in_some_layers,
    "Qwen2MoeForCausalLM": _has_windows,
}
# By transformers' name of an architecture, vLLM's.
_RENAMED = {"PhimoeForCausalLM": "PhiMoEForCausalLM"}
# By architecture, what neither a class of vLLM nor its backend for models of transformers does.
_IMPOSSIBLE = {
    "DiffLlamaForCausalLM": "has no attention that takes the difference of two heads, as a diffllama does",
    "DogeForCausalLM": "computes a doge model without the mask that its layers make from the values of each token",
    "RecurrentGemmaForCausalLM": "has no place for the state that the layers of a recurrent_gemma keep per sequence",
}
_FIRST_DENSE = {"Glm4MoeLiteForCausalLM", "HYV3ForCausalLM"}  # experts begin after so many layers
_FIRST_MAMBAS = {"FalconMambaForCausalLM", "JambaForCausalLM", "MambaForCausalLM"}
_LINEAR_HEADS = (64, 128)
# Models that the other backend does not run, or not with their attention.
_OWN_ALONE = ("Deepseek", "Glm4MoeLite", "GlmMoeDsa", "Longcat", "AXK1", "MiniCPM3", "GptOss")
_BACKENDS = ("TransformersForCausalLM", "TransformersMoEForCausalLM")


def model_classes(config: Mapping[str, Any]) -> list[str]:
    """Return the names of vLLM's classes, one of which runs a model: those of its config, or of the other backend.

    Args:
        config: the fields of config.json.

    Raises:
        ConfigError: no class of vLLM computes the model as transformers does.
    """
    names = [_RENAMED.get(name, name) for name in config.get("architectures") or ()]
    difference = rotary_difference(config)
    if difference is not None and ("text_config" in config or any(name.startswith(_OWN_ALONE) for name in names)):
        message = f"vLLM's class of a {config.get('model_type')} does not compute {difference}, as transformers does"
        raise ConfigError(message, hint="use a model of another family, such as those in docs/models.md")
    if "text_config" in config:
        return names
    if missing := next((_IMPOSSIBLE[name] for name in names if name in _IMPOSSIBLE), None):
        raise ConfigError(f"vLLM {missing}", hint="use a model of another family, such as those in docs/models.md")
    if "PhiMoEForCausalLM" in names and not config.get("attention_bias"):
        message = "vLLM's class of a phimoe has biases in its attention; `attention_bias` is false in config.json"
        raise ConfigError(message, hint="use a PhiMoE with `attention_bias`, as all published ones are")
    if difference is not None or any(name in _LEAVES_OUT and _LEAVES_OUT[name](config) for name in names):
        return list(_BACKENDS)
    return names


def model_impl(classes: Sequence[str]) -> str:
    """Return vLLM's name of the implementation that has these classes."""
    return "transformers" if tuple(classes) == _BACKENDS else "auto"


def check_images(config: Mapping[str, Any]) -> None:
    """Raise ConfigError if vLLM is not known to compute a model with images as transformers does.

    Args:
        config: the fields of config.json.
    """
    elsewhere = "use engine transformers, or a model of another family from docs/models.md"
    if config.get("model_type") == "llava_onevision":
        raise ConfigError("images of a llava_onevision in vLLM were not compared with transformers", hint=elsewhere)
    if config.get("model_type") == "gemma3":
        # On a CPU no token sees a later one; on a GPU the window of a layer does not bound what an image's tokens see.
        message = "vLLM lets the tokens of an image of a gemma3 see others than transformers does"
        raise ConfigError(message, hint=elsewhere)


def check_on_gpu(config: Mapping[str, Any]) -> None:
    """Raise ConfigError if vLLM computes another model on a GPU.

    Args:
        config: the fields of config.json, with those of its `text_config` if it has one.
    """
    if "Gemma3nForCausalLM" in (config.get("architectures") or ()):
        message = "vLLM's log-probs of a gemma3n_text are far from those of the model on a GPU, by 0.6 nats in the mean"
        raise ConfigError(message, hint="use a model of another family, such as those in docs/models.md")


def missing_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that vLLM reads and a config of transformers need not have, with their values.

    Among them are the names of vLLM's classes where those of transformers differ.
    """
    names = config.get("architectures") or ()
    found: dict[str, Any] = {}
    if any(name in _RENAMED for name in names):
        found["architectures"] = [_RENAMED.get(name, name) for name in names]
    if "GPTBigCodeForCausalLM" in names and config.get("multi_query", True):
        found["num_key_value_heads"] = 1
    if "Qwen3VLForConditionalGeneration" in names:  # on a CPU, vLLM asks for the class of the model's text part
        found["text_config"] = {"architectures": ["Qwen3ForCausalLM"]}
    if "DeepseekV3ForCausalLM" in names:  # how all models of this kind choose experts
        found |= {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    if "Lfm2ForCausalLM" in names:
        found |= dict.fromkeys(("conv_dim", "block_dim"), config["hidden_size"])
    if "MiniMaxM2ForCausalLM" in names and "head_dim" in config:
        # How all models of this kind choose experts.
        found |= {"scoring_func": "sigmoid", "use_routing_bias": True}
        share = (config.get("rope_parameters") or {}).get("partial_rotary_factor", 1.0)
        found["rotary_dim"] = int(config["head_dim"] * share)
    if _FIRST_DENSE.intersection(names) and "mlp_layer_types" in config:
        found["first_k_dense_replace"] = config["mlp_layer_types"].count("dense")
    if "HYV3ForCausalLM" in names and "moe_intermediate_size" in config:
        found |= {"expert_hidden_dim": config["moe_intermediate_size"], "qk_norm": True}
    # What transformers does not read, and vLLM does, may be anything.
    always = ("architectures", "text_config", "num_key_value_heads")
    return {name: value for name, value in found.items() if name in always or name not in config}


def shortest_prompt(config: Mapping[str, Any]) -> int:
    """Return the number of tokens of the shortest prompt that vLLM answers as it should.

    It takes a prompt of one token for a decode step. A layer of linear attention then goes on from the state of an
    earlier request.
    """
    return 2 if _has_linear_attention(config) else 1


def state_dtype(config: Mapping[str, Any], *, on_gpu: bool) -> str:
    """Return vLLM's name of the data type of the states of recurrent layers.

    The kernels of linear attention on a CPU take states in float32 alone.
    """
    return "auto" if on_gpu or not _has_linear_attention(config) else "float32"


def check_on_cpu(config: Mapping[str, Any], dtype: str) -> None:
    """Raise ConfigError if vLLM does not compute a model on a CPU in `dtype`, or computes another one.

    Args:
        config: the fields of config.json, with those of its `text_config` if it has one.
        dtype: that of the engine.
    """
    names = set(config.get("architectures") or ())
    elsewhere = "use a GPU, or a model of another family from docs/models.md"
    if "Ernie4_5_MoeForCausalLM" in names:
        message = "vLLM chooses the experts of an ernie4_5_moe on a CPU without the correction of their scores"
        raise ConfigError(message, hint=elsewhere)
    if found := names & _FIRST_MAMBAS:
        message = f"vLLM has no kernel for the Mamba layers of {found.pop()} on a CPU; it has one for those of Mamba 2"
        raise ConfigError(message, hint=elsewhere)
    has_experts = "moe" in (config.get("layers_block_type") or config.get("layer_types") or ())
    if "NemotronHForCausalLM" in names and (has_experts or "E" in config.get("hybrid_override_pattern", "")):
        raise ConfigError("vLLM has no kernel for the experts of a nemotron_h on a CPU", hint=elsewhere)
    if not _has_linear_attention(config):
        return
    if dtype != "bfloat16":
        message = f"vLLM computes linear attention on a CPU only in bfloat16, and not in {dtype}"
        raise ConfigError(message, hint="add ``dtype=bfloat16``")
    for name in ("linear_key_head_dim", "linear_value_head_dim"):
        if config.get(name, _LINEAR_HEADS[0]) not in _LINEAR_HEADS:
            message = f"`{name}` is {config[name]}; on a CPU, vLLM computes linear attention with 64 or 128"
            raise ConfigError(message, hint=elsewhere)


def fit_to_cpu(spec: EngineSpec, config: Mapping[str, Any], classes: Sequence[type]) -> EngineSpec:
    """Return the settings with which vLLM runs a model on a CPU.

    There it caches the states of recurrent layers, such as Mamba's, only with chunked prefill, which engines do not use
    on a CPU. Such a model runs without a cache of prefixes.

    Args:
        spec: the settings that were asked for.
        config: the fields of config.json, with those of its `text_config` if it has one.
        classes: vLLM's classes of its architectures.

    Raises:
        ConfigError: vLLM does not compute the model on a CPU in this `dtype`, or computes another one.
    """
    check_on_cpu(config, spec.dtype)
    # Some classes that read images, such as that of Qwen3.5, have the second mark alone.
    if any(getattr(kind, mark, False) for kind in classes for mark in ("has_inner_state", "is_hybrid")):
        return replace(spec, enable_prefix_caching=False)
    return spec


def fit_to_gpu(spec: EngineSpec, config: Mapping[str, Any]) -> EngineSpec:
    """Return the settings with which vLLM runs a model on a GPU.

    vLLM caches the states of Mamba 2 at the ends of chunks of the kernel. In a model without attention its blocks are
    shorter than a chunk, and vLLM fails at the first prompt. So no prefixes are cached, and a warning says so.

    Args:
        spec: the settings that were asked for.
        config: the fields of config.json, with those of its `text_config` if it has one.
    """
    if not spec.enable_prefix_caching or "Mamba2ForCausalLM" not in (config.get("architectures") or ()):
        return spec
    _logger.warning("engines cache no common prefixes of this mamba2 model, because vLLM fails when it caches them")
    return replace(spec, enable_prefix_caching=False)


def _has_linear_attention(config: Mapping[str, Any]) -> bool:
    return any(name.startswith(("Qwen3Next", "Qwen3_5")) for name in config.get("architectures") or ())
