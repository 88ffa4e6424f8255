"""Which layers ZeRO stage 3 gathers, and reduces the gradients of, as one.

By itself, DeepSpeed runs Python code around each matrix and norm. In small passes that takes longer than their
computation.
"""

from collections.abc import Sequence

from torch import nn

# Numbers of weights; both are DeepSpeed's defaults.
_MOST_GATHERED = 1_000_000_000  # at a time
_LEAST_AHEAD = 50_000_000


def layers_taken_whole(model: nn.Module) -> list[nn.Module]:
    """Return the transformers layers that are gathered and reduced as one: those of at most 1e9 weights.

    DeepSpeed reduces the gradients of such a layer when it has the gradient of the layer's first input. A model in
    which that may be too early has no such layers: one with frozen and trained weights, because the input of its first
    layer may have no gradient; one whose layers share weights, or run several times in a pass; and one that is not part
    of transformers, because it may pass inputs by keyword.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers or any(not type(layer).__module__.startswith("transformers.models.") for layer in layers):
        return []
    config = next(module.config for module in model.modules() if hasattr(module, "config"))
    runs_once = getattr(config.get_text_config(), "num_hidden_layers", None) == len(layers)
    weights = [weight for layer in layers for weight in layer.parameters()]
    is_shared = len({*weights}) < len(weights)
    is_mixed = len({weight.requires_grad for weight in model.parameters()}) > 1
    if not runs_once or is_shared or is_mixed:
        return []
    return [layer for layer in layers if _size(layer) <= _MOST_GATHERED]


def call_layers_equally(model: nn.Module, whole: Sequence[nn.Module]) -> None:
    """Have layers that carry a state read each pack as one batch, unless all layers are in `whole`.

    Their weights are gathered call by call then, and all ranks must make the same calls, whatever is in their packs.
    """
    for backbone in model.modules():
        if (apart := getattr(backbone, "states_apart", None)) is not None:
            apart.in_one_batch = len(whole) < backbone.config.get_text_config().num_hidden_layers


def num_gathered_ahead(layers: Sequence[nn.Module]) -> int:
    """Return how many weights to gather while others compute: those of the largest of `layers`, so that the next layer
    is there in time. DeepSpeed gathers fewer where its limit for all gathered weights leaves less."""
    return max([_LEAST_AHEAD, *map(_size, layers)])


def _size(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())
