"""Weights on their way out of a model: under checkpoint names, or as a folder."""

import logging
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_data.errors import CheckpointError, ConfigError
from rlhf_models.files import VALUE_HEAD_FILE, quiet_transformers

logger = logging.getLogger(__name__)

_WRAPPER_PREFIX = "model."
_HEAD_PREFIX = "value_head."


def hf_named_weights(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of an `Actor` or a transformers model under the names of its Hugging Face checkpoint, tied
    ones once. Raises ConfigError when the checkpoint does not hold the weights as the model does, such as experts that
    are fused."""
    model = _unwrapped(model)
    named = dict(model.named_parameters())
    if differing := named.keys() ^ _checkpoint_names(model, named):
        some, kind = ", ".join(sorted(differing)[:3]), model.config.model_type
        message = f"a {kind} model and its checkpoint name their weights differently ({some}, ...)"
        raise ConfigError(message, hint="use a model whose layers are stored one by one")
    return list(named.items())


def save_hf(model: nn.Module, state_dict: Mapping[str, Tensor] | None, tokenizer: Any | None, path: str | Path) -> Path:
    """Write and return a folder that plain transformers loads, all or nothing: it is moved into place when complete.

    Args:
        model: an `Actor`, a `Critic` (whose head lies beside the backbone), or a transformers model.
        state_dict: its weights where the model does not hold them, as gathered from ZeRO-3, under the names of
            `model.state_dict()` or of the checkpoint, tied ones once or twice; the model's own when None.
        tokenizer: saved beside it; None for none.
        path: the folder; an earlier one is replaced.

    Raises:
        CheckpointError: a weight is missing, or the folder cannot be written.
    """
    from safetensors import SafetensorError  # a full disk among them

    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as scratch:
            new = Path(scratch) / "new"
            _write(model, state_dict, tokenizer, new)
            if path.exists():
                path.rename(Path(scratch) / "old")
            new.rename(path)
    except (OSError, SafetensorError) as error:
        message = f"cannot write the model to {path}: {error}"
        raise CheckpointError(message, hint="check the disk and the path") from error
    return path


def _write(model: nn.Module, state_dict: Mapping[str, Tensor] | None, tokenizer: Any | None, folder: Path) -> None:
    from safetensors.torch import save_file

    inner = _unwrapped(model)
    weights, head = _split_state(model, inner, model.state_dict() if state_dict is None else state_dict)
    _make_generation_config_savable(inner)
    with quiet_transformers():
        inner.save_pretrained(folder, state_dict=weights)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
    if head:
        save_file({name: tensor.contiguous() for name, tensor in head.items()}, folder / VALUE_HEAD_FILE)
    # safetensors makes private files; the config is written as any file is, so its mode follows the user's umask.
    mode = stat.S_IMODE((folder / "config.json").stat().st_mode)
    for file in folder.glob("*.safetensors"):
        file.chmod(mode)


def _split_state(
    model: nn.Module, inner: nn.Module, state: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the transformers model's weights, tied ones once, and the value head's, from either kind of names."""
    head = {name.removeprefix(_HEAD_PREFIX): value for name, value in state.items() if name.startswith(_HEAD_PREFIX)}
    parameters = {name for name, _ in inner.named_parameters()}
    prefix = "" if parameters <= set(state) else _WRAPPER_PREFIX
    tied = set(inner.state_dict()) - parameters - {name for name, _ in inner.named_buffers()}
    needed = sorted(set(inner.state_dict()) - tied)
    missing = [name for name in needed if prefix + name not in state]
    if hasattr(model, "value_head") and not head:
        missing.append(_HEAD_PREFIX + "weight")
    if missing:
        raise CheckpointError(f"the state to save lacks {len(missing)} weights, {missing[0]} among them")
    weights = {name: state[prefix + name].detach() for name in needed}
    return weights, head


def _unwrapped(model: nn.Module) -> Any:
    """Return the transformers model inside an actor or critic."""
    from transformers import PreTrainedModel

    return model if isinstance(model, PreTrainedModel) else model.model


def _checkpoint_names(model: Any, named: Mapping[str, Tensor]) -> set[str]:
    from transformers.core_model_loading import revert_weight_conversion

    if not getattr(model, "_weight_conversions", None):
        return set(named)
    # Converters cut and join tensors, so they get some, of the right rank and without memory.
    shapes = {name: tuple(getattr(tensor, "ds_shape", tensor.shape)) for name, tensor in named.items()}
    empty = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    return set(revert_weight_conversion(model, empty))


def _make_generation_config_savable(model: Any) -> None:
    """Some published models sample by options that transformers refuses to save unless sampling is on."""
    config = getattr(model, "generation_config", None)
    if config is None:
        return
    try:
        config.validate(strict=True)
    except ValueError as error:
        logger.warning("generation_config: do_sample is set to True, without which it cannot be saved: %s", error)
        config.do_sample = True
