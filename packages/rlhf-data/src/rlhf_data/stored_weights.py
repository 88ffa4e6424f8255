"""Weights in the safetensors files of a model folder, read without a library of tensors."""

import json
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rlhf_data.errors import ConfigError

_HEAD = "lm_head.weight"
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")  # ends of names
_PART_BYTES = 64 << 20
_DAMAGED = (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error)  # what damaged files lead to


class StoredWeight(NamedTuple):
    """Where a weight is.

    Attributes:
        file: a safetensors file.
        dtype: the format's name of the data type, such as "BF16".
        shape: rows first.
        start, stop: bytes of the file.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file of a model folder; empty without the file. Raises ConfigError if it holds none."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", hint="copy the model again") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds no object: {str(found)[:40]}", hint="copy the model again")
    return found


def stored_weights(folder: Path) -> dict[str, StoredWeight]:
    """Return the weights of a model folder by their names, from the headers of its safetensors files.

    Raises one of `_DAMAGED` for a file that is none.
    """
    index = read_json(folder / "model.safetensors.index.json")
    files = {folder / name for name in index.get("weight_map", {}).values()} or set(folder.glob("*.safetensors"))
    found = {}
    for file in sorted(files):
        with file.open("rb") as stream:
            # A safetensors file begins with the length of its JSON header, 8 bytes little-endian.
            (header_bytes,) = struct.unpack("<Q", stream.read(8))
            if 8 + header_bytes > file.stat().st_size:  # as of a pointer of git-lfs
                raise ValueError(f"{file} is not a whole safetensors file")
            header = json.loads(stream.read(header_bytes))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            start, stop = (8 + header_bytes + offset for offset in entry["data_offsets"])
            found[name] = StoredWeight(file, entry["dtype"], tuple(entry["shape"]), start, stop)
    return found


def check_tied_head(path: str | Path) -> None:
    """Check that a model whose config ties the LM head to the embedding has no other head in its safetensors files.

    transformers takes the head of the files, and vLLM the embedding: they would be two models. Reads nothing for hub
    names.

    Raises:
        ConfigError: the head differs from the embedding, or as `read_json`.
    """
    folder = Path(path).expanduser()
    read_json(folder / "config.json")
    try:
        weights = stored_weights(folder)
    except _DAMAGED:  # who loads the weights says what is wrong with them
        return
    heads = [name for name in weights if is_head(name)]
    tables = [weight for name, weight in weights.items() if name.endswith(_EMBEDDINGS)]
    if len(heads) != 1 or len(tables) != 1 or not ties_head(folder) or _same_values(weights[heads[0]], tables[0]):
        return
    message = f"config.json of the model {folder} ties the LM head to the embedding, and {heads[0]} in its files"
    hint = 'set "tie_word_embeddings": false there if the head belongs to the model, else take it out of the files'
    raise ConfigError(f"{message} differs from it", hint=hint)


def is_head(name: str) -> bool:
    """Return whether a weight of this name is the LM head: its own, or that of the language model in a larger one."""
    return f".{name}".endswith(f".{_HEAD}")


def ties_head(folder: Path) -> bool:
    """Return whether the config of a model ties the LM head to the embedding, for the whole model or for its text part.

    Where config.json does not say it for the whole model, the default of the family holds.
    """
    config = read_json(folder / "config.json")
    if (config.get("text_config") or {}).get("tie_word_embeddings"):
        return True
    if "tie_word_embeddings" not in config and "model_type" in config:
        from transformers import AutoConfig

        with suppress(Exception):  # a family that transformers does not know, or a config that others refuse
            config = vars(AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False))
    return bool(config.get("tie_word_embeddings"))


def _same_values(one: StoredWeight, other: StoredWeight) -> bool:
    """Whether two weights have the same bytes. Of those that differ, mostly the first part is read."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    first, second = (np.memmap(weight.file, mode="r")[weight.start : weight.stop] for weight in (one, other))
    parts = range(0, len(first), _PART_BYTES)
    return all(np.array_equal(first[at : at + _PART_BYTES], second[at : at + _PART_BYTES]) for at in parts)
