"""Layers compiled where they stand: what lies between their matrix products becomes a few kernels."""

import functools
import operator
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.functional import linear

from rlhf_models.attention import PACKED_ATTENTION, varlen_unavailable_reason

# A product with fewer columns leaves most of a GPU idle; it is computed with others of its input.
_FEW_COLUMNS = 1024


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
    """Have the layers of a transformers model, and the norm after them, compiled at their first call; shapes may change
    from call to call. One layer's code serves all that are alike: this takes seconds however deep the model is. Names
    of weights stay. The model must be one without `compile_unavailable_reason`."""
    for layer in [*_layers(model), *_final_norms(model)]:
        layer.compile(dynamic=True, backend=_joining(backend))


@functools.cache  # a layer is compiled anew for another backend, also for one that does the same
def _joining(backend: str) -> Callable[..., Any]:
    inner = torch._dynamo.lookup_backend(backend)

    def compile_joined(module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        for part in module.modules():  # layers that are checkpointed are graphs within
            if isinstance(part, fx.GraphModule):
                join_products(part)
        return inner(module, inputs)

    return compile_joined


def join_products(module: fx.GraphModule) -> None:
    """Compute products of one input by weights side by side, such as queries, keys and values, as one, where any of
    them alone has few columns. The weights stay apart, and so do their gradients; a joined copy of them is held from
    the forward to the backward pass."""
    groups = defaultdict(list)
    for node in module.graph.find_nodes(op="call_function", target=linear):
        hidden, *weights = [argument for argument in node.args if argument is not None]
        if not node.kwargs and all(weight.op == "placeholder" for weight in weights):
            # Frozen weights among others would get gradients, too.
            groups[hidden, len(weights) == 1, weights[0].meta["example_value"].requires_grad].append(node)
    for (hidden, is_bare, _), nodes in groups.items():
        sizes = [node.args[1].meta["example_value"].shape[0] for node in nodes]
        if len(nodes) < 2 or min(sizes) >= _FEW_COLUMNS:
            continue
        call = module.graph.call_function
        with module.graph.inserting_before(nodes[0]):
            terms = [call(torch.cat, ([node.args[at] for node in nodes],)) for at in ((1,) if is_bare else (1, 2))]
            parts = call(_split, (call(linear, (hidden, *terms)), sizes))
            made = [call(operator.getitem, (parts, index)) for index in range(len(nodes))]
        for node, part in zip(nodes, made, strict=True):
            node.replace_all_uses_with(part)
            module.graph.erase_node(node)
    module.recompile()


class _Split(torch.autograd.Function):
    """Columns apart. Their gradients are laid side by side by an operator that no compiler looks into: one kernel that
    makes them all would work out for each element by which formula."""

    @staticmethod
    def forward(ctx: Any, joined: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
        return tuple(part.clone() for part in joined.split(sizes, dim=-1))  # a model may change one in place

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _side_by_side(gradients), None


def _split(joined: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
    return _Split.apply(joined, sizes)


@torch.library.custom_op("rlhf_models::side_by_side", mutates_args=())
def _side_by_side(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(parts, dim=-1)


@_side_by_side.register_fake
def _(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(parts, dim=-1)


def _layers(model: nn.Module) -> list[nn.Module]:
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def _final_norms(model: nn.Module) -> list[nn.Module]:
    """Return what stands beside the layers and has nothing but a weight for each channel."""
    first = _layers(model)[0]
    owners = [part for part in model.modules() if any(first in child.children() for child in part.children())]
    beside = [(child, list(child.parameters())) for owner in owners for child in owner.children()]
    return [child for child, weights in beside if weights and all(weight.ndim == 1 for weight in weights)]
