"""Ids of the vocabulary that vLLM's models never give a probability."""

from typing import Any

import torch
from torch import Tensor, nn

from rlhf_data.errors import EngineError
from rlhf_rollout.engines.spec import EngineSpec

_NAME = "rlhf_masked_ids"  # in vLLM's additional configuration


def mask_config(spec: EngineSpec) -> dict[str, Any]:
    """Return the part of vLLM's additional configuration that `mask_logits` reads in each worker."""
    return {_NAME: [[ids.start, ids.stop] for ids in spec.masked_ids]}


def mask_logits(model: nn.Module, vllm_config: Any) -> None:
    """Have a model of vLLM give the ids that its engine masks the logit -inf, in each pass from now on.

    Requests could name the allowed ids instead, but vLLM then copies a mask of the whole vocabulary to the GPU whenever
    a request begins or ends. Slices need no memory on the GPU, which would be lost when the engine sleeps.

    Raises EngineError for a model whose logits do not come from vLLM's `LogitsProcessor`.
    """
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    ranges = vllm_config.additional_config[_NAME]
    if not ranges:
        return

    def mask(module: nn.Module, arguments: Any, logits: Tensor | None) -> None:
        if logits is None:  # with tensor parallelism, one worker may gather the logits of all
            return
        for start, stop in ranges:
            logits[..., start:stop] = -torch.inf

    layers = [module for module in model.modules() if isinstance(module, LogitsProcessor)]
    if not layers:
        message = f"{type(model).__name__} of vLLM has no layer in which ids of the vocabulary can be masked"
        raise EngineError(message, hint="use another version of vLLM, or a tokenizer with a token for each id")
    for layer in layers:
        layer.register_forward_hook(mask)
