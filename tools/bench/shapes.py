"""Shapes of the random models of benchmarks, as arguments of `rlhf_models.testing.tiny_model_dir`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

_QWEN2 = {
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "initializer_range": 0.02,
}

SHAPES: Mapping[str, Mapping[str, float]] = {
    "tiny": {},
    # For a CPU: wide enough that arithmetic takes most of the time, and not the overhead of calls.
    "small": {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
    "qwen2-0.5b": _QWEN2,
    "qwen2-1.5b": _QWEN2
    | {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "head_dim": 128,
    },
    "qwen2-7b": _QWEN2
    | {
        "vocab_size": 152_064,
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "tied": False,
    },
}


def random_model(shape: str, folder: Path, **changes: Any) -> str:
    """Write a model of one of `SHAPES` with `changes`, in bfloat16 where there is a GPU; return its path."""
    import torch

    from rlhf_models.testing import tiny_model_dir

    dtype, device = (torch.bfloat16, "cuda") if torch.cuda.is_available() else (torch.float32, "cpu")
    with torch.device(device):  # a GPU draws billions of weights in a second
        path = tiny_model_dir(folder, dtype=dtype, **(SHAPES[shape] | changes))
    torch.cuda.empty_cache()
    return str(path)
