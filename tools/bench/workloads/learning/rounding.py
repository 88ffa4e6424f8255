"""By how much bfloat16 changes the log-probs of models with random weights.

    python tools/bench/run.py rounding --out rounding.json

An engine and a trainer that compute in bfloat16 round at different places, so their log-probs of a token differ. This
script measures how large such differences are for a shape. It runs the decoder layers of transformers on the same
weights and random tokens in float32 and in bfloat16, and compares the log-probs of tokens that are sampled from the
float32 model at temperature 1. Products and attention add up in float32 and round their results, as on a GPU. Besides
the output layer, only one layer is in memory at a time.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm, Qwen2RotaryEmbedding

from models import SHAPES
from runner import progress

COMPLETE = [name for name, shape in SHAPES.items() if "initializer_range" in shape]  # those of real models
FLAGS = {
    "tokens": 256,
    "seed": 0,
    "shapes": {"nargs": "+", "default": COMPLETE, "choices": COMPLETE},
}
PRODUCTS = (functional.linear, functional.scaled_dot_product_attention)


class Float32Sums(TorchFunctionMode):
    """Products and attention of bfloat16 tensors in float32, with the result rounded to bfloat16."""

    def __torch_function__(self, function: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function not in PRODUCTS or args[0].dtype != torch.bfloat16:
            return function(*args, **kwargs)
        wide = [each.float() if isinstance(each, Tensor) else each for each in args]
        named = {name: each.float() if isinstance(each, Tensor) else each for name, each in kwargs.items()}
        return function(*wide, **named).bfloat16()


def gap(shape: Mapping[str, Any], num_tokens: int, other: torch.dtype = torch.bfloat16) -> dict[str, float]:
    """Return by how much the log-probs of sampled tokens in another dtype differ from those in float32.

    Args:
        shape: one of `SHAPES` that says all sizes.
        num_tokens: length of the one sequence.
        other: the other dtype.

    Returns:
        `gap_mean` and `gap_max`, the mean and the largest absolute difference, and `entropy`, the mean entropy of the
        next token in float32, all in nats.
    """
    sizes = {name: value for name, value in shape.items() if name not in ("tied", "initializer_range")}
    config = Qwen2Config(**sizes, attn_implementation="sdpa")
    hidden_size, std = config.hidden_size, shape["initializer_range"]

    def draw(module: torch.nn.Module) -> torch.nn.Module:
        """Draw weights that bfloat16 holds exactly. Biases are zero, as in the models of `tiny_model_dir`."""
        for name, parameter in module.named_parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(0, std).copy_(parameter.data.bfloat16())
            elif name.endswith("bias"):
                parameter.data.zero_()
        return module

    head = draw(torch.nn.Linear(hidden_size, config.vocab_size, bias=False))
    tied = shape.get("tied", True)
    token_ids = torch.randint(config.vocab_size, (1, num_tokens))
    embedded = head.weight[token_ids] if tied else (torch.randn(1, num_tokens, hidden_size) * std).bfloat16().float()
    hidden = {torch.float32: embedded, other: embedded.to(other)}
    positions = torch.arange(num_tokens)[None]
    rotary = Qwen2RotaryEmbedding(config)
    for index in range(config.num_hidden_layers):
        layer = draw(Qwen2DecoderLayer(config, index))
        for dtype, states in hidden.items():
            layer.to(dtype)
            hidden[dtype] = layer(states, position_embeddings=rotary(states, positions), attention_mask=None)
    norm = Qwen2RMSNorm(hidden_size, config.rms_norm_eps)
    logprobs = {
        dtype: head.to(dtype)(norm.to(dtype)(states))[0].float().log_softmax(-1) for dtype, states in hidden.items()
    }
    wide = logprobs[torch.float32]
    sampled = torch.multinomial(wide.exp(), 1)
    difference = (logprobs[other] - wide).gather(1, sampled).abs()
    return {
        "gap_mean": difference.mean().item(),
        "gap_max": difference.max().item(),
        "entropy": -(wide.exp() * wide).sum(-1).mean().item(),
    }


def measure(options: Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Measure each shape."""
    shapes = {}
    with torch.no_grad(), Float32Sums():
        for name in options.shapes:
            torch.manual_seed(options.seed)
            shapes[name] = gap(SHAPES[name], options.tokens)
            progress({"shape": name, **shapes[name]})
            yield {"shapes": shapes}
