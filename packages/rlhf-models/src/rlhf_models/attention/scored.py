"""Packed attention whose scores are more than scaled products: with a soft cap (Gemma 2), or with sinks (gpt-oss).

A soft cap c turns a score s into c * tanh(s / c). A sink is a learned score of each head that takes part in the softmax
and has no value. As in `packed`, each sequence attends only to itself, causally. On CUDA, torch's flex attention
computes all of them, elsewhere each is computed by itself.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout as drop
from torch.utils.weak import WeakIdKeyDictionary

from rlhf_data.errors import ConfigError
from rlhf_models.attention.compiler import configure_compiler
from rlhf_models.attention.shared_prompts import Copies

SCORED_ATTENTION = "rlhf_packed_scored"
UNPACKED = "turn packing off, with ``packing=false``"  # a hint
_BLOCK = 128  # tokens per block of flex attention's masks
# Masks by window, for each tensor of bounds: all layers of a pass get the same tensor.
_block_masks = WeakIdKeyDictionary()


class Scores(NamedTuple):
    """How the scores of a layer become weights.

    Attributes:
        scaling: factor of the products; None means D ** -0.5.
        soft_cap: bound of the scores; None means none.
        sinks: [H], scores without a value; None means none.
        window: number of tokens a token sees, itself included; None means all.
        dropout: probability, applied to the weights.
    """

    scaling: float | None = None
    soft_cap: float | None = None
    sinks: Tensor | None = None
    window: int | None = None
    dropout: float = 0.0


def scored_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    prompt_copies: Copies | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend within each packed sequence; the signature is that of transformers' attention functions.

    Args:
        module: the attention layer.
        query: [B, H, T, D]; B is 1 for a packed batch.
        key: [B, K, T', D], K dividing H.
        value: [B, K, T', D'].
        attention_mask: [B, 1, T, T'] added to the scores of a batch that is not packed; ignored for packed ones.
        scaling, dropout, sliding_window, softcap, s_aux: see `Scores`. A mask has the window already.
        cu_seq_lens_q: [S + 1] int32, the bounds; None for a batch that is not packed.
        prompt_copies: of the prompts that packed sequences share; None if each has its own.

    Returns:
        The output [B, T, H, D'], and None in place of the attention weights.

    Raises:
        ConfigError: a packed batch, and a layer that has its sliding window in a mask.
    """
    scores = Scores(scaling, softcap, s_aux, sliding_window, dropout)
    if cu_seq_lens_q is None:
        return attend(query, key, value, scores, attention_mask).transpose(1, 2).contiguous(), None
    check_window(module, sliding_window)
    if prompt_copies is not None:
        output = _packed(*prompt_copies.of(query, key, value), prompt_copies.bounds, scores)
        return output[:, prompt_copies.kept], None
    return _packed(query, key, value, cu_seq_lens_q, scores), None


def _packed(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, scores: Scores) -> Tensor:
    """Return the output [1, T, H, D'] of packed sequences with these bounds."""
    if _has_kernel(query, value, scores.dropout):
        return _flex(query, key, value, bounds, scores).transpose(1, 2).contiguous()
    lengths = bounds.diff().tolist()
    sequences = zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)), strict=True)
    outputs = [attend(q, k, v, scores, _causal(q, scores.window)).transpose(1, 2) for q, k, v in sequences]
    return torch.cat(outputs, dim=1)


def check_window(module: nn.Module, sliding_window: int | None) -> None:
    """Raise ConfigError if an attention layer has a sliding window by its config and does not pass it on."""
    if sliding_window or torch.compiler.is_compiling():
        return
    text = module.config.get_text_config() if hasattr(module, "config") else None
    layers = getattr(text, "layer_types", None)
    has_window = not layers or layers[module.layer_idx] == "sliding_attention"
    if has_window and getattr(text, "sliding_window", None):
        message = f"{type(module).__name__} has its sliding window in a mask, and packed sequences have no mask"
        raise ConfigError(message, hint=UNPACKED)


def attend(query: Tensor, key: Tensor, value: Tensor, scores: Scores, mask: Tensor | None) -> Tensor:
    """Return the attention output [B, H, T, D'] of the scores plus `mask`; the softmax is in float32."""
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    scaling = query.shape[-1] ** -0.5 if scores.scaling is None else scores.scaling
    values = query @ key.mT * scaling
    if scores.soft_cap is not None:
        values = scores.soft_cap * torch.tanh(values / scores.soft_cap)
    if mask is not None:
        values = values + mask
    if scores.sinks is not None:
        sinks = scores.sinks.to(values.dtype).view(1, -1, 1, 1).expand(*values.shape[:3], 1)
        values = torch.cat([values, sinks], dim=-1)
    weights = values.softmax(dim=-1, dtype=torch.float32).to(query.dtype)[..., : key.shape[2]]
    return drop(weights, scores.dropout, training=scores.dropout > 0) @ value


def _has_kernel(query: Tensor, value: Tensor, dropout: float) -> bool:
    """Return whether flex attention takes such tensors: on CUDA, without dropout, with heads of 16, 32, 64, ..."""
    sizes = (query.shape[-1], value.shape[-1])
    return query.is_cuda and not dropout and all(size >= 16 and size & (size - 1) == 0 for size in sizes)


def _causal(query: Tensor, window: int | None) -> Tensor:
    """Return 0 [T, T] where a token sees another one, and the lowest number of the dtype elsewhere."""
    length = query.shape[2]
    unseen = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    if window:
        unseen |= torch.ones_like(unseen).tril(-window)
    return query.new_zeros(length, length).masked_fill(unseen, torch.finfo(query.dtype).min)


def _flex(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, scores: Scores) -> Tensor:
    """Return the output [1, H, T, D'] by flex attention."""
    from torch.nn.attention.flex_attention import AuxRequest

    groups = query.shape[1] // key.shape[1]
    if groups & (groups - 1):  # the kernel wants a power of two
        key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))

    def capped(score: Tensor, *_: Tensor) -> Tensor:
        return scores.soft_cap * torch.tanh(score / scores.soft_cap)

    output, aux = _compiled_flex()(
        query,
        key,
        value,
        score_mod=None if scores.soft_cap is None else capped,
        block_mask=_block_mask(bounds, query.shape[2], scores.window),
        scale=scores.scaling,
        enable_gqa=query.shape[1] != key.shape[1],
        return_aux=AuxRequest(lse=True),
        # For fewer than 128 tokens, another kernel would be taken, which some versions of torch cannot make.
        kernel_options={"FORCE_USE_FLEX_ATTENTION": True},
    )
    if scores.sinks is None:
        return output
    # Without sinks, the weights have exp(lse) as their denominator; with them, exp(lse) + exp(sink).
    share = torch.sigmoid(aux.lse - scores.sinks.float().view(1, -1, 1))
    return output * share[..., None].to(output.dtype)


@functools.cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    configure_compiler()
    return torch.compile(flex_attention)  # with dynamic=True, a soft cap becomes a tensor, which is refused


def _block_mask(bounds: Tensor, num_tokens: int, window: int | None) -> Any:
    """Return flex attention's mask of packed sequences. Layers of one pass share it."""
    masks = _block_masks.setdefault(bounds, {})
    if window not in masks:
        masks[window] = _new_block_mask(bounds, num_tokens, window)
    return masks[window]


def _new_block_mask(bounds: Tensor, num_tokens: int, window: int | None) -> Any:
    """Return the mask without comparing all pairs of tokens, as torch's `create_block_mask` does in 3 T^2 bytes.

    Token t sees the tokens from first[t] to t, and first[t] never falls. Hence the tokens of a block see those from
    its first one's first to its last one, and all of its tokens see those from its last one's first to its first one.
    """
    from torch.nn.attention.flex_attention import BlockMask

    tokens = torch.arange(num_tokens, device=bounds.device, dtype=bounds.dtype)
    first = bounds[torch.bucketize(tokens, bounds[1:], right=True)]
    if window:
        first = torch.maximum(first, tokens - window + 1)
    starts = tokens[::_BLOCK]
    ends = (starts + _BLOCK - 1).clamp(max=num_tokens - 1)
    sees_some = (ends >= first[starts, None]) & (starts <= ends[:, None])
    # Positions beyond the last token see none, so a block that has some is never whole.
    is_whole = (ends - starts == _BLOCK - 1)[:, None]
    sees_all = is_whole & (starts >= first[ends, None]) & (ends <= starts[:, None])

    def sees(_batch: Tensor, _head: Tensor, at: Tensor, seen: Tensor) -> Tensor:
        return (at >= seen) & (seen >= first[at])

    return BlockMask.from_kv_blocks(
        *_in_order(sees_some & ~sees_all),
        *_in_order(sees_all),
        BLOCK_SIZE=_BLOCK,
        mask_mod=sees,
        seq_lengths=(num_tokens, num_tokens),
    )


def _in_order(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of True blocks in each row of [N, N], as [1, 1, N], and the blocks of each row, True first."""
    order = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None, None], order.int()[None, None]
