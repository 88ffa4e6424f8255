"""What layers of vLLM keep beside their weights and derive from them: kernels of experts, and other tensors."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch


def expert_kernels(model: torch.nn.Module) -> list[tuple[Any, Any, Any]]:
    """Return the methods of layers with experts that have a kernel, each with its kernel and how that is configured."""
    methods = (getattr(module, "quant_method", None) for module in model.modules())
    with_kernel = (method for method in methods if getattr(method, "moe_kernel", None) is not None)
    return [(method, method.moe_kernel, method.moe_quant_config) for method in with_kernel]


def drop_expert_kernels(model: torch.nn.Module) -> None:
    """Have the layers with experts of a model on a CPU make their kernels anew when their weights are there.

    vLLM packs the weights of experts for the CPU only when it makes their kernel. A layer that still has one would
    compute with weights that are not packed. A layer that gets no weights has no kernel until the next update; the
    engine refuses requests until then.
    """
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.rlhf_capture_fn = getattr(method.moe_kernel.fused_experts, "routing_replay_capture_fn", None)
            method.moe_kernel = None


def watch_expert_kernels(model: torch.nn.Module) -> None:
    """Have new kernels of experts report what they choose to whom the ones before reported it."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        capture = getattr(method, "rlhf_capture_fn", None)
        if capture is not None and method.moe_kernel is not None:
            method.moe_kernel.fused_experts.set_capture_fn(capture)


def holds_more_than_weights(model: torch.nn.Module) -> bool:
    """Return whether a model computes with tensors that are neither parameters nor buffers nor views of them.

    vLLM derives them from weights, for some kinds of attention and for experts, and does not restore them if weights
    are dropped.
    """
    if any(hasattr(getattr(module, "quant_method", None), "moe_kernel") for module in model.modules()):
        return True  # in FP8, the kernels of experts do
    known = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    owners = [owner for module in model.modules() for owner in (module, getattr(module, "impl", None))]
    attributes = [item for owner in owners for item in getattr(owner, "__dict__", {}).items()]
    values = [value for name, value in attributes if name != "kv_cache"]  # which is dropped in any case
    device = next(model.parameters()).device
    held = (value for value in _flat(values) if isinstance(value, torch.Tensor) and value.device == device)
    return any(value.untyped_storage().data_ptr() not in known for value in held)


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    """Yield values, and those in lists, tuples and dictionaries among them."""
    for value in values:
        if isinstance(value, dict):
            yield from _flat(value.values())
        elif isinstance(value, list | tuple):
            yield from _flat(value)
        else:
            yield value
