"""Models that vLLM's own classes compute otherwise than transformers, and so than the trainer, or only in part.

Where a class leaves something out, a model runs by vLLM's backend for models of transformers, which takes from vLLM
only the attention, the experts and the products of matrices. docs/models.md has the differences of all families.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlhf_data.errors import ConfigError
from rlhf_rollout.engines.spec import EngineSpec


def _always(config: Mapping[str, Any]) -> bool:
    return True


def _clips(config: Mapping[str, Any]) -> bool:
    return config.get("clip_qkv") is not None


def _has_windows(config: Mapping[str, Any]) -> bool:
    return bool(config.get("use_sliding_window"))


# By architecture, whether vLLM's class leaves out something that a model with this config has.
_LEAVES_OUT: dict[str, Callable[[Mapping[str, Any]], bool]] = {
    "Gemma3nForCausalLM": _always,  # the embedding that each token has in each layer
    "Ministral3ForCausalLM": _always,  # the scale of queries by position, and `mscale` of YaRN
    "OlmoeForCausalLM": _clips,  # the bound on queries, keys and values
    "Qwen2MoeForCausalLM": _has_windows,
}
_BACKENDS = ("TransformersForCausalLM", "TransformersMoEForCausalLM")


def model_classes(config: Mapping[str, Any]) -> list[str]:
    """Return the names of vLLM's classes, one of which runs a model: those of its config, or of the other backend.

    Args:
        config: the fields of config.json.

    Raises:
        ConfigError: no class of vLLM computes the model as transformers does.
    """
    names = list(config.get("architectures") or ())
    if "text_config" in config:
        return names
    if "DogeForCausalLM" in names:
        message = "vLLM computes a doge model without the mask that its layers make from the values of each token"
        raise ConfigError(message, hint="use a model of another family, such as those in docs/models.md")
    if any(name in _LEAVES_OUT and _LEAVES_OUT[name](config) for name in names):
        return list(_BACKENDS)
    return names


def model_impl(classes: Sequence[str]) -> str:
    """Return vLLM's name of the implementation that has these classes."""
    return "transformers" if tuple(classes) == _BACKENDS else "auto"


def fit_to_cpu(spec: EngineSpec, names: Sequence[str], classes: Sequence[type]) -> EngineSpec:
    """Return the settings with which vLLM runs a model on a CPU.

    There it caches the states of recurrent layers, such as Mamba's, only with chunked prefill, which engines do not use
    on a CPU. Such a model runs without a cache of prefixes.

    Args:
        spec: the settings that were asked for.
        names: the model's architectures.
        classes: vLLM's classes of these names.

    Raises:
        ConfigError: vLLM does not compute the model on a CPU in this `dtype`, or computes another one.
    """
    if "Ernie4_5_MoeForCausalLM" in names:
        message = "vLLM chooses the experts of an ernie4_5_moe on a CPU without the correction of their scores"
        raise ConfigError(message, hint="use a GPU, or a model of another family from docs/models.md")
    if any(name.startswith("Qwen3Next") for name in names):
        # Its kernels take states in float32, which is what a Qwen3.5 asks for in its config.
        message = "vLLM does not compute the linear attention of a qwen3_next on a CPU"
        raise ConfigError(message, hint="use a GPU, or a model of another family from docs/models.md")
    if spec.dtype != "bfloat16" and any(name.startswith("Qwen3_5") for name in names):
        message = f"vLLM computes linear attention on a CPU only in bfloat16, and not in {spec.dtype}"
        raise ConfigError(message, hint="add ``dtype=bfloat16``")
    if any(getattr(kind, "has_inner_state", False) for kind in classes):
        return replace(spec, enable_prefix_caching=False)
    return spec
