"""Weights that a model of vLLM copies into its parameters itself, in updates that vLLM loads layer by layer."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info, make_online_process_loader
from vllm.model_executor.model_loader.reload.meta import CopyCounter


class DirectWrites(TorchFunctionMode):
    """While it is entered, copies into parameters reach the layers that wait for their weights.

    vLLM waits for what the `weight_loader` of a parameter is given; the parameters themselves are on the meta device.
    The classes of gpt-oss and MiMo-V2 copy experts and sinks of attention into the parameters, without their loader,
    so that the layers would keep the weights that they had.

    Args:
        model: whose layers vLLM has prepared for an update.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._owners: dict[int, tuple[nn.Module, str, Tensor]] = {}
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


def _copy(param: Tensor, loaded_weight: Tensor) -> None:
    param.data.copy_(loaded_weight)


def _is_counting() -> bool:
    return any(isinstance(mode, CopyCounter) for mode in _get_current_dispatch_mode_stack())
