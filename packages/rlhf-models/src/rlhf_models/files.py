"""The files of a model folder: where its weights are, and whether they are whole."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlhf_data.errors import ConfigError

VALUE_HEAD_FILE = "value_head.safetensors"
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")  # of one file each, in transformers' order of preference


def check_weights(path: str | Path) -> None:
    """Check that a model folder holds its weights, whole; only the files' headers are read, and of hub names nothing.
    Raises ConfigError for no weights, a shard that is missing, or a file that is not safetensors."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return
    files = _weight_files(folder)
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


def _weight_files(folder: Path) -> list[Path] | None:
    """Return the files that transformers loads weights from, in its order of preference; None when there are none."""
    for name in WEIGHT_FILES:
        if (folder / name).is_file():
            return [folder / name]
        index = folder / f"{name}.index.json"
        if index.is_file():
            return [folder / shard for shard in sorted(set(read_index(index).values()))]
    return None


def read_index(index: Path) -> dict[str, str]:
    """Return tensor name to file name, of weights in shards. Raises ConfigError when the file is no index."""
    try:
        return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"].items())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{index} is not an index of weights: {error}") from None


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hide the progress bar and the report on weights that the model class does not use."""
    from transformers.utils import logging as hf_logging

    bar, level = hf_logging.is_progress_bar_enabled(), hf_logging.get_verbosity()
    hf_logging.disable_progress_bar()
    hf_logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        if bar:
            hf_logging.enable_progress_bar()
