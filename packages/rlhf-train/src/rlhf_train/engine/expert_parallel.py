"""Expert parallelism: neighbouring ranks divide the experts of each layer, and send tokens to the ranks that have them.

Each rank has its own batches, as without it, and all else of the model. Router and experts are those of transformers:
a rank runs its experts on the tokens of all ranks of its group. The exchange is that of DeepSpeed's AutoEP, and so are
the groups over which ZeRO shares out the experts' gradients and states.

AutoEP's parts are used, not its entry point. That replaces the routers, too, from which load-balancing losses and
routing replay read, keeps experts under other names than checkpoints, and does not know transformers 5.23.

Source: Lepikhin et al. 2020, GShard, arXiv:2006.16668.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_data.errors import ConfigError
from rlhf_models.experts.routing import num_experts
from rlhf_train.engine.deepspeed_internals import exchanged, expert_exchange, expert_module, form_expert_group
from rlhf_train.engine.shards import WeightPart
from rlhf_train.engine.tensor_parallel import gathered

_INPUTS = ["self", "hidden_states", "top_k_index", "top_k_weights"]  # of experts that can be divided
# Models of transformers whose experts take these, one layer's in one module.
MODEL_TYPES = ("deepseek_v2", "deepseek_v3", "glm4_moe", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe")


class ExpertGroup:
    """The ranks that divide experts among them.

    Attributes:
        size: number of ranks that divide experts.
        rank: number of this rank among them, from 0.
        name, group: what DeepSpeed calls such groups, and that of this rank.
    """

    def __init__(self, size: int) -> None:
        """Form the groups, and those of the ranks with the same experts. Collective over all ranks, whose number `size`
        divides. Raises EngineError for a DeepSpeed without the parts that this file uses."""
        self.size = size
        self.name, self.group = form_expert_group(size)
        self.rank = torch.distributed.get_rank(self.group)

    def whole(self, weight: nn.Parameter) -> Tensor:
        """Return all of a weight, gathered if the ranks divide it. Collective."""
        return gathered(weight, self.group)


def join_expert_group(size: int) -> ExpertGroup | None:
    """Return the group of `size` neighbouring ranks that this one belongs to, or None for size 1. Collective.

    `ModelSpec.check_ranks` says whether `size` is possible.
    """
    return None if size == 1 else ExpertGroup(size)


def check_divides_experts(config: Any, size: int) -> None:
    """Raise ConfigError unless `size` ranks can divide the experts of models of a transformers config."""
    text = config.get_text_config()
    message = f"``expert_parallel_size={size}`` divides the experts of each layer"
    if not (count := num_experts(text) or getattr(text, "n_routed_experts", 0)):
        raise ConfigError(f"{message}, and a {config.model_type} model has none", hint="drop it")
    if config.model_type not in MODEL_TYPES:
        hint = "drop it; ``zero_stage=3`` divides all models"
        raise ConfigError(f"{message} of {', '.join(MODEL_TYPES)} models, not of {config.model_type}", hint=hint)
    if count % size:
        sizes = ", ".join(str(each) for each in range(2, count + 1) if count % each == 0)
        raise ConfigError(f"{message}, and the model has {count}", hint=f"use one of {sizes}, or drop it")


def divide_experts(model: nn.Module, group: ExpertGroup) -> None:
    """Keep this rank's part of the experts of an actor, critic or reward model, and have them run on all ranks' tokens.

    Passes are collective then. Raises ConfigError for a model that cannot be divided.
    """
    backbone = model.model.base_model
    check_divides_experts(backbone.config, group.size)
    layers = [module for name, module in backbone.named_modules() if name.endswith(".experts")]
    if not layers or any([*inspect.signature(type(layer).forward).parameters] != _INPUTS for layer in layers):
        message = f"``expert_parallel_size={group.size}``: the experts of this {backbone.config.model_type} model are"
        raise ConfigError(f"{message} not of the known form", hint="drop it; ``zero_stage=3`` divides all models")
    for experts in layers:
        count = experts.num_experts
        own = count // group.size
        for weight in experts.parameters():
            part = weight.data[group.rank * own : (group.rank + 1) * own]
            weight.data = part.clone()  # a view would keep the others' experts in memory
            weight.part = WeightPart(0, group.rank, group.size)
            # By these, DeepSpeed shares out gradients and states over ranks with the same experts.
            weight.allreduce, weight.group_name = False, group.name
        experts.num_experts = own
        experts.forward = partial(_run, experts.forward, count, group.size, group.group)
    model.add_module("divided_experts", _marker(len(layers)))


def _marker(num_layers: int) -> nn.Module:
    """Return a module without weights, by which DeepSpeed finds that a model has experts that ranks divide."""

    class DividedExperts(expert_module()):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.num_experts = num_layers  # only checkpoints of DeepSpeed's own read it

        def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
            pass  # the groups are formed

    return DividedExperts()


def _run(
    run: Callable[[Tensor, Tensor, Tensor], Tensor],
    num_experts: int,
    size: int,
    group: torch.distributed.ProcessGroup,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """Send tokens to the ranks that have their experts, run these there, and add up what comes back. Collective.

    Args:
        run: the experts of this rank, on tokens [M, H] with their experts [M, 1], from 0, and weights [M, 1].
        num_experts: of all ranks.
        size, group: the ranks that divide them.
        hidden_states: [N, H], tokens of this rank.
        top_k_index, top_k_weights: [N, k], their experts, and how much each counts.

    Returns:
        [N, H], the weighted sums.
    """
    exchange = expert_exchange()
    num_tokens, width = hidden_states.shape
    top_k = top_k_index.shape[1]
    num_own = num_experts // size
    by_expert = top_k_index.flatten().argsort(stable=True)
    plan = exchange.compute_split_plan(top_k_index, num_experts, size, num_own, group)
    sent = hidden_states[by_expert // top_k]
    received = exchanged(sent, plan.input_splits, plan.output_splits, group)
    own = torch.arange(num_own, device=sent.device).repeat(size)
    own = own.repeat_interleave(plan.local_counts_by_source.flatten(), output_size=len(received))
    num_received = len(received)
    if not num_received:  # experts without tokens get gradients of zeros then, as all ranks expect
        received, own = torch.cat([received, received.new_zeros(1, width)]), own.new_zeros(1)
    computed = run(received, own[:, None], received.new_ones(len(received), 1))[:num_received]
    returned = exchanged(computed, plan.output_splits, plan.input_splits, group)
    shape = (1, num_tokens, width)
    [combined] = exchange.combine_from_routed(returned, top_k_weights, by_expert, top_k, "post", "weighted_sum", shape)
    return combined
