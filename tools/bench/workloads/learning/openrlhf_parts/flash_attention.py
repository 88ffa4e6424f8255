"""What OpenRLHF and transformers import from flash-attn, by the kernels in PyTorch.

The attention is PyTorch's build of FlashAttention-2. The rest are plain operations: they move tokens out of padded rows
and back, and compute the log-probs of labels.
"""

import torch
from torch import Tensor
from torch.nn import functional

flash_attn_with_kvcache = None  # of generation, which is vLLM's


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """Return the attention [N, H, D] of sequences that lie one after the other, `cu_seqlens` being their bounds.

    Source: Dao 2023, arXiv:2307.08691.
    """
    lengths = (cu_seqlens_q, cu_seqlens_k, int(max_seqlen_q), int(max_seqlen_k))
    return torch.ops.aten._flash_attention_forward(q, k, v, *lengths, dropout_p, causal, False, scale=softmax_scale)[0]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """Return the attention [B, T, H, D] of sequences of one length."""
    return flash_attn_varlen_func(q, k, v, None, None, q.shape[1], k.shape[1], dropout_p, softmax_scale, causal)


def index_first_axis(rows: Tensor, indices: Tensor) -> Tensor:
    """Return some of the rows."""
    return rows[indices]


def unpad_input(padded: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Return the tokens [N, ...] of rows [B, T, ...], their places in the rows, the bounds and most tokens of a row."""
    counts = mask.sum(dim=1, dtype=torch.int32)
    indices = mask.flatten().nonzero().flatten()
    bounds = functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
    return padded.flatten(0, 1)[indices], indices, bounds, int(counts.max()), counts


def pad_input(tokens: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Return rows [B, T, ...] with the tokens at their places, and 0 elsewhere."""
    rows = tokens.new_zeros(batch * seqlen, *tokens.shape[1:])
    return rows.index_copy(0, indices, tokens).unflatten(0, (batch, seqlen))


def cross_entropy_loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, None]:
    """Return -log p of each label, [N]."""
    return functional.cross_entropy(logits, labels, reduction="none"), None


def all_gather(*_: object) -> Tensor:
    """Raise: it is for ring attention."""
    raise NotImplementedError("ring attention")
