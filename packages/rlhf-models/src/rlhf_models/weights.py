"""Export of weights: under the names of the Hugging Face checkpoint, or as a folder."""

import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_data.errors import CheckpointError, ConfigError
from rlhf_data.own_code import copy_code, entrust, is_trusted
from rlhf_data.pretrained import clear_errors
from rlhf_data.safety import open_to_others
from rlhf_models.checkpoint.beyond_text import save_left_out
from rlhf_models.checkpoint.empty import load_empty
from rlhf_models.checkpoint.files import VALUE_HEAD_FILE, quiet_transformers, without_wrappers, write_fields
from rlhf_models.four_bit import packed_layers
from rlhf_models.images import language_model_class

logger = logging.getLogger(__name__)

_WRAPPER_PREFIX = "model."
HEAD_PREFIX = "value_head."


def hf_named_weights(
    model: nn.Module, whole: Callable[[nn.Parameter], AbstractContextManager[Tensor]] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Return the weights of an `Actor` or transformers model under their checkpoint names, tied ones once.

    Persistent buffers are among them: a checkpoint has them, and an engine that loads a layer anew needs all of it.

    In memory, transformers keeps the experts of a layer in one parameter [E, ...]. In most checkpoints each matrix of
    each expert has a name of its own; the tensors of experts are then parts of the parameter, some of them copies.
    Adapters are left out: `lora.adapters_by_weight` has them.

    Args:
        model: the model.
        whole: gives the full tensor of a parameter, in a `with` block that lasts until the next weight is read. None
            for the parameter itself; that of a layer in 4 bits needs it. Buffers are always whole.

    Raises:
        ConfigError: a tensor of the checkpoint is made of several parameters.
    """
    model = _unwrapped(model)
    # peft wraps an adapted layer, which becomes its `base_layer`.
    parameters = [(name, weight) for name, weight in model.named_parameters() if ".lora_" not in name]
    stored = model.state_dict()
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in stored]
    named = {name.replace(".base_layer.", "."): weight for name, weight in (*parameters, *buffers)}
    return _read(model, named, _converted_names(model, named), whole or nullcontext)


def _read(
    model: Any, named: Mapping[str, Tensor], converted: set[str], whole: Callable[[nn.Parameter], Any]
) -> Iterator[tuple[str, Tensor]]:
    for name, weight in named.items():
        with whole(weight) if isinstance(weight, nn.Parameter) else nullcontext(weight) as tensor:
            if name in converted:
                yield from _in_checkpoint(model, {name: tensor}).items()
            else:
                yield name, tensor


def save_hf(
    model: nn.Module,
    state_dict: Mapping[str, Tensor] | None,
    tokenizer: Any | None,
    path: str | Path,
    fields: Mapping[str, Any] | None = None,
) -> Path:
    """Write a folder that plain transformers can load, and return its path.

    A language model also gets what it left in the folder that it was loaded from, such as the weights of images.
    The folder is written under a temporary name and then renamed, so that `path` never holds an incomplete model. Its
    generation config and config name the end token of `tokenizer`, which training has taught. A `Critic` or
    `RewardModel` becomes a ...ForSequenceClassification with one label. If transformers has no such class for the
    family, or the head has a bias, which that class has not, the head is in a file of its own,
    `value_head.safetensors`, beside the backbone.

    Args:
        model: an `Actor`, a `Critic`, a `RewardModel`, or a transformers model.
        state_dict: the weights, if the model itself does not hold them (gathered from ZeRO-3, for example), under the
            names of `model.state_dict()` or of the checkpoint, tied ones once or twice. None saves the model's own.
        tokenizer: saved in the same folder, unless None.
        path: the folder to write. An existing one is replaced.
        fields: further fields of config.json, such as `reward.moments_fields`; None removes one that the model has.

    Raises:
        CheckpointError: a weight is missing, or the folder cannot be written.
    """
    path = Path(path)
    with written(path):
        scratch = path.with_name(f".{path.name}.partial")
        old = scratch / "old"
        if old.exists() and not path.exists():  # a process was killed between the two renames below
            old.rename(path)
        shutil.rmtree(scratch, ignore_errors=True)  # what a killed process left
        try:
            new = scratch / "new"
            new.mkdir(parents=True)
            _write(model, state_dict, tokenizer, new)
            write_fields(new, fields or {})
            if path.exists():
                path.rename(old)
            new.rename(path)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return path


@contextmanager
def written(path: Path) -> Iterator[None]:
    """Raise CheckpointError when the folder `path` cannot be written within a `with` block."""
    from safetensors import SafetensorError  # raised, among others, for a full disk

    try:
        yield
    except (OSError, SafetensorError) as error:
        message = f"cannot write the model to {path}: {error}"
        raise CheckpointError(message, hint="check the disk and the path") from error


def _write(model: nn.Module, state_dict: Mapping[str, Tensor] | None, tokenizer: Any | None, folder: Path) -> None:
    from safetensors.torch import save_file

    inner, weights, head = _to_save(model, model.state_dict() if state_dict is None else state_dict, tokenizer)
    _make_generation_config_savable(inner)
    with quiet_transformers(), without_wrappers(), _naming_end(inner, tokenizer):
        inner.save_pretrained(folder, state_dict=weights)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        copy_code(inner.config, folder)
        # A critic or reward model writes no text, and its file has the backbone's names.
        save_left_out(inner, folder, has_weights=not head)
    if head:
        save_file({name: tensor.contiguous() for name, tensor in head.items()}, folder / VALUE_HEAD_FILE)
    for file in folder.glob("*.safetensors"):
        open_to_others(file)


def _to_save(
    model: nn.Module, state: Mapping[str, Tensor], tokenizer: Any | None
) -> tuple[Any, dict[str, Tensor], dict[str, Tensor]]:
    """Return the transformers model that is saved, its weights, and a value head that gets a file of its own."""
    inner = _unwrapped(model)
    weights, head = _split_state(model, inner, state)
    outer = _classifier(inner, tokenizer) if head and "bias" not in head else None
    if outer is None:
        return inner, weights, head
    weights = {f"{outer.base_model_prefix}.{name}": weight for name, weight in weights.items()}
    return outer, weights | {"score.weight": head["weight"]}, {}


def check_saves(model: nn.Module) -> None:
    """Check, before training, that plain transformers loads what `save_hf` will write of a model.

    Names, shapes and types of the tensors to save are compared with what loading them by the saved config expects, all
    without memory.

    Args:
        model: an `Actor`, a `Critic` or a `RewardModel` without adapters.

    Raises:
        ConfigError: a tensor would be missing, unknown, or loaded in another shape or type.
    """
    from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

    state = {name: torch.empty_like(tensor, device="meta") for name, tensor in model.state_dict().items()}
    saved, weights, head = _to_save(model, state, None)
    has_values = hasattr(model, "value_head")
    auto_class = AutoModelForSequenceClassification if has_values else language_model_class(saved.config)
    config = deepcopy(saved.config)
    config.dtype = saved.dtype
    with tempfile.TemporaryDirectory() as scratch, clear_errors("model", saved.config.name_or_path):
        config.save_pretrained(scratch)
        # The class of a model with code of its own is the one that is loaded.
        reader = type(config) if is_trusted(config.name_or_path) else AutoConfig
        stored = reader.from_pretrained(scratch, local_files_only=True, trust_remote_code=False)
        entrust(stored, saved.config.name_or_path)
        tensors = _in_checkpoint(saved, weights)
    found = load_empty(AutoModel if head else auto_class, stored, tensors, "auto")
    if found is None:
        return
    loaded, problems = found
    plain = loaded.state_dict()
    other = [name for name, weight in weights.items() if name in plain and plain[name].dtype != weight.dtype]
    problems = {kind.replace("_", " "): names for kind, names in (problems | {"other_types": other}).items() if names}
    if problems:
        told = "; ".join(f"{kind}: {len(names)}, such as {names[0]}" for kind, names in problems.items())
        message = f"a trained {saved.config.model_type} could not be saved so that transformers loads it ({told})"
        hint = "use a copy that `save_pretrained` wrote, or another model; docs/models.md lists families"
        raise ConfigError(message, hint=hint)


def _classifier(backbone: Any, tokenizer: Any | None) -> Any | None:
    """Return a ...ForSequenceClassification with one label, without weights, around a backbone of the same names.

    None if transformers has no such class for the family, or one with other names, or the model has code of its own.
    """
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    if backbone.is_remote_code():
        return None  # transformers' class computes something else
    config = deepcopy(backbone.config)
    kind = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
    if kind is None:
        return None
    config.num_labels = 1
    pad = getattr(tokenizer, "pad_token_id", None)
    # Transformers reads the score at the last token that is not padding. If answers end with the padding token, it
    # would read the one before.
    config.pad_token_id = None if tokenizer is not None and pad == tokenizer.eos_token_id else pad
    with torch.device("meta"):
        outer = kind(config).to(backbone.dtype)
    expected = {f"{outer.base_model_prefix}.{name}" for name in backbone.state_dict()} | {"score.weight"}
    if outer.state_dict().keys() != expected:
        return None
    conversions = getattr(backbone, "_weight_conversions", None)
    if conversions is not None:  # the form in which the experts of the loaded model were stored
        outer._weight_conversions = conversions
    return outer


@contextmanager
def _naming_end(model: Any, tokenizer: Any | None) -> Iterator[None]:
    """Within a `with` block, have the configs of a model name the tokenizer's end token, with which training data ends.

    A published base model often names another one, and a trained model would go on past its answers.
    """
    end = getattr(tokenizer, "eos_token_id", None)
    configs = [config for config in (model.config, getattr(model, "generation_config", None)) if config is not None]
    before = [getattr(config, "eos_token_id", None) for config in configs]
    for config, named in zip(configs, before, strict=True):
        known = named if isinstance(named, list) else [token for token in [named] if token is not None]
        if end is not None and end not in known:
            # Not every family's config takes a list. Generation stops at each end token of a generation config.
            config.eos_token_id = end if config is model.config else [end, *known]
    try:
        yield
    finally:
        for config, named in zip(configs, before, strict=True):
            config.eos_token_id = named


def _split_state(
    model: nn.Module, inner: nn.Module, state: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the transformers model's weights, tied ones once, and the value head's, from either kind of names."""
    head = {name.removeprefix(HEAD_PREFIX): value for name, value in state.items() if name.startswith(HEAD_PREFIX)}
    parameters = {name for name, _ in inner.named_parameters()}
    # The state has the names of the transformers model, or those of the actor or critic around it.
    prefix = "" if parameters <= set(state) else _WRAPPER_PREFIX
    # A tied weight has several names in a state dict, but is one parameter.
    tied = set(inner.state_dict()) - parameters - {name for name, _ in inner.named_buffers()}
    needed = sorted(set(inner.state_dict()) - tied)
    missing = [name for name in needed if prefix + name not in state]
    if hasattr(model, "value_head") and not head:
        missing.append(HEAD_PREFIX + "weight")
    if missing:
        raise CheckpointError(f"the state to save lacks {len(missing)} weights, such as {missing[0]}")
    weights = {name: state[prefix + name].detach() for name in needed}
    return weights, head


def _unwrapped(model: nn.Module) -> Any:
    """Return the transformers model inside an actor or critic."""
    from transformers import PreTrainedModel

    return model if isinstance(model, PreTrainedModel) else model.model


def _converted_names(model: Any, named: Mapping[str, Tensor]) -> set[str]:
    """Return the names of parameters that a checkpoint stores in another form. Raises as `hf_named_weights`."""
    if getattr(model, "_weight_conversions", None) == []:
        return set()  # a loaded model that was stored as it is: its names need not be tried
    # Meta tensors have the right shapes and take no memory. ZeRO-3 keeps the shape of a whole weight beside its part.
    packed = packed_layers(model)
    wholes = {name: packed.get(part, part) for name, part in named.items()}
    shapes = {name: tuple(getattr(whole, "ds_shape", whole.shape)) for name, whole in wholes.items()}
    empty = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    together = set(_in_checkpoint(model, empty))
    if together == empty.keys():
        return set()
    alone = {name: set(_in_checkpoint(model, {name: tensor})) for name, tensor in empty.items()}
    if differing := together ^ set().union(*alone.values()):
        some = ", ".join(sorted(differing)[:3])
        message = f"a {model.config.model_type} checkpoint has tensors made of several parameters of the model ({some})"
        raise ConfigError(message, hint="use a model whose layers are stored one by one")
    return {name for name, names in alone.items() if names != {name}}


def _in_checkpoint(model: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors under the names, and in the form, of the checkpoint that the model was loaded from."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, state)


def _make_generation_config_savable(model: Any) -> None:
    """Set do_sample on models whose published sampling options transformers refuses to save without it."""
    config = getattr(model, "generation_config", None)
    if config is None:
        return
    try:
        config.validate(strict=True)
    except ValueError as error:
        logger.warning("generation_config: set do_sample to True, because it cannot be saved otherwise: %s", error)
        config.do_sample = True
