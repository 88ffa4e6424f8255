"""Adapters in peft's layout that engines apply side by side: what they are, read without a library of tensors."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_data.errors import ConfigError
from rlhf_data.pretrained import clear_errors
from rlhf_data.stored_weights import is_head, read_json, stored_weights
from rlhf_rollout.engines.model_files import checkpoint_shapes

ADAPTER_FOLDER = "adapter"  # within the folder of a model that a run saved
WEIGHTS_FILE = "adapter_model.safetensors"
MAX_RANK = 512  # vLLM's
_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
# Settings of peft that make an adapter more than two matrices beside each of some linear layers.
_UNFIT = (
    "alora_invocation_tokens",
    "arrow_config",
    "bias",
    "kasa_config",
    "layer_replication",
    "lora_bias",
    "modules_to_save",
    "monteclora_config",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_dora",
    "use_qalora",
)
MERGE_HINT = "`rlhf lora_combiner` merges it into a model, which can be served alone"
_PLAIN_STARTS = ("gaussian", "eva", "orthogonal")  # ways to start that leave the weights of the base as they are


@dataclass(frozen=True, slots=True)
class LoraModule:
    """An adapter that requests choose by its name.

    Attributes:
        name: that of the adapter.
        path: a folder in peft's layout.
    """

    name: str
    path: str


class StoredAdapter(NamedTuple):
    """What the files of an adapter say.

    Attributes:
        rank: of its largest matrices.
        scales: by layer, the number by which the product of its two matrices is multiplied.
        base: name of the model that it was trained on; None if it is not told.
    """

    rank: int
    scales: Mapping[str, float]
    base: str | None


def parse_lora_modules(text: str | None) -> tuple[LoraModule, ...]:
    """Return the adapters of a list `NAME=FOLDER,NAME=FOLDER`. Raises ConfigError for any other text."""
    found: dict[str, LoraModule] = {}
    for entry in filter(None, map(str.strip, (text or "").split(","))):
        name, _, path = (part.strip() for part in entry.partition("="))
        if not name or not path:
            hint = "write NAME=FOLDER for each adapter, separated by commas"
            raise ConfigError(f"``lora_modules``: {entry} lacks a name or a folder", hint=hint)
        if name in found:
            message = f"``lora_modules`` has two adapters {name}: {found[name].path} and {path}"
            raise ConfigError(message, hint="give each a name of its own")
        found[name] = LoraModule(name, path)
    if text is not None and not found:
        raise ConfigError("``lora_modules`` names no adapter", hint="write NAME=FOLDER")
    return tuple(found.values())


def layer_of(name: str) -> tuple[str, str] | None:
    """Return the layer of a tensor in an adapter's file, and A or B; None for a tensor of another kind."""
    found = _TENSOR.fullmatch(name)
    return None if found is None else (found[1], found[2])


def check_adapters(modules: tuple[LoraModule, ...], model_dir: Path | None) -> list[StoredAdapter]:
    """Return what the files of adapters say.

    Raises:
        ConfigError: one is missing or damaged, has more than vLLM applies, or does not fit the model in `model_dir`.
            Without `model_dir`, the model is not looked at.
    """
    shapes = checkpoint_shapes(model_dir) or {} if modules and model_dir else {}
    return [read_adapter(module, shapes) for module in modules]


def read_adapter(module: LoraModule, base: Mapping[str, tuple[int, ...]]) -> StoredAdapter:
    """Return what the files of an adapter say; `base` has the shapes of its model's weights, or none to check less.

    Raises ConfigError as `check_adapters`.
    """
    folder = Path(module.path)
    own = f"the adapter {module.name} in {folder}"
    if not (folder / "adapter_config.json").is_file() or not (folder / WEIGHTS_FILE).is_file():
        message = f"``lora_modules``: there is no adapter {module.name} in {folder}"
        raise ConfigError(message, hint=f"an adapter's folder holds adapter_config.json and {WEIGHTS_FILE}")
    with clear_errors("adapter", folder):
        config = read_json(folder / "adapter_config.json")
        shapes = {name: weight.shape for name, weight in stored_weights(folder).items()}
        _check_config(config, own)
        ranks = {layer: _rank(layer, shapes, base, own) for layer in _layers(shapes, base, own)}
        scales = {layer: _scale(config, layer, rank, own) for layer, rank in ranks.items()}
    return StoredAdapter(max(ranks.values()), scales, config.get("base_model_name_or_path"))


def _check_config(config: Mapping[str, Any], own: str) -> None:
    if (kind := config.get("peft_type")) != "LORA":
        raise ConfigError(f"{own} is of the kind {kind}", hint="vLLM applies adapters of the kind LORA")
    base = config.get("base_model_name_or_path")
    if not isinstance(base, str | None):
        raise ConfigError(f"{own} names no model as its base, but {base!r}", hint="copy the adapter again")
    more = {name: value for name in _UNFIT if (value := config.get(name)) and value != "none"}
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower() not in _PLAIN_STARTS:  # such as PiSSA, which changes the base
        more["init_lora_weights"] = start
    if more:
        said = " and ".join(f"{name} {value}" for name, value in more.items())
        raise ConfigError(f"{own} has {said}, which vLLM does not apply", hint=MERGE_HINT)


def _layers(shapes: Mapping[str, tuple[int, ...]], base: Mapping[str, Any], own: str) -> list[str]:
    """Return the layers that an adapter has. Raises ConfigError if one of them gets no adapter of vLLM."""
    others = [name for name in shapes if layer_of(name) is None]
    if others:
        message = f"{own} has {len(others)} tensors that belong to no linear layer, such as {others[0]}"
        raise ConfigError(message, hint=MERGE_HINT)
    layers = list(dict.fromkeys(layer for layer, _ in filter(None, map(layer_of, shapes))))
    if not layers:
        raise ConfigError(f"{own} has no tensors", hint="copy the adapter again")
    for layer in layers:
        if is_head(f"{layer}.weight"):
            raise ConfigError(f"{own} changes the LM head, where engines mask ids without a token", hint=MERGE_HINT)
    unknown = [layer for layer in layers if f"{layer}.weight" not in base]
    # Files of some families have other names than their layers: what vLLM has no layer for, it refuses.
    if base and 0 < len(unknown) < len(layers):
        message = f"{own} changes {len(unknown)} layers that the model lacks, such as {unknown[0]}"
        raise ConfigError(message, hint="name the model that it was trained on")
    return layers


def _rank(layer: str, shapes: Mapping[str, tuple[int, ...]], base: Mapping[str, tuple[int, ...]], own: str) -> int:
    """Return the rank of a layer's two matrices. Raises ConfigError if one is missing or does not fit the layer."""
    first, second = (shapes.get(f"base_model.model.{layer}.lora_{matrix}.weight", ()) for matrix in "AB")
    if len(first) != 2 or len(second) != 2 or first[0] != second[1]:
        message = f"{own} has matrices of shapes {list(first)} and {list(second)} for {layer}, which do not match"
        raise ConfigError(message, hint="copy the adapter again")
    weight = base.get(f"{layer}.weight")
    if weight is not None and weight != (second[0], first[1]):
        message = f"{own} is for a layer {layer} of shape {[second[0], first[1]]}; the model's is {list(weight)}"
        raise ConfigError(message, hint="name the model that it was trained on")
    if first[0] > MAX_RANK:
        raise ConfigError(f"{own} has rank {first[0]}; vLLM takes up to {MAX_RANK}", hint=MERGE_HINT)
    return first[0]


def _scale(config: Mapping[str, Any], layer: str, rank: int, own: str) -> float:
    """Return alpha / rank, or alpha / sqrt(rank) for rsLoRA (arXiv:2312.03732), as peft finds a layer's alpha.

    Raises ConfigError for an alpha that is no finite number.
    """
    patterns = config.get("alpha_pattern") or {}
    found = (alpha for key, alpha in patterns.items() if re.match(rf"(.*\.)?({key})$", layer))
    alpha = next(found, config["lora_alpha"])
    if not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise ConfigError(
            f"{own} has the alpha {alpha!r} for {layer}, which is no number", hint="copy the adapter again"
        )
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)
