"""Weights of a checkpoint that text does not reach, such as those of images: kept as they are, in the run and on disk.

Some families load with them, and they are frozen. Others have a class for text alone, which leaves them in the files,
as it does the layers that predict several tokens; a saved model gets them from there.
"""

import json
import logging
import re
import shutil
from collections.abc import Collection
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from rlhf_data.errors import ConfigError
from rlhf_models.checkpoint.files import model_file, read_tensor, tensor_files

logger = logging.getLogger(__name__)

# What turns images, videos and sounds into tokens. Engines read them for a model that takes any.
_PROCESSOR_FILES = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")
_FILES = ("model-00001-of-00001.safetensors", "model-untrained.safetensors")
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class LeftOut:
    """What a loaded model left in its folder.

    Attributes:
        path: the folder or hub name.
        config: the config of the whole model; the loaded model may be its part for text.
        files: the file of each weight that was left there, by name.
    """

    path: str | Path
    config: Any
    files: dict[str, str]


def freeze_beyond_text(model: Any) -> None:
    """Freeze the weights that text does not reach. Their gradients are zero, and weight decay would change them."""
    for weight in weights_beyond_text(model):
        weight.requires_grad_(False)


def weights_beyond_text(model: Any) -> list[nn.Parameter]:
    """Return the weights that text does not reach."""
    text = set(_text_weights(model))
    return [weight for weight in model.parameters() if weight not in text]


def linear_layers_beyond_text(model: Any) -> list[str]:
    """Return the names of the linear layers that text does not reach."""
    text = set(_text_weights(model))
    layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    return [name for name, layer in layers if layer.weight not in text]


def _text_weights(model: Any) -> list[Tensor]:
    if model.config.get_text_config() is model.config:
        return list(model.parameters())
    parts = (model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings())
    return [weight for part in parts if part is not None for weight in part.parameters()]


def note_left_out(model: Any, path: str | Path, config: Any, unexpected: Collection[str]) -> None:
    """Note as `model.left_out` what a model that was just loaded left in its folder.

    Args:
        model: a model of transformers.
        path: the folder or hub name that it was loaded from.
        config: the config of the folder.
        unexpected: the names of weights that transformers found no place for and did not expect to be left out.
    """
    is_part = type(model.config) is not type(config)
    patterns = model._keys_to_ignore_on_load_unexpected or ()
    if not (is_part or patterns or config.get_text_config() is not config):
        return
    stored = tensor_files(path)
    names = {name for name in stored if any(re.search(pattern, name) for pattern in patterns)}
    if is_part:
        names |= set(stored) & set(unexpected)
    names -= model.state_dict().keys()  # a pattern may also match what is loaded
    # Old checkpoints hold masks and constants, which are no weights.
    files = {name: stored[name] for name in sorted(names) if _is_weight(read_tensor(path, stored, name))}
    model.left_out = LeftOut(path, config, files)


def save_left_out(model: Any, folder: Path, *, has_weights: bool = True) -> None:
    """Add to a folder that holds a saved model what the model left in the folder that it was loaded from.

    These are the files of its processor, and unless `has_weights` is off its other weights. If the original folder has
    gone, the new one is left as it is, and a warning says so.
    """
    left: LeftOut | None = getattr(model, "left_out", None)
    if left is None:
        return
    saved = tensor_files(folder)
    names = [name for name in left.files if has_weights and name not in saved]
    try:
        for name in _PROCESSOR_FILES if left.config.get_text_config() is not left.config else ():
            if file := model_file(left.path, name):
                shutil.copyfile(file, folder / name)
        weights = {name: read_tensor(left.path, left.files, name) for name in names}
    except (OSError, ConfigError) as error:
        lost = f"what was not trained: {len(names)} weights of {left.path} and the files of its processor"
        logger.warning("the saved model lacks %s: %s", lost, str(error).partition("\n")[0])
        return
    if not weights:
        return
    _add(weights, saved, folder)
    if type(model.config) is not type(left.config):
        _whole_config(model.config, left.config).save_pretrained(folder)


def _add(weights: dict[str, Tensor], saved: dict[str, str], folder: Path) -> None:
    """Add weights in a file of their own. Those that are mapped from another file take no memory."""
    from safetensors.torch import save_file

    trained, untrained = _FILES
    single = folder / "model.safetensors"
    if single.exists():
        single.rename(folder / trained)
        saved = dict.fromkeys(saved, trained)
    save_file(weights, folder / untrained, {"format": "pt"})
    files = saved | dict.fromkeys(weights, untrained)
    total = sum((folder / name).stat().st_size for name in set(files.values()))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}
    (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _whole_config(text: Any, whole: Any) -> Any:
    """Return the config of a whole model with another one for its text."""
    whole = deepcopy(whole)
    old = whole.get_text_config()
    new = deepcopy(text)
    new.architectures = old.architectures
    new._name_or_path = old._name_or_path
    setattr(whole, next(name for name, part in vars(whole).items() if part is old), new)
    whole.dtype = text.dtype
    return whole


def _is_weight(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dim() > 0
