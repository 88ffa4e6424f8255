"""Tensor parallelism: neighbouring ranks divide the matrices of a model's layers, by the layers of DeepSpeed's AutoTP.

Which matrices, and along which dimension, is in the plan that transformers has for a family of models
(`base_model_tp_plan`). Embedding, norms and head stay whole on every rank. The ranks of a group run the same passes,
each with its attention heads and its part of the MLP, and add up what these put out, so that outputs and gradients are
whole on each.

AutoTP's layers are used, not its entry points. `deepspeed.initialize` divides a model only to train it, and sends the
inputs of the first pass to all ranks; and its way to gather a weight leaves the weight outside of ZeRO's memory, where
updates no longer reach it.

Source: Shoeybi et al. 2019, Megatron-LM, arXiv:1909.08053.
"""

import re
from typing import Any

import torch
from torch import Tensor, distributed, nn

from rlhf_data.errors import ConfigError
from rlhf_train.engine.deepspeed_internals import divided_linear
from rlhf_train.engine.shards import WeightPart, part_of

_COLUMNS, _ROWS, _SUMMED = "colwise", "rowwise", "replicated_with_grad_allreduce"
_KEPT_WHOLE = "embedding_rowwise"


class TensorGroup:
    """The ranks that divide weights among them, and the ranks of all groups that have the same parts.

    DeepSpeed asks it for both, by the names of Megatron-LM's `mpu`: gradients and states of the optimizer are shared
    out over the latter.

    Attributes:
        size: number of ranks that divide weights.
        rank: number of this rank among them, from 0.
        data_size, data_rank: likewise of the ranks with the same parts.
    """

    def __init__(self, size: int) -> None:
        """Form the groups. Collective over all ranks, whose number `size` divides."""
        num_ranks = distributed.get_world_size()
        self.rank = distributed.get_rank() % size
        self.data_rank = distributed.get_rank() // size
        self.size = size
        self.data_size = num_ranks // size
        dividing = [distributed.new_group(range(first, first + size)) for first in range(0, num_ranks, size)]
        alike = [distributed.new_group(range(number, num_ranks, size)) for number in range(size)]
        self._dividing = dividing[self.data_rank]
        self._alike = alike[self.rank]

    def get_model_parallel_group(self) -> distributed.ProcessGroup:
        """Return the ranks that divide weights."""
        return self._dividing

    def get_model_parallel_world_size(self) -> int:
        """Return `size`."""
        return self.size

    def get_model_parallel_rank(self) -> int:
        """Return `rank`."""
        return self.rank

    def get_data_parallel_group(self) -> distributed.ProcessGroup:
        """Return the ranks that have the same parts."""
        return self._alike

    def get_data_parallel_world_size(self) -> int:
        """Return `data_size`."""
        return self.data_size

    def get_data_parallel_rank(self) -> int:
        """Return `data_rank`."""
        return self.data_rank

    def counts(self, weight: nn.Parameter) -> bool:
        """Whether this rank counts a weight in sums over the group: a part counts on its rank, the rest on rank 0."""
        return self.rank == 0 or part_of(weight).count > 1

    def norm(self, weights: list[nn.Parameter]) -> float:
        """Return the L2 norm of the gradients of whole weights. Collective."""
        gradients = [weight.grad for weight in weights if weight.grad is not None and self.counts(weight)]
        return float(self._sum(nn.utils.get_total_norm(gradients).square()).sqrt())

    def whole(self, weight: nn.Parameter) -> Tensor:
        """Return all of a weight, gathered if the ranks divide it. Collective."""
        return gathered(weight, self._dividing)

    def sum_gradient(self, weight: nn.Parameter) -> None:
        """Have each gradient of a whole weight, of which a rank computes what its heads add, summed over the group."""
        if weight.requires_grad:
            weight.register_hook(lambda gradient: self._sum(gradient.clone(memory_format=torch.contiguous_format)))

    def _sum(self, tensor: Tensor) -> Tensor:
        distributed.all_reduce(tensor, group=self._dividing)
        return tensor


def gathered(weight: nn.Parameter, group: distributed.ProcessGroup) -> Tensor:
    """Return all of a weight, gathered if the ranks of `group` divide it. Collective."""
    own = weight.detach()
    part = part_of(weight)
    if part.count == 1:
        return own
    parts = [torch.empty_like(own, memory_format=torch.contiguous_format) for _ in range(part.count)]
    distributed.all_gather(parts, own.contiguous(), group=group)
    return torch.cat(parts, dim=part.dim)


def join_tensor_group(size: int) -> TensorGroup | None:
    """Return the group of `size` neighbouring ranks that this one belongs to, or None for size 1. Collective.

    `ModelSpec.check_ranks` says whether `size` is possible.
    """
    return None if size == 1 else TensorGroup(size)


def check_divides(config: Any, size: int) -> None:
    """Raise ConfigError unless `size` ranks can divide the layers of a transformers model, each with whole heads."""
    plan = getattr(config, "base_model_tp_plan", None)
    kind = getattr(config, "model_type", "")
    if not plan:
        message = f"``tensor_parallel_size={size}``: transformers has no plan to divide a {kind} model"
        raise ConfigError(message, hint="drop ``tensor_parallel_size``; ``zero_stage=3`` divides all models")
    if other := sorted(set(plan.values()) - {_COLUMNS, _ROWS, _SUMMED, _KEPT_WHOLE}):
        message = f"``tensor_parallel_size={size}``: a {kind} model is divided in ways that are not supported"
        hint = "drop ``tensor_parallel_size``; ``zero_stage=3`` divides all models"
        raise ConfigError(f"{message} ({', '.join(other)})", hint=hint)
    text = config.get_text_config()
    heads = _size(text, "num_attention_heads")
    counts = {
        "num_attention_heads": heads,
        "num_key_value_heads": _size(text, "num_key_value_heads") or heads,
        "intermediate_size": _size(text, "intermediate_size"),
    }
    if other := [name for name, count in counts.items() if not isinstance(count, int)]:
        message = f"``tensor_parallel_size={size}``: the layers of a {kind} model differ in {' and '.join(other)}"
        raise ConfigError(message, hint="drop ``tensor_parallel_size``; ``zero_stage=3`` divides all models")
    for name, count in counts.items():
        if count % size:
            possible = [str(n) for n in range(2, size) if not any(other % n for other in counts.values())]
            message = f"``tensor_parallel_size={size}`` must divide the model's {name}, which is {count}"
            raise ConfigError(message, hint=f"use {' or '.join(possible)}" if possible else "drop it")


def _size(config: Any, name: str) -> Any:
    """Return a size of all layers: an integer, None if the config has none, or something else if the layers differ."""
    try:
        return getattr(config, name, None)
    except RuntimeError as error:  # of transformers, for layers that differ
        return error


def divide_weights(model: nn.Module, group: TensorGroup) -> None:
    """Replace the layers of an actor, critic or reward model by layers that have this rank's part of the weights.

    The parts are moved to the device. Raises ConfigError for a model that cannot be divided.
    """
    backbone = model.model.base_model
    check_divides(backbone.config, group.size)
    plan = backbone.config.base_model_tp_plan
    divided = {name: style for name, _ in backbone.named_modules() if (style := plan.get(_pattern(name)))}
    _check_all_planned(backbone, divided)
    for name, style in divided.items():
        module = backbone.get_submodule(name)
        if style == _SUMMED:
            group.sum_gradient(module.weight)
        if style not in (_COLUMNS, _ROWS):
            continue
        dim = 0 if style == _COLUMNS else 1
        if type(module) is not nn.Linear or module.weight.shape[dim] % group.size:
            message = f"{group.size} ranks cannot divide the layer {name}: {module}"
            raise ConfigError(message, hint="use another ``tensor_parallel_size``, or drop it")
        layer = divided_linear(module, dim, group.get_model_parallel_group(), name)
        parent, _, own = name.rpartition(".")
        setattr(backbone.get_submodule(parent), own, layer)
        part = WeightPart(dim, group.rank, group.size)
        layer.weight.part = part
        if dim == 0 and layer.bias is not None:
            layer.bias.part = part


def _pattern(name: str) -> str:
    """Return the name of a module as plans have it: with a star for each number."""
    return re.sub(r"\b\d+\b", "*", name)


def _check_all_planned(backbone: nn.Module, divided: dict[str, str]) -> None:
    """Raise ConfigError if a block with divided layers has other weights, whose gradients would be parts, too."""
    blocks = {name.rpartition(".")[0] for name, style in divided.items() if style in (_COLUMNS, _ROWS)}
    for block in sorted(blocks):
        for name, _ in backbone.get_submodule(block).named_parameters():
            owner = f"{block}.{name}".rpartition(".")[0]
            if owner not in divided:
                message = f"the plan of transformers for a {backbone.config.model_type} model does not say how ranks"
                raise ConfigError(f"{message} divide {owner}", hint="drop ``tensor_parallel_size``")
