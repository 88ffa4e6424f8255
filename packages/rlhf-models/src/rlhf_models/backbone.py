"""Forward passes of a transformers model over a `TokenBatch`."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from rlhf_data.errors import ConfigError
from rlhf_models.attention import (
    NO_MASK,
    PACKED_ATTENTION,
    PACKED_ATTENTIONS,
    bounds_arguments,
    forwarding,
    packed_arguments,
)
from rlhf_models.batch import TokenBatch
from rlhf_models.fast.pack_graph import PackGraph, can_be_replayed
from rlhf_models.sequence_parallel import SequenceGroup, SequencePart, check_heads
from rlhf_models.shared_prompts import SharedPrompts


def divide_sequences(model: nn.Module, group: SequenceGroup) -> None:
    """Have the ranks of `group` divide the tokens of every batch of an actor, critic or reward model.

    Raises ConfigError for a model with another attention than `rlhf_packed`, or with heads that cannot be divided.
    """
    config = model.model.config
    check_heads(config, group.size)
    if config._attn_implementation not in PACKED_ATTENTIONS:
        message = f"sequence parallelism needs the attention {PACKED_ATTENTION}, not {config._attn_implementation}"
        raise ConfigError(message, hint="leave ``attn_implementation`` at auto, and add ``packing``")
    model.sequence_group = group


def replay_full_packs(backbone: nn.Module, num_tokens: int, gradient_sums: Mapping[nn.Parameter, Tensor]) -> None:
    """Replay training passes over packs of about `num_tokens` tokens from CUDA graphs (`PackGraph`).

    Does nothing for a model whose passes cannot be captured.
    """
    if can_be_replayed(backbone.config):
        backbone.pack_graph = PackGraph(backbone, num_tokens, gradient_sums)


def last_hidden_state(backbone: nn.Module, batch: TokenBatch, sequence_group: SequenceGroup | None = None) -> Tensor:
    """Return the hidden states [B, T, D]; with a `sequence_group` those of this rank's tokens, [1, T', D].

    If prompts are shared, they are those of the stored tokens, [1, U, D]: see `TokenBatch.states_at`.
    """
    if sequence_group is not None:
        return run_backbone(backbone, batch, sequence_group).last_hidden_state
    graph = getattr(backbone, "pack_graph", None)
    hidden = graph(batch) if graph is not None else None
    return run_backbone(backbone, batch).last_hidden_state if hidden is None else hidden


def run_backbone(model: nn.Module, batch: TokenBatch, sequence_group: SequenceGroup | None = None) -> Any:
    """Return the output of a transformers model, with or without its head, for a batch or this rank's part of it.

    No padding mask is passed: padding is on the right, where causal attention never looks.
    """
    part: TokenBatch | SequencePart | SharedPrompts = batch if batch.shared is None else batch.shared
    if sequence_group is None:
        arguments = packed_arguments(batch, model.config._attn_implementation)
    else:
        part = sequence_group.part_of(batch)
        arguments = {"attention_mask": NO_MASK, "sequence_group": sequence_group}
        arguments |= bounds_arguments(part.cu_seqlens, part.longest)
    base = getattr(model, "base_model", model)
    if (replay := getattr(base, "router_replay", None)) is not None:
        replay.begin_pass(part.routes)
    watch = getattr(base, "router_watch", None) if model.training else None
    if watch is not None:
        arguments["output_router_logits"] = True
    with forwarding(batch):
        output = model(input_ids=part.input_ids, position_ids=part.position_ids, use_cache=False, **arguments)
    if watch is not None:
        watch.see(getattr(output, "router_logits", None), part)
    return output
