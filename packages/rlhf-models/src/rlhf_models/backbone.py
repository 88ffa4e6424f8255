"""Forward passes of a transformers model over a `TokenBatch`."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_data.errors import ConfigError
from rlhf_models.attention.packed import (
    NO_MASK,
    PACKED_ATTENTION,
    PACKED_ATTENTIONS,
    UNPACKED,
    choose_attention,
    forwarding,
    packed_arguments,
)
from rlhf_models.attention.scored import SCORED_ATTENTION
from rlhf_models.attention.sequence_parallel import SequenceGroup, SequencePart, check_heads
from rlhf_models.attention.shared_prompts import SharedPrompts, bounds_arguments
from rlhf_models.attention.states_apart import keep_states_apart
from rlhf_models.batch import TokenBatch
from rlhf_models.fast.pack_graph import PackGraph, can_be_replayed
from rlhf_models.images import image_arguments, showing

# Families whose packed log-probs `tests/families` compares with those of each sequence alone.
_EXAMINED = """
afmoe apertus arcee bamba bitnet cohere cohere2 cwm deepseek_v2 deepseek_v3 diffllama dots1 ernie4_5 ernie4_5_moe
exaone4 falcon_h1 gemma gemma2 gemma3_text gemma3n_text gemma4_text glm glm4 glm4_moe glm4_moe_lite gpt2 gpt_bigcode
gpt_neox gpt_oss gptj granite granitemoe helium hunyuan_v1_dense hy_v3 internlm3 jamba lfm2 llama mamba mamba2
mimo_v2_flash minicpm3 minimax_m2 ministral ministral3 mistral mixtral nanochat nemotron_h olmo olmo2 olmo3 olmoe opt
phi phi3 qwen2 qwen3 qwen3_5_text qwen3_moe qwen3_next seed_oss smollm3 solar_open starcoder2 vaultgemma youtu zamba2
"""
PACKED_FAMILIES = frozenset(_EXAMINED.split())
# Relative bounds of the distance between equal states. Those of mixed sequences differ by about 1 in a trained model,
# and by 0.003 in a small one with random weights.
_MAX_DISTANCE, _MAX_DISTANCE_IN_HALF = 1e-3, 0.1


def divide_sequences(model: nn.Module, group: SequenceGroup) -> None:
    """Have the ranks of `group` divide the tokens of every batch of an actor, critic or reward model.

    Raises ConfigError for a model with another attention than `rlhf_packed`, or with heads that cannot be divided.
    """
    config = model.model.config
    check_heads(config, group.size)
    if config._attn_implementation not in PACKED_ATTENTIONS:
        message = f"sequence parallelism needs the attention {PACKED_ATTENTION}, not {config._attn_implementation}"
        hint = "leave ``attn_implementation`` at auto, and add ``packing``; no model with a soft cap or sinks has it"
        raise ConfigError(message, hint=hint)
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


@torch.no_grad()
def check_packs(model: nn.Module) -> None:
    """Have a loaded model keep packed sequences apart, and check that it does, by a pass over two short ones.

    Models of `PACKED_FAMILIES`, which are known to keep them apart, and those whose attention needs a GPU are not run.

    Args:
        model: a model of transformers, with or without its head, on the CPU and in eval mode.

    Raises:
        ConfigError: the model mixes packed sequences, or cannot run them.
    """
    attention = model.config._attn_implementation
    kind = model.config.get_text_config().model_type
    if not keep_states_apart(model):
        raise ConfigError(f"a {kind} model cannot be packed: its layers carry a state over sequences", hint=UNPACKED)
    if attention in (*PACKED_ATTENTIONS, SCORED_ATTENTION) and kind in PACKED_FAMILIES:
        return
    backbone = getattr(model, "base_model", model)
    if attention not in (*PACKED_ATTENTIONS, SCORED_ATTENTION, "sdpa", "eager"):
        return
    sequences = [[1, 2, 3], [4, 5, 6]]
    reason = "it mixes packed sequences"
    try:
        apart = [last_hidden_state(backbone, TokenBatch.padded([sequence], 0)) for sequence in sequences]
        together = last_hidden_state(backbone, TokenBatch.packed(sequences))
        bound = _MAX_DISTANCE if together.dtype == torch.float32 else _MAX_DISTANCE_IN_HALF
        is_same = _distance(together, torch.cat(apart, dim=1)) < bound
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:  # its code expects another mask
        is_same = False
        reason = f"{type(error).__name__}: {error}"
    if not is_same:
        message = f"a {kind} model with the attention {attention} cannot be packed: {reason}"
        hint = UNPACKED
        if attention == "sdpa" or (
            attention == "eager" and choose_attention(model.config, "auto", packing=True) != "eager"
        ):
            hint = "leave ``attn_implementation`` at auto"
        raise ConfigError(message, hint=hint)


@torch.no_grad()
def changes_logits(model: nn.Module) -> bool:
    """Return whether a causal language model changes its LM head's output, for example by a soft cap or a scale.

    Only the head and what follows it run, on hidden states [1, 2, D] from -100 to 100. A model on the meta device has
    no values to compare and gives False.
    """
    head = model.get_output_embeddings()
    if head.weight.is_meta:
        return False
    # Large enough that a soft cap shows.
    hidden = torch.linspace(-100, 100, 2 * head.weight.shape[1]).view(1, 2, -1).to(head.weight)
    backbone = model.base_model
    own = vars(backbone).get("forward")
    backbone.forward = lambda *args, **kwargs: _Layers(hidden)
    try:
        logits = model(input_ids=torch.zeros(1, 2, dtype=torch.long, device=hidden.device)).logits
    except (RuntimeError, ValueError, TypeError, AttributeError):  # a family that reads more of its layers' output
        return True
    finally:
        # Bound to the model as an attribute of it, the method of its class would keep the model's memory.
        del backbone.forward
        if own is not None:
            backbone.forward = own
    return not torch.equal(logits.to(hidden.dtype), head(hidden))


class _Layers:
    """The output of a model's layers: hidden states, and nothing else."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).float().norm() / other.float().norm())


def run_backbone(model: nn.Module, batch: TokenBatch, sequence_group: SequenceGroup | None = None) -> Any:
    """Return the output of a transformers model, with or without its head, for a batch or this rank's part of it.

    No padding mask is passed: padding is on the right, where causal attention never looks.
    """
    base = getattr(model, "base_model", model)
    if batch.images is None and hasattr(base, "blank_image"):
        # Ranks gather weights, and reduce gradients, of the same layers, whatever is in their batches. The blank image
        # is in a sequence of its own, whose output is left out.
        output = run_backbone(model, batch.with_last(*base.blank_image), sequence_group)
        num_rows, num_tokens = batch.input_ids.shape
        for name in {"last_hidden_state", "logits"} & output.keys():
            output[name] = output[name][:num_rows, :num_tokens]
        return output
    part: TokenBatch | SequencePart | SharedPrompts = batch if batch.shared is None else batch.shared
    if sequence_group is None:
        arguments = packed_arguments(batch, model.config._attn_implementation)
    else:
        part = sequence_group.part_of(batch)
        arguments = {"attention_mask": NO_MASK, "sequence_group": sequence_group}
        arguments |= bounds_arguments(part.cu_seqlens, part.longest)
    position_ids = part.position_ids
    if batch.images is not None:
        position_ids, more = image_arguments(base, batch)
        arguments |= more
    if (apart := getattr(base, "states_apart", None)) is not None:
        apart.begin_pass(batch)
    if (replay := getattr(base, "router_replay", None)) is not None:
        replay.begin_pass(part.routes)
    watch = getattr(base, "router_watch", None) if model.training else None
    if watch is not None:
        arguments["output_router_logits"] = True
    with forwarding(batch), showing(base, batch.shown):
        output = model(input_ids=part.input_ids, position_ids=position_ids, use_cache=False, **arguments)
    if watch is not None:
        watch.see(getattr(output, "router_logits", None), part)
    return output
