"""Reads from a Hugging Face model folder what engines need before they import heavy libraries."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_data.errors import ConfigError, EngineError
from rlhf_data.hub_names import HubName, hub_problem, snapshot
from rlhf_data.own_code import admit_code, is_trusted
from rlhf_data.pretrained import clear_errors, located_model
from rlhf_data.stored_weights import is_head, read_json, stored_weights, ties_head

_MAX_CPU_KV_CACHE_BYTES = 1 << 30
_MIN_CPU_KV_CACHE_BYTES = 16 << 20
_PAGE_TOKENS = 128  # per block of vLLM's KV cache on a CPU
_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")  # what memory estimates read


def resolve_model_dir(name: str) -> Path:
    """Return the folder of a model: the folder itself, or the snapshot of a hub name, which is downloaded if needed.

    Raises ConfigError for a folder that does not exist, EngineError when the download fails.
    """
    found, is_local = located_model(name)
    if (path := Path(found)).is_dir():
        with clear_errors("model", name):
            admit_code(found, is_local=True)
        return path
    try:
        return Path(snapshot(HubName(found, None), is_local=is_local, with_code=is_trusted(name)))
    except Exception as error:
        said, hint = hub_problem(error, name) or (str(error), "name a local folder")
        message = f"the model {name!r} is not a folder and cannot be downloaded from the hub: {said}"
        raise EngineError(message, hint=hint) from error


def read_config(model_dir: Path, *, may_run: bool = False) -> dict[str, Any]:
    """Return config.json. Fields of its `text_config`, where multimodal models describe the language model, win.

    Its own `architectures` and `model_type` stay: a `text_config` may name the class of the language model alone.

    Sizes have the names of Llama's config, also those that a family calls otherwise, as GPT-2 calls its heads `n_head`.

    With `may_run`, the model's own code may run. Raises ConfigError for a file that is missing or cannot be read.
    """
    config = _stored_config(model_dir)
    if all(name in config for name in _SIZES):
        return config
    # The file leaves out what its family has by default, as those of Gemma 3 do.
    from transformers import AutoConfig

    try:
        with clear_errors("model", model_dir):
            whole = AutoConfig.from_pretrained(model_dir, trust_remote_code=may_run)
    except ConfigError:
        if "vocab_size" in config:  # a family that vLLM knows and transformers does not
            return config
        raise
    text = whole.get_text_config()
    return text.to_dict() | {name: getattr(text, name) for name in _SIZES if hasattr(text, name)} | config


def _stored_config(model_dir: Path) -> dict[str, Any]:
    config = read_json(model_dir / "config.json")
    of_the_whole = {name: config[name] for name in ("architectures", "model_type") if name in config}
    return config | (config.get("text_config") or {}) | of_the_whole


def end_token_ids(model_dir: Path, tokenizer_dir: Path) -> tuple[int, ...]:
    """Return the ids of all end tokens, sorted: from config.json, generation_config.json and the tokenizer.

    Those of a `text_config` count only if neither file has others. transformers writes a default of the text model's
    family there, such as 2 for Llama, which is another token in the vocabularies of many models.
    """
    config = read_json(model_dir / "config.json")
    named = [each.get("eos_token_id") for each in (config, read_json(model_dir / "generation_config.json"))]
    if named == [None, None]:
        named = [(config.get("text_config") or {}).get("eos_token_id")]
    found: set[int] = set()
    for value in named:
        if value is not None:
            found.update(value if isinstance(value, list) else [value])
    token = read_json(tokenizer_dir / "tokenizer_config.json").get("eos_token")
    if isinstance(token, Mapping):
        token = token.get("content")
    if token is not None:
        added = read_json(tokenizer_dir / "tokenizer.json").get("added_tokens", [])
        found.update(entry["id"] for entry in added if entry.get("content") == token)
    return tuple(sorted(found))


def checkpoint_shapes(model_dir: Path) -> dict[str, tuple[int, ...]] | None:
    """Return the shape of every weight by its name, from the safetensors headers; None without safetensors files.

    An output head that is tied to the embedding is left out even if a file holds it: it is the same parameter.
    """
    shapes = {name: weight.shape for name, weight in stored_weights(model_dir).items()}
    if not shapes:
        return None
    heads = [name for name in shapes if is_head(name)]
    if heads and ties_head(model_dir):
        for name in heads:
            del shapes[name]
    return shapes


def cpu_kv_cache_bytes(config: Mapping[str, Any], *, max_num_seqs: int, max_model_len: int, item_bytes: int) -> int:
    """Return the bytes of KV cache that `max_num_seqs` full sequences need, between 16 MiB and 1 GiB.

    2 (keys, values) * layers * key-value heads * largest head size * item size * sequences * tokens

    It is 1 GiB for a config without these sizes.
    """
    if not all(config.get(name) for name in _SIZES):  # a family without attention, or with other names
        return _MAX_CPU_KV_CACHE_BYTES
    num_heads = config["num_attention_heads"]
    layers = (config, *(config.get("per_layer_config") or {}).values())  # a Gemma 4 has heads of several sizes
    largest = max(layer.get(name) or 0 for layer in layers for name in ("head_dim", "global_head_dim"))
    head_dim = largest or config["hidden_size"] // num_heads
    num_kv_heads = config.get("num_key_value_heads") or num_heads
    tokens = max_num_seqs * (-(-max_model_len // _PAGE_TOKENS) + 1) * _PAGE_TOKENS
    needed = 2 * config["num_hidden_layers"] * num_kv_heads * head_dim * item_bytes * tokens
    return min(max(needed, _MIN_CPU_KV_CACHE_BYTES), _MAX_CPU_KV_CACHE_BYTES)
