"""Low-rank adapters (LoRA) for the linear layers of a model. The only file that imports peft."""

import json
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rlhf_data.errors import ConfigError, installs
from rlhf_data.own_code import is_trusted, trusted
from rlhf_data.pretrained import clear_errors, load_tokenizer
from rlhf_data.safety import open_to_others
from rlhf_models.actor import Actor
from rlhf_models.checkpoint.beyond_text import linear_layers_beyond_text
from rlhf_models.checkpoint.files import CONFIG_FIELDS_FILE, VALUE_HEAD_FILE, quiet_transformers
from rlhf_models.four_bit import pack_layers, round_layers
from rlhf_models.images import language_model_class
from rlhf_models.loading import load_actor, load_config, load_critic
from rlhf_models.weights import HEAD_PREFIX, save_hf, written

_PREFIX = "model."  # name of the transformers model inside an `Actor`, `Critic` or `RewardModel`


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSpec:
    """Adapters W x + (alpha / rank) B A x, where A [rank, in] starts random and B [out, rank] starts at zero.

    Attributes:
        rank: >= 1.
        alpha: > 0; the adapter's output is scaled by alpha / rank.
        dropout: probability, applied to the input of A, in [0, 1).
        target_modules: names of the linear layers that get an adapter; "all-linear" means all except the LM head. The
            experts of a mixture and their routers are no linear layers, and layers that text does not reach get none,
            nor do those of Mamba whose weight a kernel reads, which would pass an adapter by.
        load_in_4bit: store the frozen weights of all layers that "all-linear" means in 4 bits; see `four_bit`. The
            other weights stay as they are.

    Raises:
        ConfigError: an attribute out of its range.

    Source: Hu et al. 2021, arXiv:2106.09685, sec. 4.1.
    """

    rank: int
    alpha: float = 16.0
    dropout: float = 0.0
    target_modules: str | tuple[str, ...] = "all-linear"
    load_in_4bit: bool = False

    def __post_init__(self) -> None:
        if self.rank < 1 or self.alpha <= 0 or not 0 <= self.dropout < 1:
            given = f"rank {self.rank}, alpha {self.alpha} and dropout {self.dropout}"
            raise ConfigError(f"LoRA has {given}; rank must be 1 or more, alpha above 0, dropout in [0, 1)")


def add_lora(model: nn.Module, spec: LoraSpec) -> None:
    """Add adapters to an actor, critic or reward model and freeze all other weights except its value head.

    Raises:
        ConfigError: there is no fitting peft, a target matches no linear layer, or one is the embedding or tied to it;
            with `LoraSpec.load_in_4bit`, bitsandbytes is missing.
    """
    peft = _import_peft()
    hint = "``target_modules`` takes all-linear, or names of layers such as q_proj,v_proj"
    beyond_text = linear_layers_beyond_text(model.model)
    targets = _targets(model.model, spec, beyond_text)
    if spec.load_in_4bit:
        pack_layers(model.model, _linear_layers(model.model, beyond_text))
    config = peft.LoraConfig(
        r=spec.rank,
        lora_alpha=spec.alpha,
        lora_dropout=spec.dropout,
        target_modules=targets,
        exclude_modules=beyond_text or None,
        bias="none",
    )
    try:
        with _names_meant_as_they_are():
            model.model.add_adapter(config)
    except ValueError as error:
        raise ConfigError(f"LoRA: {error}", hint=hint) from None
    layers = {name: layer for name, layer in model.model.named_modules() if hasattr(layer, "lora_A")}
    for target in [] if isinstance(targets, str) else targets:
        if not any(f".{name}".endswith(f".{target}") for name in layers):
            message = f"LoRA: no linear layer is named {target}; the experts of a mixture are none"
            raise ConfigError(message, hint=hint)
    if model.model.get_input_embeddings().weight in _adapted(model):
        # Merging would change the rows that the model looks up, which the adapter of a tied LM head does not.
        raise ConfigError("LoRA: ``target_modules`` names the embedding, or an LM head with the same weight", hint=hint)


def _targets(model: Any, spec: LoraSpec, excluded: Collection[str]) -> str | list[str]:
    """Return the layers that get an adapter, as peft takes them."""
    if spec.target_modules != "all-linear":
        return spec.target_modules if isinstance(spec.target_modules, str) else list(spec.target_modules)
    head = model.get_output_embeddings()
    every = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and layer is not head]
    return "all-linear" if _linear_layers(model) == every else _linear_layers(model, excluded)


def _linear_layers(model: Any, excluded: Collection[str] = ()) -> list[str]:
    """Return the names of the layers that "all-linear" means, without the excluded ones."""
    head = model.get_output_embeddings()
    modules = dict(model.named_modules())
    # A subclass with a forward pass of its own may return more than a product, as routers do.
    chosen = [name for name, layer in modules.items() if getattr(type(layer), "forward", None) is nn.Linear.forward]
    chosen = [name for name in chosen if modules[name] is not head and not _is_read_by_kernel(modules, name)]
    # What an indexer selects has no gradient.
    return [name for name in chosen if "indexer" not in name.split(".") and name not in excluded]


def _is_read_by_kernel(modules: Mapping[str, Any], name: str) -> bool:
    """Return whether a layer of Mamba is not called: a kernel, or the code in its place, reads its weight."""
    owner, _, own = name.rpartition(".")
    return own in ("dt_proj", "out_proj") and hasattr(modules[owner], "A_log") and hasattr(modules[owner], "D")


@contextmanager
def _names_meant_as_they_are() -> Iterator[None]:
    """Within a `with` block, have peft not take names such as gate_proj, in a family with experts, for their weights.

    It does, because they were linear layers of these names in transformers 4. Dense layers and shared experts, which
    have the same names, would get no adapters.
    """
    try:
        from peft.utils import transformers_weight_conversion as conversion
    except ImportError:  # an older version of peft
        yield
        return
    before = conversion.convert_peft_config_for_transformers
    conversion.convert_peft_config_for_transformers = lambda *_, **__: None
    try:
        yield
    finally:
        conversion.convert_peft_config_for_transformers = before


def check_lora(config: Any, spec: LoraSpec) -> float:
    """Try adapters on a model of this transformers config that has no memory; return the share of weights they train.

    Raises:
        ConfigError: as in `add_lora`.
    """
    with torch.device("meta"), quiet_transformers():
        made = language_model_class(config).from_config(config, trust_remote_code=is_trusted(config.name_or_path))
        actor = Actor(made)
        num_weights = sum(weight.numel() for weight in actor.parameters())
        add_lora(actor, spec)
    return sum(weight.numel() for weight in actor.parameters() if weight.requires_grad) / num_weights


class Adapter(NamedTuple):
    """The adapter of one weight.

    Attributes:
        a, b: [rank, in] and [out, rank].
        scale: alpha / rank.
        is_transposed: whether the weight is [in, out].
    """

    a: Tensor
    b: Tensor
    scale: float
    is_transposed: bool

    @torch.no_grad()
    def merged(self, weight: Tensor) -> Tensor:
        """Return W + scale B A, computed in float32 and rounded once, and leave the whole `weight` as it is."""
        change = (self.b.float() @ self.a.float()).mul_(self.scale)
        return (change.T if self.is_transposed else change).add_(weight).to(weight.dtype)


def adapters_by_weight(model: nn.Module) -> dict[Tensor, Adapter]:
    """Return the adapter of each adapted weight; none for a model without adapters."""
    found = {}
    for weight, layer in _adapted(model).items():
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        found[weight] = Adapter(a, b, layer.scaling["default"], layer.fan_in_fan_out)
    return found


def _adapted(model: nn.Module) -> dict[Tensor, Any]:
    return {layer.base_layer.weight: layer for layer in model.modules() if hasattr(layer, "lora_A")}


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Switch the adapters of a model off inside a `with` block, which leaves the base model."""
    model.model.disable_adapters()
    try:
        yield
    finally:
        model.model.enable_adapters()


def save_adapter(
    model: nn.Module,
    state_dict: Mapping[str, Tensor],
    path: str | Path,
    tokenizer: Any | None = None,
    fields: Mapping[str, Any] | None = None,
) -> Path:
    """Write the adapters of a model in peft's layout, and beside them what else `merge_adapter` saves with the model.

    Args:
        model: an actor, critic or reward model with adapters. A value head gets a file of its own.
        state_dict: full (unsharded) weights under the model's own names. Frozen ones may be missing.
        path: the folder to write.
        tokenizer, fields: as in `save_hf`.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    from safetensors.torch import save_file

    peft = _import_peft()
    path = Path(path)
    inner = {name.removeprefix(_PREFIX): value for name, value in state_dict.items() if name.startswith(_PREFIX)}
    weights = peft.get_peft_model_state_dict(model.model, state_dict=inner)
    # In peft's files, names begin with those of its wrappers.
    tensors = {f"base_model.model.{name}": value.contiguous() for name, value in weights.items()}
    with written(path):
        path.mkdir(parents=True, exist_ok=True)
        save_file(tensors, path / "adapter_model.safetensors", {"format": "pt"})
        model.model.peft_config["default"].save_pretrained(path)
        head = {name.removeprefix(HEAD_PREFIX): state_dict[name] for name in state_dict if name.startswith(HEAD_PREFIX)}
        if head:
            save_file({name: tensor.contiguous() for name, tensor in head.items()}, path / VALUE_HEAD_FILE)
        for file in path.glob("*.safetensors"):
            open_to_others(file)
        if tokenizer is not None:
            tokenizer.save_pretrained(path)
        if fields:
            (path / CONFIG_FIELDS_FILE).write_text(json.dumps(dict(fields), indent=2) + "\n", encoding="utf-8")
    return path


def merge_adapter(
    base: str | Path,
    adapter: str | Path,
    out: str | Path,
    *,
    dtype: str,
    load_in_4bit: bool = False,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> Path:
    """Merge an adapter into its base model. Write a plain Hugging Face folder.

    The tokenizer is the adapter's if its folder has one, with the chat template of the training, else the base's.

    Args:
        base: a folder or hub name.
        adapter: a folder in peft's layout. If it holds a value head, the result is the folder of a reward model.
        out: the folder to write. An existing one is replaced.
        dtype: dtype of the merged weights, "float32" or "bfloat16".
        load_in_4bit: merge into the weights that a base in 4 bits computes with, beside which the adapter was trained.
        report: called with the number of weights that are merged and their total, from 0 to all of them.

    Raises:
        ConfigError: no such model, or no adapter that matches it; with `load_in_4bit`, bitsandbytes is missing.
    """
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    peft = _import_peft()
    adapter = Path(adapter).expanduser()
    if not (adapter / "adapter_config.json").is_file():
        hint = "an adapter folder holds adapter_config.json and adapter_model.safetensors"
        raise ConfigError(f"there is no adapter in {adapter}", hint=hint)
    head = adapter / VALUE_HEAD_FILE
    load: Any = load_critic if head.is_file() else load_actor
    reads_text_alone = language_model_class(load_config(base)) is AutoModelForCausalLM
    model = load(base, dtype=dtype, images="" if reads_text_alone else "frozen")
    if load_in_4bit:
        round_layers(model.model, _linear_layers(model.model, linear_layers_beyond_text(model.model)))
    with clear_errors("adapter", adapter), _names_meant_as_they_are():
        model.model = _merged(peft.PeftModel.from_pretrained(model.model, str(adapter)), report)
        if head.is_file():
            model.value_head.take(load_file(head))
    has_tokenizer = (adapter / "tokenizer_config.json").is_file()
    tokenizer = load_tokenizer(trusted(str(adapter), is_trusted(base)) if has_tokenizer else base)
    fields = adapter / CONFIG_FIELDS_FILE
    return save_hf(model, None, tokenizer, out, json.loads(fields.read_text("utf-8")) if fields.is_file() else None)


def _merged(model: Any, report: Callable[[int, int], None]) -> nn.Module:
    """Return the transformers model in a `PeftModel`, with its adapters merged."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [layer for layer in model.modules() if isinstance(layer, BaseTunerLayer)]
    report(0, len(layers))
    for number, layer in enumerate(layers, start=1):
        layer.merge()
        report(number, len(layers))
    with warnings.catch_warnings():
        # `merge_and_unload` says this per layer. It is called for its checks, and to take the adapters out.
        warnings.filterwarnings("ignore", message="All adapters are already merged")
        return model.merge_and_unload()


def _import_peft() -> Any:
    """Return peft. Raises ConfigError if it is not installed, or older than this version of transformers takes it."""
    try:
        import peft
    except ImportError:
        hint = f"{installs('rlhf-models[lora]')}, or train all weights"
        raise ConfigError("LoRA needs peft, which is not installed", hint=hint) from None
    from transformers import __version__
    from transformers.integrations import peft as adapters

    try:
        adapters.check_peft_version(min_version=adapters.MIN_PEFT_VERSION)
    except ValueError:
        needed = f"transformers {__version__} needs peft {adapters.MIN_PEFT_VERSION} or newer"
        hint = f"upgrade peft, or install 'transformers<{__version__}'"
        raise ConfigError(f"LoRA: {needed}, and {peft.__version__} is installed", hint=hint) from None
    return peft
