"""The files of a model folder: which of them hold the weights, and whether they are complete."""

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf_data.errors import ConfigError
from rlhf_data.pretrained import located
from rlhf_data.stored_weights import check_tied_head

VALUE_HEAD_FILE = "value_head.safetensors"
# Beside an adapter: what the config of the merged model has beyond the base's.
CONFIG_FIELDS_FILE = "config_fields.json"
_HEAD_FILES = (VALUE_HEAD_FILE, "value_head.bin")  # LLaMA-Factory writes either, with TRL's names
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")  # unsharded names, in transformers' order of preference


def check_weights(path: str | Path) -> None:
    """Check that a model folder holds complete weights. Reads mostly headers of files, and nothing for hub names.

    Raises:
        ConfigError: no weights, a missing shard, or a damaged safetensors file; and as `check_tied_head`.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return
    files = weight_files(folder)
    hint = "download or copy the folder again, whole; with git, large files need `git lfs pull`"
    if files is None:
        raise ConfigError(f"the model folder {folder} has no weights, such as model.safetensors", hint=hint)
    from safetensors import SafetensorError, safe_open

    for file in files:
        if not file.is_file():
            raise ConfigError(f"the model folder {folder} lacks the weights in {file.name}", hint=hint)
        if file.suffix != ".safetensors":
            continue
        try:
            with safe_open(file, "pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{file} is not a whole safetensors file: {error}", hint=hint) from None
    check_tied_head(folder)


def weight_files(folder: Path) -> list[Path] | None:
    """Return the files that transformers would load the weights from, or None if there are none."""
    for name in WEIGHT_FILES:
        if (folder / name).is_file():
            return [folder / name]
        index = folder / f"{name}.index.json"
        if index.is_file():
            return [folder / shard for shard in sorted(set(read_index(index).values()))]
    return None


def read_index(index: Path) -> dict[str, str]:
    """Return the file name of each tensor of a sharded model. Raises ConfigError if the file is not an index."""
    try:
        return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"].items())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{index} is not an index of weights: {error}") from None


def write_fields(folder: Path, fields: Mapping[str, Any]) -> None:
    """Write fields into the config.json of a model folder. None removes a field."""
    file = folder / "config.json"
    merged = json.loads(file.read_text(encoding="utf-8")) | dict(fields)
    present = {name: value for name, value in merged.items() if name not in fields or value is not None}
    file.write_text(json.dumps(present, indent=2) + "\n", encoding="utf-8")


def tensor_files(path: str | Path) -> dict[str, str]:
    """Return the file name of each tensor of a model folder or hub name, those of a head in a file of its own too."""
    files: dict[str, str] = {}
    for stem in WEIGHT_FILES:
        if whole := model_file(path, stem):
            files = dict.fromkeys(opened(whole)[0], stem)
            break
        if index := model_file(path, f"{stem}.index.json"):
            files = read_index(index)
            break
    for stem in _HEAD_FILES:
        if head := model_file(path, stem):
            return files | dict.fromkeys(opened(head)[0], stem)
    return files


def model_file(path: str | Path, name: str) -> Path | None:
    """Return the path of a file of a folder or hub repository, or None if there is no such file."""
    from transformers.utils import cached_file

    model, is_local = located(path)
    try:
        found = cached_file(model, name, local_files_only=is_local)
    except OSError:
        return None
    return Path(found) if found else None


def opened(file: Path) -> tuple[list[str], Callable[[str], Tensor]]:
    """Return the names of the tensors in a file, and the function that reads one of them."""
    if file.suffix != ".safetensors":
        tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        return list(tensors), tensors.__getitem__
    from safetensors import safe_open

    stored = safe_open(file, "pt")
    return list(stored.keys()), stored.get_tensor


def read_tensor(path: str | Path, files: Mapping[str, str], name: str) -> Tensor:
    """Return a tensor of a model folder or hub name. `files` is what `tensor_files` returns for it.

    Raises:
        ConfigError: the file with the tensor is missing.
    """
    file = model_file(path, files[name])
    if file is None:
        raise ConfigError(f"the model {path} has no file {files[name]}, which its index names for {name}")
    return opened(file)[1](name)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hide transformers' progress bar and its report on weights that the model class does not use."""
    from transformers.utils import logging as hf_logging

    bar = hf_logging.is_progress_bar_enabled()
    level = hf_logging.get_verbosity()
    hf_logging.disable_progress_bar()
    hf_logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        if bar:
            hf_logging.enable_progress_bar()


@contextmanager
def without_wrappers() -> Iterator[None]:
    """Let `save_pretrained` take the model as it is.

    Its search for wrappers imports DeepSpeed, which takes several seconds, and the models that are saved have none.
    """
    from transformers import modeling_utils

    unwrap = modeling_utils.unwrap_model
    modeling_utils.unwrap_model = lambda model, **_: model
    try:
        yield
    finally:
        modeling_utils.unwrap_model = unwrap
