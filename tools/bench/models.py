"""Random models of benchmarks, and what one training pass of them takes: seconds, memory, and its products alone."""

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rlhf_models.testing import tiny_model_dir

PRODUCTS_S = 3.0  # seconds of products: long enough that the clock settles, as in training

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

# By name, arguments of `tiny_model_dir`.
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


class Place(NamedTuple):
    """The device and dtype of benchmarks: a GPU in bfloat16 if there is one, else the CPU in float32."""

    device: torch.device
    dtype: torch.dtype

    @property
    def dtype_name(self) -> str:
        """The dtype as specs write it."""
        return str(self.dtype).removeprefix("torch.")

    def wait(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def place() -> Place:
    """Return where this process measures."""
    on_gpu = torch.cuda.is_available()
    return Place(torch.device("cuda" if on_gpu else "cpu"), torch.bfloat16 if on_gpu else torch.float32)


def random_model(shape: str, folder: Path, make: Callable[..., Path] = tiny_model_dir, **changes: Any) -> str:
    """Write a model of one of `SHAPES` with `changes` by a function of `rlhf_models.testing`; return its path."""
    here = place()
    with here.device:  # a GPU draws billions of weights in a second
        path = make(folder, dtype=here.dtype, **(SHAPES[shape] | changes))
    torch.cuda.empty_cache()
    return str(path)


def peak_of(call: Callable[[], Any]) -> int | None:
    """Return the most bytes of GPU memory during a call; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    gc.collect()  # an engine is in a reference cycle, which keeps its memory until collected
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def in_turn(ways: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, dict[str, Any]]:
    """Call the ways in turn, so that a clock that changes favors none; return median and range of their seconds."""
    here = place()
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, call in ways.items():
            here.wait()
            started = time.perf_counter()
            call()
            here.wait()
            seconds[name].append(time.perf_counter() - started)
    return {
        name: {"seconds": statistics.median(found), "seconds_range": [min(found), max(found)]}
        for name, found in seconds.items()
    }


def layer_products(model: torch.nn.Module) -> list[Sequence[int]]:
    """Return the shapes of the matrices of all layers."""
    return [tuple(weight.shape) for name, weight in model.named_parameters() if ".layers." in name and weight.ndim == 2]


def products_seconds(products: Sequence[tuple[Sequence[int], int]]) -> float:
    """Return the seconds of bfloat16 matrix products on the GPU, forward and backward: the practical bound of a pass.

    They run one after the other, again and again for `PRODUCTS_S`.

    Args:
        products: ([out, in], the shape of a weight; the number of tokens that go through it).
    """
    options = {"device": "cuda", "dtype": torch.bfloat16}
    weights = [torch.randn(*shape, **options) * 0.02 for shape, _ in products]
    counts = [num_tokens for _, num_tokens in products]
    sides = {
        key: torch.randn(*key, **options) for shape, count in products for key in ((count, size) for size in shape)
    }
    seconds = PRODUCTS_S / 5
    for _ in range(2):  # the first round warms up, and shows how many rounds fill the time
        num_rounds = math.ceil(PRODUCTS_S / seconds)
        started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        started.record()
        for _ in range(num_rounds):
            for weight, count in zip(weights, counts, strict=True):
                above, below = (sides[count, size] for size in weight.shape)
                below @ weight.T, above @ weight, above.T @ below
        ended.record()
        torch.cuda.synchronize()
        seconds = started.elapsed_time(ended) / 1e3 / num_rounds
    return seconds
