"""Layers compiled where they stand: what lies between their matrix products becomes a few kernels."""

import torch
from torch import nn

from rlhf_models.attention import PACKED_ATTENTION, varlen_unavailable_reason


def compile_unavailable_reason(model: nn.Module, device: torch.device) -> str | None:
    """Return why the layers of a transformers model are not to be compiled, or None when they are."""
    if device.type != "cuda":
        return f"it is for CUDA, the model runs on {device.type}"
    if not _layers(model):
        return f"the layers of a {type(model).__name__} are not known"
    config = model.config.get_text_config()
    if config._attn_implementation == PACKED_ATTENTION:
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        dropout = getattr(config, "attention_dropout", 0.0)
        if reason := varlen_unavailable_reason(device, model.dtype, head_dim, dropout):
            return f"packed attention has no kernel: {reason}"
    return None


def compile_layers(model: nn.Module, *, backend: str = "inductor") -> None:
    """Have the layers of a transformers model compiled at their first call; shapes may change from call to call. One
    layer's code serves all that are alike: this takes seconds however deep the model is. Names of weights stay. The
    model must be one without `compile_unavailable_reason`."""
    for layer in _layers(model):
        layer.compile(dynamic=True, backend=backend)


def _layers(model: nn.Module) -> list[nn.Module]:
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
