"""Models by the names of their shapes: what a plan needs of a model that is not on this machine."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_cli.config.paths import entries_of, model_path, user_path, words_of
from rlhf_cli.config.ppo import PpoConfig
from rlhf_data.errors import ConfigError, unknown
from rlhf_data.hub_names import hub_name
from rlhf_data.options.declare import options

# Numbers of config.json: hidden size, width of the MLP, layers, heads, key-value heads, vocabulary, and whether the
# head is the embedding.
_SIZES = {
    "qwen2.5-0.5b": (896, 4864, 24, 14, 2, 151_936, True),
    "qwen2.5-1.5b": (1536, 8960, 28, 12, 2, 151_936, True),
    "qwen2.5-3b": (2048, 11_008, 36, 16, 2, 151_936, True),
    "qwen2.5-7b": (3584, 18_944, 28, 28, 4, 152_064, False),
    "qwen2.5-14b": (5120, 13_824, 48, 40, 8, 152_064, False),
    "qwen2.5-32b": (5120, 27_648, 64, 40, 8, 152_064, False),
    "qwen2.5-72b": (8192, 29_568, 80, 64, 8, 152_064, False),
    "llama-3.2-1b": (2048, 8192, 16, 32, 8, 128_256, True),
    "llama-3.1-8b": (4096, 14_336, 32, 32, 8, 128_256, False),
    "llama-3.1-70b": (8192, 28_672, 80, 64, 8, 128_256, False),
}
_NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


def shape_config(name: str) -> Mapping[str, Any]:
    """Return the content of config.json for the name of a shape. Raises ConfigError for an unknown one."""
    if name not in _SIZES:
        others = "name a shape, a config.json, a folder with one, or a model of the hub's cache"
        raise ConfigError(unknown("shape", name, _SIZES, otherwise=others))
    *sizes, vocab_size, is_tied = _SIZES[name]
    family = "qwen2" if name.startswith("qwen2") else "llama"
    return dict(zip(_NAMES, sizes, strict=True)) | {
        "model_type": family,
        "architectures": [f"{family.title()}ForCausalLM"],
        "vocab_size": vocab_size,
        "tie_word_embeddings": is_tied,
        "max_position_embeddings": 131_072,
    }


def with_model_folders(config: PpoConfig, scratch: Path) -> PpoConfig:
    """Return a configuration whose models are folders with a config.json: shapes and files get one in `scratch`.

    Raises ConfigError for a model that is none of a shape, a config.json, and a folder or cached hub name with one.
    """
    found: dict[str, dict[str, str]] = {}
    for option in options(type(config)):
        text = getattr(getattr(config, option.section), option.name) if option.names_model else None
        if text is not None and option.name != "tokenizer":
            entries = entries_of(option, text)
            kept = words_of(option)
            folders = ",".join(
                before + (name if name in kept else _folder(name, option.name, scratch)) for before, name in entries
            )
            found.setdefault(option.section, {})[option.name] = folders
    sections = {name: getattr(config, name).model_copy(update=values) for name, values in found.items()}
    return config.model_copy(update=sections)


def _folder(name: str, flag: str, scratch: Path) -> str:
    path = Path(model_path(name))
    if path.is_dir():
        return str(path)
    if (file := user_path(name)).is_file():
        text = file.read_text(encoding="utf-8")
    elif (on_hub := hub_name(name)) is not None:
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(on_hub.repository, "config.json", revision=on_hub.revision)
        if not isinstance(cached, str):
            hint = "name its config.json, or a shape such as qwen2.5-7b"
            raise ConfigError(f"--{flag} {name} is not on this machine, and a plan does not ask the hub", hint=hint)
        text = Path(cached).read_text(encoding="utf-8")
    else:
        try:
            text = json.dumps(shape_config(name.lower()))
        except ConfigError as error:
            raise ConfigError(f"--{flag}: {error}") from None
    folder = scratch / f"{flag}-{name.replace('/', '_')}"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(text, encoding="utf-8")
    return str(folder)
