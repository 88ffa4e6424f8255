"""What vLLM leaves to do for layers that get new weights: kernels of experts, buffers, packed copies, direct copies."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from rlhf_rollout.engines.vllm.names import (
    CopyCounter,
    VocabParallelEmbedding,
    get_layerwise_info,
    make_online_process_loader,
)


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


def keep_buffers(model: torch.nn.Module) -> None:
    """Give layers that are about to be loaded the values of their persistent buffers.

    vLLM would make new ones, whose values are arbitrary until a weight brings them, and not every checkpoint has them.
    """
    for layer in model.modules():
        for name, old in (get_layerwise_info(layer).kernel_tensors or ({}, {}))[1].items():
            new = layer._buffers.get(name)
            is_kept = new is not None and new.is_meta and name not in layer._non_persistent_buffers_set
            if is_kept and (new.shape, new.dtype) == (old.shape, old.dtype):
                layer._buffers[name] = kept = old.detach().clone()
                kept.__dict__.update(new.__dict__)  # how the loader writes it


def repack_cpu_heads(model: torch.nn.Module) -> None:
    """Pack embeddings that are also the output head again: on a CPU a reload does not change their packed copy."""
    from rlhf_rollout.engines.vllm.names import dispatch_cpu_unquantized_gemm

    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear") and module.weight.numel():
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


class DirectWrites(TorchFunctionMode):
    """While it is entered, copies into parameters reach the layers that wait for their weights.

    vLLM waits for what the `weight_loader` of a parameter is given; the parameters themselves are on the meta device.
    The classes of gpt-oss and MiMo-V2 copy experts and sinks of attention into the parameters, without their loader,
    so that the layers would keep the weights that they had.

    Args:
        model: whose layers vLLM has prepared for an update.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self._owners: dict[int, tuple[torch.nn.Module, str, torch.Tensor]] = {}
        for layer in model.modules():
            for name, tensor in (layer._parameters | layer._buffers).items():
                if tensor is not None and tensor.is_meta:
                    self._owners[id(tensor)] = (layer, name, tensor)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Give what is copied into a parameter to the loader of its layer."""
        if func in (torch.Tensor.copy_, torch.Tensor.data.__get__) and id(args[0]) in self._owners:
            layer, name, tensor = self._owners[id(args[0])]
            # A loader that vLLM calls to count elements copies as well. A layer that is complete has new parameters.
            is_direct = not _is_counting() and getattr(layer, name, None) is tensor
            if is_direct and get_layerwise_info(layer).can_load():
                if func is torch.Tensor.copy_:
                    tensor.weight_loader = _copy
                    tensor.weight_loader = make_online_process_loader(layer, name)
                    tensor.weight_loader(tensor, args[1])
                return tensor
        return func(*args, **(kwargs or {}))


def _copy(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    param.data.copy_(loaded_weight)


def _is_counting() -> bool:
    return any(isinstance(mode, CopyCounter) for mode in _get_current_dispatch_mode_stack())


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
