"""Attention over packed sequences without a mask, registered with transformers.

Each sequence attends only to itself, causally. On CUDA this is torch's varlen kernel under the name `rlhf_packed`, and
FlashAttention 4 under the name `rlhf_packed_4`, which "auto" takes where it is faster. Where no kernel can run, each
sequence gets its own call of scaled_dot_product_attention: the same arithmetic in more launches.
"""

import functools
import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from rlhf_data.errors import ConfigError
from rlhf_models.attention.flash import flash_4_is_faster, flash_4_unavailable_reason
from rlhf_models.attention.scored import SCORED_ATTENTION, UNPACKED, check_window, scored_attention
from rlhf_models.attention.sequence_parallel import SequenceGroup, layer_configs
from rlhf_models.attention.shared_prompts import Copies, Layout, attend, attend_group_by_group, bounds_arguments
from rlhf_models.attention.states_apart import STATEFUL_LAYERS, stateful_layers
from rlhf_models.batch import TokenBatch

logger = logging.getLogger(__name__)

PACKED_ATTENTION, PACKED_ATTENTION_4 = "rlhf_packed", "rlhf_packed_4"
PACKED_ATTENTIONS = (PACKED_ATTENTION, PACKED_ATTENTION_4)
# Passed in place of a mask: without one, transformers searches the positions for sequences and waits for the device.
NO_MASK = torch.empty(1, 1, 0, 0)
_UNEQUAL_HEADS = "its heads of keys and values must have the same size"
_PACKABLE_LAYERS = {"full_attention", "sliding_attention", "attention", "mlp", "moe"} | STATEFUL_LAYERS
Heads = tuple[Tensor, Tensor, Tensor]  # query, key and value of a layer
_kernel: dict[str, Any] = {}  # torch's varlen attention and its parameter names, filled in when it is known to run
_forwarding_packed: ContextVar[bool] = ContextVar("forwarding_packed", default=False)


def choose_attention(config: Any, attn_implementation: str, *, packing: bool) -> str:
    """Return the attention implementation to load a model with.

    "auto" is "rlhf_packed" if batches will be packed, in whose place `packed_attention_here` may take "rlhf_packed_4"
    when a model is loaded, else torch's "sdpa". For a family whose scores "sdpa" cannot compute, it is
    "rlhf_packed_scored" if batches will be packed, else "eager"; and "eager" in both cases if the family has its own
    code of attention. Any other name that transformers knows is kept; "sdpa" and "eager" then build a [T, T]
    block-diagonal mask for packed batches.

    Raises:
        ConfigError: packing for a model with layers of another kind, such as attention in chunks; "sdpa" or a packed
            attention by name for a model whose scores have soft caps or sinks.
    """
    register_packed_attention()
    layers = set(getattr(config.get_text_config(), "layer_types", None) or ()) - _PACKABLE_LAYERS
    if packing and layers:
        kinds = ", ".join(sorted(layers))
        message = f"a {config.model_type} model cannot be packed: its layers of kind {kinds} cross sequences"
        raise ConfigError(message, hint=UNPACKED)
    if attn_implementation not in ("auto", "sdpa", *PACKED_ATTENTIONS):
        return attn_implementation
    kind = _model_class(config)
    if _has_plain_scores(config, kind):
        return {"auto": PACKED_ATTENTION if packing else "sdpa"}.get(attn_implementation, attn_implementation)
    if attn_implementation != "auto":
        reason = "its attention is more than scaled_dot_product_attention computes, such as soft caps or sinks"
        message = f"a {config.model_type} model cannot use the attention {attn_implementation}: {reason}"
        raise ConfigError(message, hint="use auto or eager")
    return SCORED_ATTENTION if packing and kind is not None and kind._supports_attention_backend else "eager"


def _has_plain_scores(config: Any, kind: Any) -> bool:
    """Return whether transformers lets torch's scaled_dot_product_attention compute the attention of a family.

    Some versions do for scores with soft caps, and leave the cap out.
    """
    if getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None:
        return False
    return kind is None or bool(kind._supports_sdpa)


def _model_class(config: Any) -> Any:
    """Return transformers' class of a family, or None if it has none."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING):
        kind = mapping.get(type(config), None)
        if kind is not None:
            return kind[0] if isinstance(kind, tuple) else kind
    return None


def packed_attention_here(config: Any, attn_implementation: str, dtype: torch.dtype) -> str:
    """Return the packed attention of a model of this dtype in this process, whose GPU it asks.

    It is the named one, and for "auto" FlashAttention 4 where that was measured to be faster. In float32, each runs
    sequence by sequence.

    Raises:
        ConfigError: FlashAttention 4 is named, and this GPU, this installation or the model's heads do not allow it.
    """
    of_keys, of_values = head_sizes(config)
    if attn_implementation == "auto":
        is_faster = dtype in (torch.bfloat16, torch.float16) and of_keys == of_values and flash_4_is_faster(of_keys)
        return PACKED_ATTENTION_4 if is_faster else PACKED_ATTENTION
    if attn_implementation == PACKED_ATTENTION_4:
        reason = _UNEQUAL_HEADS if of_keys != of_values else flash_4_unavailable_reason(of_keys)
        if reason is not None:
            message = f"{attn_implementation} is FlashAttention 4: {reason}"
            raise ConfigError(message, hint="leave ``attn_implementation`` at auto")
    return attn_implementation


def head_sizes(config: Any) -> tuple[int, int]:
    """Return the sizes of the heads of queries and keys, and of those of values, in the layer with the largest."""
    text = config.get_text_config()
    if getattr(text, "qk_rope_head_dim", None):  # latent attention, whose config may call a part of a head `head_dim`
        return text.qk_nope_head_dim + text.qk_rope_head_dim, text.v_head_dim
    layers = layer_configs(config)
    largest = max(getattr(own, "head_dim", None) or own.hidden_size // own.num_attention_heads for own in layers)
    return largest, largest


def check_shares_prompts(config: Any, attention: str) -> None:
    """Raise ConfigError unless the layers of a transformers model can share the prompts of packed sequences."""
    if stateful_layers(config):
        message = f"a {config.model_type} model cannot share prompts: its layers carry a state from token to token"
        raise ConfigError(message, hint="drop ``share_prompts``")
    if attention not in (*PACKED_ATTENTIONS, SCORED_ATTENTION):
        message = f"prompts are shared by the attention {PACKED_ATTENTION}, not by {attention}"
        raise ConfigError(message, hint="leave ``attn_implementation`` at auto, or drop ``share_prompts``")


@functools.cache
def register_packed_attention() -> None:
    """Make the attentions of this module known to transformers in this process."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask, sdpa_mask

    def scored_mask(*args: Any, **kwargs: Any) -> Tensor | None:
        return None if _forwarding_packed.get() else eager_mask(*args, **kwargs)

    def mask(*args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
        # Called for batches that are not packed, such as those of `generate`, which use plain SDPA.
        return None if attention_mask is None else sdpa_mask(*args, attention_mask=attention_mask, **kwargs)

    AttentionInterface.register(PACKED_ATTENTION, packed_attention)
    AttentionInterface.register(PACKED_ATTENTION_4, functools.partial(packed_attention, version=4))
    for name in PACKED_ATTENTIONS:
        AttentionMaskInterface.register(name, mask)
    AttentionInterface.register(SCORED_ATTENTION, scored_attention)
    AttentionMaskInterface.register(SCORED_ATTENTION, scored_mask)


def packed_arguments(batch: TokenBatch, attention: str) -> dict[str, Any]:
    """Return the keyword arguments that make transformers pass a packed batch's bounds to this attention."""
    if not batch.is_packed:
        return {}
    if batch.shared is not None:
        return {"attention_mask": NO_MASK} | batch.shared.arguments()
    mask = {"attention_mask": NO_MASK} if attention in (*PACKED_ATTENTIONS, SCORED_ATTENTION) else {}
    return mask | bounds_arguments(batch.cu_seqlens, max(batch.lengths))


@contextmanager
def forwarding(batch: TokenBatch) -> Iterator[None]:
    """Make attention raise ConfigError if it should receive the bounds of packed sequences and does not."""
    token = _forwarding_packed.set(batch.is_packed)
    try:
        yield
    finally:
        _forwarding_packed.reset(token)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    sequence_group: SequenceGroup | None = None,
    prompt_bounds: Tensor | None = None,
    prompt_copies: Copies | None = None,
    version: int = 2,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend within each packed sequence; the signature is that of transformers' attention functions.

    Args:
        module: the attention layer.
        query: [1, H, T, D].
        key: [1, K, T, D], K dividing H.
        value: [1, K, T, D].
        attention_mask: mask of a batch that is not packed. Ignored for packed batches.
        scaling: factor of the scores; None means D ** -0.5.
        dropout: probability, applied to the attention weights.
        sliding_window: number of tokens a token sees, itself included; None means all.
        cu_seq_lens_q: [S + 1] int32, the bounds; None for a batch that is not packed.
        max_length_q: length of the longest sequence.
        sequence_group: the ranks that divide the T tokens of the batch; `query`, `key`, `value` and the output are then
            those of this rank's tokens. None if it has all of them.
        prompt_bounds, prompt_copies: see `SharedPrompts`; None if each sequence has its own prompt.
        version: FlashAttention's version, 2 or 4. Layers with a sliding window take 2.
        kwargs: further arguments of transformers, and of `shared_prompts.attend`.

    Returns:
        The output [1, T, H, D], and None in place of the attention weights.

    Raises:
        ConfigError: a model with soft-capped scores or attention sinks, or one that does not pass on the bounds.
    """
    if cu_seq_lens_q is None:
        kwargs |= {"scaling": scaling, "dropout": dropout, "sliding_window": sliding_window}
        return _unpacked_attention(module, query, key, value, attention_mask, **kwargs)
    for name, what in (("softcap", "a soft cap"), ("s_aux", "sinks")):
        if kwargs.get(name) is not None:
            raise ConfigError(f"attention with {what} cannot be packed", hint=UNPACKED)
    check_window(module, sliding_window)
    how = _Scores(scaling, dropout, sliding_window, version)
    if prompt_copies is not None and sliding_window:
        output = _attend(prompt_copies.of(query, key, value), prompt_copies.bounds, prompt_copies.longest, how)
        return output[:, prompt_copies.kept], None
    if prompt_bounds is not None:
        own = {"bounds": cu_seq_lens_q, "longest": max_length_q, "prompt_bounds": prompt_bounds}
        layout = Layout(**own, **{name: kwargs[name] for name in Layout._fields if name not in own})
        return _attend_shared((query, key, value), layout, how), None
    if sequence_group is not None:
        query, key, value = (sequence_group.to_heads(tensor) for tensor in (query, key, value))
    output = _attend((query, key, value), cu_seq_lens_q, max_length_q, how)
    return output if sequence_group is None else sequence_group.to_tokens(output), None


class _Scores(NamedTuple):
    """How the scores of an attention layer become weights; see `packed_attention`."""

    scaling: float | None
    dropout: float
    sliding_window: int | None
    version: int


def _attend(tensors: Heads, cu_seqlens: Tensor, longest: int | None, how: _Scores) -> Tensor:
    """Return the output of `packed_attention` by the kernel, or sequence by sequence where it cannot run."""
    if not _has_kernel(tensors, how.dropout):
        return _sequence_by_sequence(*tensors, cu_seqlens, how)
    if longest is None:
        longest = int(cu_seqlens.diff().max())
    query, key, value = (tensor[0].transpose(0, 1) for tensor in tensors)
    if how.version == 4 and not how.sliding_window:
        none_shared = Layout(cu_seqlens, cu_seqlens, cu_seqlens, 0, longest, 0, 0)
        return attend(query, key, value, none_shared, scale=how.scaling, version=4)[None]
    return _varlen(query, key, value, cu_seqlens, longest, how)


def _attend_shared(tensors: Heads, layout: Layout, how: _Scores) -> Tensor:
    """Do as `_attend` for sequences that share prompts."""
    if how.dropout:
        raise ConfigError("attention with dropout cannot share prompts", hint="drop ``share_prompts``")
    if not _has_kernel(tensors, how.dropout):
        return attend_group_by_group(*tensors, layout, scale=how.scaling)
    query, key, value = (tensor[0].transpose(0, 1) for tensor in tensors)
    return attend(query, key, value, layout, scale=how.scaling, version=how.version)[None]


def _has_kernel(tensors: Heads, dropout: float) -> bool:
    """Return whether torch's varlen attention can take such tensors. Where it cannot, say so once."""
    query, _, value = tensors
    if torch.compiler.is_compiling() and query.is_cuda:
        # `compile_unavailable_reason` has already checked that the kernel runs, and its cached check cannot be traced.
        return True
    reason = varlen_unavailable_reason(query.device, query.dtype, query.shape[-1], dropout)
    if reason is None and query.shape[-1] != value.shape[-1]:
        reason = _UNEQUAL_HEADS
    if reason is not None:
        _log_fallback_once(reason, logging.WARNING if query.is_cuda else logging.INFO)
    return reason is None


@functools.cache
def varlen_unavailable_reason(device: torch.device, dtype: torch.dtype, head_dim: int, dropout: float) -> str | None:
    """Return why torch's varlen attention cannot take such a call, or None if it can."""
    if device.type != "cuda":
        return f"it runs on CUDA, the model is on {device.type}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bfloat16 and float16, the model computes in {dtype}"
    if dropout:
        return f"it has no dropout, the model's is {dropout}"
    if head_dim > 256 or head_dim % 8:
        return f"its head size must be a multiple of 8 and at most 256, the model's is {head_dim}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"it needs compute capability 8.0, the GPU has {torch.cuda.get_device_capability(device)}"
    try:
        from torch.nn.attention.varlen import varlen_attn  # imported here because the import takes seconds
    except ImportError as error:
        return f"torch {torch.__version__} has none ({error})"
    _kernel.update(function=varlen_attn, parameters=frozenset(inspect.signature(varlen_attn).parameters))
    return None


@functools.cache
def _log_fallback_once(reason: str, level: int) -> None:
    logger.log(level, "packed attention runs sequence by sequence instead of as torch's varlen kernel: %s", reason)


def _unpacked_attention(module: nn.Module, *tensors: Any, **kwargs: Any) -> tuple[Tensor, None]:
    if _forwarding_packed.get():
        message = f"{type(module).__name__} does not receive the bounds of packed sequences and would mix them"
        raise ConfigError(message, hint=UNPACKED)
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward(module, *tensors, **kwargs)


def _varlen(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, longest: int, how: _Scores) -> Tensor:
    """Call the kernel with the arguments of the installed torch: older versions have `is_causal` and no window."""
    parameters = _kernel["parameters"]
    options: dict[str, Any] = {}
    if "window_size" in parameters:
        options["window_size"] = (how.sliding_window - 1 if how.sliding_window else -1, 0)
    elif how.sliding_window and longest > how.sliding_window:
        hint = f"{UNPACKED}, or use a newer torch"
        raise ConfigError(f"varlen attention of torch {torch.__version__} has no sliding window", hint=hint)
    else:
        options["is_causal"] = True
    if "scale" in parameters:
        options["scale"] = how.scaling
    elif how.scaling is not None:
        # The kernel scales by D ** -0.5 itself.
        query = query * (how.scaling * query.shape[-1] ** 0.5)
    if "enable_gqa" in parameters:  # versions without this parameter take grouped heads as they are
        options["enable_gqa"] = key.shape[1] != query.shape[1]
    return _kernel["function"](query, key, value, cu_seqlens, cu_seqlens, longest, longest, **options)[None]


def _sequence_by_sequence(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, how: _Scores) -> Tensor:
    lengths = cu_seqlens.diff().tolist()
    groups = query.shape[1] // key.shape[1]
    if query.is_cuda and groups > 1:  # SDPA's memory-efficient kernel refuses grouped heads
        key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    outputs = []
    # A causal mask without a window is a flag of SDPA and takes no memory; a window needs a mask [length, length].
    for q, k, v in zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)), strict=True):
        window = _window_mask(q.shape[2], how.sliding_window, q.device)
        options = {"attn_mask": window, "is_causal": window is None, "dropout_p": how.dropout, "scale": how.scaling}
        outputs.append(scaled_dot_product_attention(q, k, v, enable_gqa=True, **options).transpose(1, 2))
    return torch.cat(outputs, dim=1)  # contiguous, as the kernels' output is: some families take a view of it


def _window_mask(length: int, sliding_window: int | None, device: torch.device) -> Tensor | None:
    if not sliding_window or length <= sliding_window:
        return None
    seen = torch.ones(length, length, dtype=torch.bool, device=device)
    return seen.tril() & seen.triu(1 - sliding_window)
