"""The scalar head of a model folder, under the names that different trainers save it with."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from rlhf_data.errors import ConfigError
from rlhf_data.pretrained import clear_errors
from rlhf_models.checkpoint.files import read_tensor, tensor_files

# transformers' ...ForSequenceClassification and ...ForTokenClassification, which verl's critics are, save `score` or
# `classifier`; TRL's critics `v_head.summary`; the others come from trainers with their own model class. Some save the
# head in the place of the LM head, which has one row then.
HEAD_NAMES = ("score", "value_head", "reward_head", "v_head", "v_head.summary", "rm_head", "classifier", "lm_head")
_LM_HEAD = "lm_head.weight"
_WEIGHTS = ("weight", *(f"{name}.weight" for name in HEAD_NAMES))  # `VALUE_HEAD_FILE` uses the first name
_ONE_LABEL = "use a model that was trained with one label"
_NO_HEAD = f"{_ONE_LABEL}, or one without a head"
_SERVE = "serve a model of another kind with its own code behind ``RemoteReward.urls=http://...``"


def load_head(path: str | Path, config: Any, *, hint: str = _NO_HEAD) -> dict[str, Tensor]:
    """Return the `weight` [1, D] of a model's scalar head, and its `bias` [1] if it has one. Reads no other weights.

    The head is in the folder's `value_head.safetensors`, which `save_hf` writes for a critic, or under the first of
    `HEAD_NAMES` that is among the model's weights. A model without a head gives an empty dict. `hint` is that of an
    error.

    Raises:
        ConfigError: a head with more than one output, or with a width other than the hidden size D.
    """
    with clear_errors("model", path):
        files = tensor_files(path)
        names = [name for name in _WEIGHTS if name in files]
        if _LM_HEAD in names and len(read_tensor(path, files, _LM_HEAD)) > 1:
            names.remove(_LM_HEAD)
        if not names:
            return {}
        bias = names[0].removesuffix("weight") + "bias"
        head = {"weight": read_tensor(path, files, names[0])}
        if bias in files:
            head["bias"] = read_tensor(path, files, bias)
    expected = [1, config.get_text_config().hidden_size]
    if list(head["weight"].shape) != expected:
        shape = list(head["weight"].shape)
        message = f"the head {names[0]} of the model {path} has the shape {shape}; one score needs {expected}"
        raise ConfigError(message, hint=hint)
    return head


def check_no_head(path: str | Path, config: Any, unused: Iterable[str]) -> None:
    """Check that no tensor of a model that gets a new head may be a head of an unknown name.

    Args:
        path: the model's folder or hub name.
        config: its config.
        unused: the names of tensors that its backbone does not have.

    Raises:
        ConfigError: an unused tensor has one row, or is a vector of the hidden size.
    """
    files = tensor_files(path)
    for name in sorted(set(unused) & set(files)):
        shape = list(read_tensor(path, files, name).shape)
        if shape[:-1] == [1] or shape == [config.get_text_config().hidden_size]:
            message = f"the model {path} has the weight {name} of shape {shape}, which is no part of a backbone and may"
            known = ", ".join(f"{head}.weight" for head in HEAD_NAMES)
            hint = f"rename the weight of the head to one of {known}, or use a model without a head"
            raise ConfigError(f"{message} be a scalar head; the run would begin with a head of zeros", hint=hint)


def require_head(path: str | Path, config: Any) -> dict[str, Tensor]:
    """Return a model's scalar head as `load_head` does. Raises ConfigError as `load_head`, and if there is none."""
    head = load_head(path, config, hint=f"{_ONE_LABEL}, or {_SERVE}")
    if not head:
        names = ", ".join(f"{name}.weight" for name in HEAD_NAMES)
        message = f"the model {path} has no scalar head: none of {names} is among its weights"
        hint = f"use a reward model, such as a ...ForSequenceClassification with one label, or {_SERVE}"
        raise ConfigError(message, hint=hint)
    return head
