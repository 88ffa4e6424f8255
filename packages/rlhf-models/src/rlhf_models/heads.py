"""The scalar head of a model folder, wherever those who trained it put it."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf_data.errors import ConfigError
from rlhf_data.pretrained import clear_errors, located
from rlhf_models.files import VALUE_HEAD_FILE, WEIGHT_FILES, read_index

# `score` is that of transformers' ...ForSequenceClassification; the others are of trainers with a class of their own.
HEAD_NAMES = ("score", "value_head", "reward_head", "v_head")
_WEIGHTS = ("weight", *(f"{name}.weight" for name in HEAD_NAMES))  # the first is that of `VALUE_HEAD_FILE`
_SERVE = "serve a model of another kind with its own code behind --remote_rm_url http://..."


def load_head(path: str | Path, config: Any) -> Tensor | None:
    """Return the weight [1, D] of a model's scalar head, None when it has none; nothing else is read.

    It is that of the folder's `value_head.safetensors`, as `save_hf` writes it for a critic, else the first of
    `HEAD_NAMES` among the model's weights. Raises ConfigError for a head of more outputs than one or of another width
    than the hidden size D in `config`, and for one with a bias.
    """
    with clear_errors("model", path):
        files = _files_by_tensor(path)
        name = next((name for name in _WEIGHTS if name in files), None)
        if name is None:
            return None
        if name.removesuffix("weight") + "bias" in files:
            raise ConfigError(f"the head {name} of the model {path} has a bias; a weight alone is read", hint=_SERVE)
        file = _file(path, files[name])
        if file is None:
            raise ConfigError(f"the model {path} lacks the weights in {files[name]}")
        weight = _read(file, name)
    expected = [1, config.get_text_config().hidden_size]
    if list(weight.shape) != expected:
        message = f"the head {name} of the model {path} has the shape {list(weight.shape)}; one score needs {expected}"
        raise ConfigError(message, hint=f"use a model that was trained with one label, or {_SERVE}")
    return weight


def require_head(path: str | Path, config: Any) -> Tensor:
    """Return what `load_head` does. Raises ConfigError when there is no head either."""
    weight = load_head(path, config)
    if weight is None:
        names = ", ".join(f"{name}.weight" for name in HEAD_NAMES)
        message = f"the model {path} has no head that gives a score: none of {names} is among its weights"
        hint = f"use a reward model, such as a ...ForSequenceClassification with one label, or {_SERVE}"
        raise ConfigError(message, hint=hint)
    return weight


def _files_by_tensor(path: str | Path) -> dict[str, str]:
    """Return the name of the file that holds each of a model's tensors, or only that of its head where it has one."""
    if _file(path, VALUE_HEAD_FILE):
        return {"weight": VALUE_HEAD_FILE}
    for stem in WEIGHT_FILES:
        if whole := _file(path, stem):
            return dict.fromkeys(_names(whole), stem)
        if index := _file(path, f"{stem}.index.json"):
            return read_index(index)
    return {}


def _file(path: str | Path, name: str) -> Path | None:
    """Return a file of a folder or hub name, None when it is not there."""
    from transformers.utils import cached_file

    model, is_local = located(path)
    try:
        found = cached_file(model, name, local_files_only=is_local)
    except OSError:
        return None
    return Path(found) if found else None


def _names(file: Path) -> list[str]:
    if file.suffix != ".safetensors":
        return list(torch.load(file, map_location="cpu", weights_only=True, mmap=True))
    from safetensors import safe_open

    with safe_open(file, "pt") as tensors:
        return list(tensors.keys())


def _read(file: Path, name: str) -> Tensor:
    if file.suffix != ".safetensors":
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True)[name]
    from safetensors import safe_open

    with safe_open(file, "pt") as tensors:
        return tensors.get_tensor(name)
