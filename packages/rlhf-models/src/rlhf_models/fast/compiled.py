"""Layers compiled in place by torch.compile, which fuses the operations between matrix products into a few kernels."""

import functools
import operator
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.functional import linear

from rlhf_models.attention.compiler import configure_compiler
from rlhf_models.attention.packed import PACKED_ATTENTIONS, head_sizes, varlen_unavailable_reason
from rlhf_models.attention.scored import SCORED_ATTENTION

# A matrix product with fewer columns leaves most of a GPU idle, so it is joined with other products of the same input.
_FEW_COLUMNS = 1024
_Backend = str | Callable[..., Any]  # of torch.compile: a name, or a function of a graph and its inputs
_LINEAR = torch._C._nn.linear  # what `torch.nn.functional.linear` is until DeepSpeed replaces it
_eager_linear: Callable[..., Tensor] = _LINEAR  # what it was when a layer of `compile_forwards` was last called


def compile_unavailable_reason(model: nn.Module, device: torch.device, *, inside_hooks: bool = False) -> str | None:
    """Return why the layers of a transformers model cannot be compiled, or None if they can.

    With `inside_hooks`, that is by `compile_forwards`; without, by `compile_layers`.
    """
    if device.type != "cuda":
        return f"it needs CUDA, the model is on {device.type}"
    if not _layers(model):
        return f"a {type(model).__name__} has no layers that transformers marks as such"
    if nn.functional.linear is not _LINEAR and not inside_hooks:
        # DeepSpeed's ZeRO stage 3 does so for the rest of the process. `join_products` finds no product then, and
        # layers that were compiled after it had wrong gradients on a GPU.
        return "torch.nn.functional.linear has been replaced in this process"
    config = model.config.get_text_config()
    if hasattr(getattr(model, "base_model", model), "states_apart"):
        return "layers that carry a state take the sequences of each pack apart"
    if config._attn_implementation == SCORED_ATTENTION:
        return "attention with a soft cap or sinks is compiled by itself"
    if config._attn_implementation in PACKED_ATTENTIONS:
        of_keys, of_values = head_sizes(config)
        dropout = getattr(config, "attention_dropout", 0.0)
        if of_keys != of_values:
            return "packed attention has no kernel for heads of keys and values of different sizes"
        if reason := varlen_unavailable_reason(device, model.dtype, of_keys, dropout):
            return f"packed attention has no kernel: {reason}"
    return None


def compile_layers(model: nn.Module, *, backend: _Backend = "inductor") -> None:
    """Compile the layers of a transformers model, and the norm after them, at their first call.

    Equal layers share one compiled code, so compilation takes seconds for any depth. Shapes may change between calls.
    Names of weights do not change. Call this only if `compile_unavailable_reason` returns None.
    """
    configure_compiler()
    has_adapters = any(hasattr(module, "lora_A") for module in model.modules())
    chosen = _joining(_rounding_inductor if has_adapters and backend == "inductor" else backend)
    for layer in [*_layers(model), *_final_norms(model)]:
        layer.compile(dynamic=True, backend=chosen)
    embedding = model.get_input_embeddings()
    if any(weight.requires_grad for weight in model.parameters()) and not embedding.weight.requires_grad:
        embedding.register_forward_hook(_require_gradient)


def compile_forwards(layers: Sequence[nn.Module], *, backend: _Backend = "inductor") -> None:
    """Compile what layers compute between their hooks, at their first call: the layers that ZeRO stage 3 takes whole.

    The hooks gather the weights before, and release them and reduce their gradients after; they stay as they are.
    Gradient checkpointing becomes part of the compiled code. For the backward pass, the code keeps the weights by
    reference, and DeepSpeed fills them again. Products are not joined, because joined copies of weights would stay.
    """
    configure_compiler()
    for layer in layers:
        layer.forward = _with_plain_linear(torch.compile(layer.forward, dynamic=True, backend=backend))


def _with_plain_linear(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return `run` with `_linear` in place of what DeepSpeed has made of `torch.nn.functional.linear`."""

    @functools.wraps(run)
    def call(*args: Any, **kwargs: Any) -> Any:
        global _eager_linear
        _eager_linear = nn.functional.linear
        nn.functional.linear = _linear
        try:
            return run(*args, **kwargs)
        finally:
            nn.functional.linear = _eager_linear

    return call


def _linear(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """PyTorch's linear function in compiled code, and DeepSpeed's where a call is not compiled after all.

    DeepSpeed's does not keep the released memory of a weight for the backward pass. Compiled code does not either. In
    bfloat16, DeepSpeed's rounds the product before it adds the bias, and PyTorch's rounds once.
    """
    return (_LINEAR if torch.compiler.is_compiling() else _eager_linear)(hidden, weight, bias)


def _require_gradient(embedding: nn.Module, inputs: tuple[Tensor], rows: Tensor) -> Tensor:
    """Hook of a frozen embedding below trained layers (adapters): have its output require a gradient.

    The first layer's input is then like that of the others. torch.compile would compile that layer separately
    otherwise, which takes as long again.
    """
    return rows.requires_grad_() if torch.is_grad_enabled() else rows


def is_compiled(model: nn.Module) -> bool:
    """Return whether `compile_layers` was called for the model. `compile_forwards` does not count."""
    return any(module._compiled_call_impl is not None for module in model.modules())


def _rounding_inductor(module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
    """Backend of torch.compile: inductor that rounds results within a kernel to their dtype, as eager code does.

    By itself it keeps them in float32. Around adapters it divides a layer into other kernels with gradients than
    without, so that in bfloat16 a policy differs by 0.1 % from its own old log-probs.
    """
    inductor = torch._dynamo.lookup_backend("inductor")
    return inductor(module, inputs, config_patches={"emulate_precision_casts": True})


@functools.cache  # torch.compile compiles a layer again for another backend object, even an equivalent one
def _joining(backend: _Backend) -> Callable[..., Any]:
    """Return a backend of torch.compile that joins matrix products and passes the graph on to `backend`."""
    inner = torch._dynamo.lookup_backend(backend)

    def compile_joined(module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        for part in module.modules():  # the layers under gradient checkpointing are subgraphs
            if isinstance(part, fx.GraphModule):
                join_products(part)
        return inner(module, inputs)

    return compile_joined


def join_products(module: fx.GraphModule) -> None:
    """Replace several matrix products of one input (queries, keys and values, for example) by one joined product.

    Applies where one of them alone has fewer than `_FEW_COLUMNS` columns. The weights and their gradients remain
    separate tensors; a joined copy of the weights is kept from the forward to the backward pass.
    """
    groups = defaultdict(list)  # products by input, presence of a bias, and whether their weights are trained
    for node in module.graph.find_nodes(op="call_function", target=linear):
        hidden, *weights = [argument for argument in node.args if argument is not None]
        # Only weights of the layer itself are placeholders; a computed weight (LoRA's, for example) may not exist yet
        # where the joined product is inserted.
        if not node.kwargs and all(weight.op == "placeholder" for weight in weights):
            # Group by requires_grad as well: joined with trained weights, frozen ones would get gradients.
            is_trained = weights[0].meta["example_value"].requires_grad
            groups[hidden, len(weights) == 1, is_trained].append(node)
    for (hidden, has_no_bias, _), nodes in groups.items():
        sizes = [node.args[1].meta["example_value"].shape[0] for node in nodes]
        if len(nodes) < 2 or min(sizes) >= _FEW_COLUMNS:
            continue
        call = module.graph.call_function
        # Insert before the first of the products: their common input exists there.
        with module.graph.inserting_before(nodes[0]):
            terms = [call(torch.cat, ([node.args[1] for node in nodes],))]
            if not has_no_bias:
                terms.append(call(torch.cat, ([node.args[2] for node in nodes],)))
            parts = call(_split, (call(linear, (hidden, *terms)), sizes))
            made = [call(operator.getitem, (parts, index)) for index in range(len(nodes))]
        for node, part in zip(nodes, made, strict=True):
            node.replace_all_uses_with(part)
            module.graph.erase_node(node)
    module.recompile()


class _Split(torch.autograd.Function):
    """Splits columns. In the backward pass a custom operator, opaque to the compiler, concatenates their gradients.

    Inductor would otherwise fuse the computation of all parts into one kernel that selects a formula per element.
    """

    @staticmethod
    def forward(ctx: Any, joined: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
        return tuple(part.clone() for part in joined.split(sizes, dim=-1))  # clone: a model may change a part in place

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _side_by_side(gradients), None


def _split(joined: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
    return _Split.apply(joined, sizes)


@torch.library.custom_op("rlhf_models::side_by_side", mutates_args=())
def _side_by_side(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(parts, dim=-1)


@_side_by_side.register_fake  # the shape of the result, for tracing
def _(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(parts, dim=-1)


def _layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a model: transformers derives them from the class that allows gradient checkpointing."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def _final_norms(model: nn.Module) -> list[nn.Module]:
    """Return the modules beside the list of layers that have only one-dimensional weights: the norms."""
    first = _layers(model)[0]
    norms = []
    for owner in model.modules():
        if not any(first in child.children() for child in owner.children()):
            continue  # no child is the list of layers
        for child in owner.children():
            dims = {weight.ndim for weight in child.parameters()}
            if dims == {1}:
                norms.append(child)
    return norms
