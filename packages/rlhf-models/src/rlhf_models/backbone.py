"""Forward passes of a transformers model over a `TokenBatch`."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from rlhf_models.attention import forwarding, packed_arguments
from rlhf_models.batch import TokenBatch
from rlhf_models.fast.pack_graph import PackGraph, can_be_replayed


def replay_full_packs(backbone: nn.Module, num_tokens: int, gradient_sums: Mapping[nn.Parameter, Tensor]) -> None:
    """Replay training passes over packs of about `num_tokens` tokens from CUDA graphs (`PackGraph`).

    Does nothing for a model whose passes cannot be captured.
    """
    if can_be_replayed(backbone.config):
        backbone.pack_graph = PackGraph(backbone, num_tokens, gradient_sums)


def last_hidden_state(backbone: nn.Module, batch: TokenBatch) -> Tensor:
    """Return the hidden states [B, T, D] of a batch."""
    graph = getattr(backbone, "pack_graph", None)
    hidden = graph(batch) if graph is not None else None
    return run_backbone(backbone, batch).last_hidden_state if hidden is None else hidden


def run_backbone(model: nn.Module, batch: TokenBatch) -> Any:
    """Return the output of a transformers model, with or without its head, for a batch.

    No padding mask is passed: padding is on the right, where causal attention never looks.
    """
    arguments = packed_arguments(batch, model.config._attn_implementation)
    watch = getattr(getattr(model, "base_model", model), "router_watch", None) if model.training else None
    if watch is not None:
        arguments["output_router_logits"] = True
    with forwarding(batch):
        output = model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, **arguments)
    if watch is not None:
        watch.see(getattr(output, "router_logits", None), batch)
    return output
