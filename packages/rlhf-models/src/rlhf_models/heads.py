"""The scalar head of a model folder, under the names that different trainers save it with."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf_data.errors import ConfigError
from rlhf_data.pretrained import clear_errors, located
from rlhf_models.files import VALUE_HEAD_FILE, WEIGHT_FILES, read_index

# transformers' ...ForSequenceClassification saves `score`; the others come from trainers with their own model class.
HEAD_NAMES = ("score", "value_head", "reward_head", "v_head")
_WEIGHTS = ("weight", *(f"{name}.weight" for name in HEAD_NAMES))  # `VALUE_HEAD_FILE` uses the first name
_SERVE = "serve a model of another kind with its own code behind ``RemoteReward.urls=http://...``"


def load_head(path: str | Path, config: Any) -> Tensor | None:
    """Return the weight [1, D] of a model's scalar head, or None if it has none. Reads no other weights.

    The head is in the folder's `value_head.safetensors`, which `save_hf` writes for a critic, or under the first of
    `HEAD_NAMES` that is among the model's weights.

    Raises:
        ConfigError: a head with more than one output, with a bias, or with a width other than the hidden size D.
    """
    with clear_errors("model", path):
        files = _files_by_tensor(path)
        name = next((name for name in _WEIGHTS if name in files), None)
        if name is None:
            return None
        if name.removesuffix("weight") + "bias" in files:
            message = f"the head {name} of the model {path} has a bias; only heads without bias are supported"
            raise ConfigError(message, hint=_SERVE)
        file = _file(path, files[name])
        if file is None:
            raise ConfigError(f"the model {path} has no file {files[name]}, which its index names for {name}")
        weight = _opened(file)[1](name)
    expected = [1, config.get_text_config().hidden_size]
    if list(weight.shape) != expected:
        message = f"the head {name} of the model {path} has the shape {list(weight.shape)}; one score needs {expected}"
        raise ConfigError(message, hint=f"use a model that was trained with one label, or {_SERVE}")
    return weight


def require_head(path: str | Path, config: Any) -> Tensor:
    """Return the weight [1, D] of a model's scalar head. Raises ConfigError as `load_head`, and if there is none."""
    weight = load_head(path, config)
    if weight is None:
        names = ", ".join(f"{name}.weight" for name in HEAD_NAMES)
        message = f"the model {path} has no scalar head: none of {names} is among its weights"
        hint = f"use a reward model, such as a ...ForSequenceClassification with one label, or {_SERVE}"
        raise ConfigError(message, hint=hint)
    return weight


def _files_by_tensor(path: str | Path) -> dict[str, str]:
    """Return the file name of each tensor of a model, or only of the head if it has a file of its own."""
    if _file(path, VALUE_HEAD_FILE):
        return {"weight": VALUE_HEAD_FILE}
    for stem in WEIGHT_FILES:
        if whole := _file(path, stem):
            return dict.fromkeys(_opened(whole)[0], stem)
        if index := _file(path, f"{stem}.index.json"):
            return read_index(index)
    return {}


def _file(path: str | Path, name: str) -> Path | None:
    """Return the path of a file of a folder or hub repository, or None if there is no such file."""
    from transformers.utils import cached_file

    model, is_local = located(path)
    try:
        found = cached_file(model, name, local_files_only=is_local)
    except OSError:
        return None
    return Path(found) if found else None


def _opened(file: Path) -> tuple[list[str], Callable[[str], Tensor]]:
    """Return the names of the tensors in a file, and the function that reads one of them."""
    if file.suffix != ".safetensors":
        tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        return list(tensors), tensors.__getitem__
    from safetensors import safe_open

    opened = safe_open(file, "pt")
    return list(opened.keys()), opened.get_tensor
