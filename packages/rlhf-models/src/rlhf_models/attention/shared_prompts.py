"""Packed sequences whose common prompt is stored once: its layout, and attention over it.

The responses to one prompt attend to the same prompt, so that its tokens need to pass through the layers only once. All
prompts are stored first, end to end, then all responses, those of a prompt next to each other. A response attends to
itself causally and to its whole prompt; `merge_attention_` makes one attention of the two.

Gradients of keys and values of a prompt add up over its responses, so that outputs and gradients are those of sequences
that each have a copy of their prompt, up to rounding.

Attention with a sliding window, a soft cap or sinks takes `Copies` of the prompts: all else of a layer runs once for
each stored token.
"""

from bisect import bisect_right
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rlhf_kernels import merge_attention_
from rlhf_models.attention import flash


class Layout(NamedTuple):
    """Where the prompts and responses of a packed batch of S sequences with G different prompts are stored.

    Attributes:
        bounds: [G + S + 1] int32, of all prompts and then all responses.
        prompt_bounds: [G + 1] int32, of the prompts.
        group_bounds: [G + 1] int32, of the responses to each prompt, counted from the first response.
        num_prompt_tokens: number of tokens of all prompts together.
        longest: tokens of the longest prompt or response.
        longest_prompt: tokens of the longest prompt.
        longest_group: tokens of all responses to one prompt, at most. If it is 0, no prompts are shared, and attention
            reads `bounds` and `longest` only.
    """

    bounds: Tensor
    prompt_bounds: Tensor
    group_bounds: Tensor
    num_prompt_tokens: int
    longest: int
    longest_prompt: int
    longest_group: int


class Copies(NamedTuple):
    """How the U stored tokens become the T tokens of S sequences that each have their prompt, and back.

    Attributes:
        stored_at: [T] int64, the index among stored tokens of each token of the batch.
        kept: [U] int64, the index among all tokens of one copy of each stored token.
        bounds: [S + 1] int32, of the sequences.
        longest: tokens of the longest sequence.
    """

    stored_at: Tensor
    kept: Tensor
    bounds: Tensor
    longest: int

    def of(self, *heads: Tensor) -> tuple[Tensor, ...]:
        """Return tensors [1, H, T, D] of [1, H, U, D]."""
        return tuple(tensor[:, :, self.stored_at] for tensor in heads)


@dataclass(frozen=True, slots=True)
class SharedPrompts:
    """How a packed batch of S sequences with G different prompts is stored in U tokens.

    Attributes:
        input_ids, position_ids: [1, U] int64, of the stored tokens. The positions of a response go on from its prompt.
        copies: where each of the T tokens of the batch is stored.
        layout: where the U tokens lie.
    """

    input_ids: Tensor
    position_ids: Tensor
    copies: Copies
    layout: Layout

    @classmethod
    def of(cls, sequences: Sequence[Any], prompt_lengths: Sequence[int]) -> "SharedPrompts":
        """Store each different prompt of `sequences` once. The tensors are on the CPU.

        Args:
            sequences: token ids, at least one each.
            prompt_lengths: the number of tokens with which each sequence begins that may be shared, at least one.
        """
        groups: dict[Hashable, list[int]] = {}
        rows = [np.asarray(sequence, np.int64) for sequence in sequences]
        for row, (tokens, length) in enumerate(zip(rows, prompt_lengths, strict=True)):
            groups.setdefault(tokens[:length].tobytes(), []).append(row)
        order = [row for members in groups.values() for row in members]
        prompts = [rows[members[0]][: prompt_lengths[members[0]]] for members in groups.values()]
        responses = [rows[row][prompt_lengths[row] :] for row in order]
        group_sizes = [sum(len(rows[row]) - prompt_lengths[row] for row in members) for members in groups.values()]
        prompt_bounds = [0, *accumulate(map(len, prompts))]
        bounds = [0, *accumulate(map(len, [*prompts, *responses]))]
        places: dict[int, np.ndarray] = {}
        starts = iter(bounds[len(prompts) :])
        for start, members in zip(prompt_bounds, groups.values(), strict=False):
            for row in members:
                own = next(starts) + np.arange(len(rows[row]) - prompt_lengths[row])
                places[row] = np.concatenate([start + np.arange(prompt_lengths[row]), own])
        stored_at = np.concatenate([places[row] for row in range(len(rows))])
        kept = np.empty(bounds[-1], np.int64)
        kept[stored_at] = np.arange(len(stored_at))
        lengths = [len(row) for row in rows]
        positions = [np.arange(len(prompt)) for prompt in prompts]
        positions += [np.arange(prompt_lengths[row], len(rows[row])) for row in order]
        return cls(
            input_ids=torch.from_numpy(np.concatenate([*prompts, *responses])[None]),
            position_ids=torch.from_numpy(np.concatenate(positions).reshape(1, -1)),
            copies=Copies(
                stored_at=torch.from_numpy(stored_at),
                kept=torch.from_numpy(kept),
                bounds=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
                longest=max(lengths),
            ),
            layout=Layout(
                bounds=torch.tensor(bounds, dtype=torch.int32),
                prompt_bounds=torch.tensor(prompt_bounds, dtype=torch.int32),
                group_bounds=torch.tensor([0, *accumulate(group_sizes)], dtype=torch.int32),
                num_prompt_tokens=prompt_bounds[-1],
                longest=max(high - low for low, high in pairwise(bounds)),
                longest_prompt=max(map(len, prompts)),
                longest_group=max(group_sizes),
            ),
        )

    def moved(self, move: Callable[[Tensor], Tensor]) -> "SharedPrompts":
        """Return a copy with all tensors moved by `move`."""
        copies, layout = (
            type(parts)(*(move(part) if torch.is_tensor(part) else part for part in parts))
            for parts in (self.copies, self.layout)
        )
        return SharedPrompts(move(self.input_ids), move(self.position_ids), copies, layout)

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments by which attention gets the layout: see `packed_attention`."""
        layout = self.layout._asdict()
        bounds, longest = layout.pop("bounds"), layout.pop("longest")
        return layout | bounds_arguments(bounds, longest) | {"prompt_copies": self.copies}


def bounds_arguments(cu_seqlens: Tensor, longest: int) -> dict[str, Any]:
    """Return bounds [S + 1] and the longest sequence under transformers' names."""
    return {
        "cu_seq_lens_q": cu_seqlens,
        "cu_seq_lens_k": cu_seqlens,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def attend(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, *, scale: float | None, version: int = 2
) -> Tensor:
    """Attend to stored tokens by FlashAttention, on a GPU.

    Args:
        query: [U, H, D] bfloat16 or float16.
        key, value: [U, K, D], K dividing H.
        layout: where prompts and responses lie among the U tokens.
        scale: factor of the scores; None means D ** -0.5.
        version: FlashAttention's version, 2 or 4.

    Returns:
        The output [U, H, D].
    """
    return _attend(query, key, value, *layout, scale, version)[0]


@torch.library.custom_op("rlhf_models::attend_shared_prompts", mutates_args=())
def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    prompt_bounds: Tensor,
    group_bounds: Tensor,
    num_prompt_tokens: int,
    longest: int,
    longest_prompt: int,
    longest_group: int,
    scale: float | None,
    version: int,
) -> tuple[Tensor, Tensor]:
    """Return the output [U, H, D], and the logarithms of the softmax's denominators, [H, U] float32."""
    run = partial(flash.forward, scale=scale, version=version)
    output, lse = run(query, key, value, flash.Lengths(bounds, bounds, longest, longest), causal=True)
    if longest_group:
        own, prompts = slice(num_prompt_tokens, None), slice(None, num_prompt_tokens)
        lengths = flash.Lengths(group_bounds, prompt_bounds, longest_group, longest_prompt)
        other, other_lse = run(query[own], key[prompts], value[prompts], lengths, causal=False)
        merge_attention_(output[own], lse[:, own], other, other_lse)
    return output, lse


@_attend.register_fake
def _(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), query.new_empty(query.shape[1], query.shape[0], dtype=torch.float32)


@torch.library.custom_op("rlhf_models::attend_shared_prompts_backward", mutates_args=())
def _attend_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    bounds: Tensor,
    prompt_bounds: Tensor,
    group_bounds: Tensor,
    num_prompt_tokens: int,
    longest: int,
    longest_prompt: int,
    longest_group: int,
    scale: float | None,
    version: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value."""
    run = partial(flash.backward, scale=scale, version=version)
    # Each call gets the output and the denominators of the whole attention: its gradients are then its part of them.
    tensors = (gradient, query, key, value, output, lse)
    of_query, of_key, of_value = run(*tensors, flash.Lengths(bounds, bounds, longest, longest), causal=True)
    if longest_group:
        own, prompts = slice(num_prompt_tokens, None), slice(None, num_prompt_tokens)
        tensors = (gradient[own], query[own], key[prompts], value[prompts], output[own], lse[:, own].contiguous())
        lengths = flash.Lengths(group_bounds, prompt_bounds, longest_group, longest_prompt)
        parts = run(*tensors, lengths, causal=False)
        of_query[own] += parts[0]
        of_key[prompts] += parts[1]
        of_value[prompts] += parts[2]
    return of_query, of_key, of_value


@_attend_backward.register_fake
def _(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, bounds, prompt_bounds, group_bounds, *ctx.numbers = inputs
    ctx.save_for_backward(query, key, value, *output, bounds, prompt_bounds, group_bounds)


def _propagate(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    gradients = _attend_backward(gradient.contiguous(), *ctx.saved_tensors, *ctx.numbers)
    return *gradients, *(None,) * 9


_attend.register_autograd(_propagate, setup_context=_keep)


def attend_group_by_group(query: Tensor, key: Tensor, value: Tensor, layout: Layout, *, scale: float | None) -> Tensor:
    """Do as `attend` with calls of scaled_dot_product_attention, on any device.

    `query` is [1, H, U, D], `key` and `value` are [1, K, U, D], and the output is [1, U, H, D].
    """
    num_groups = len(layout.prompt_bounds) - 1
    segments = [slice(*ends) for ends in pairwise(layout.bounds.tolist())]
    starts = layout.group_bounds.tolist()
    groups = query.shape[1] // key.shape[1]
    if query.is_cuda and groups > 1:  # SDPA's memory-efficient kernel refuses grouped heads
        key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    options = {"scale": scale, "enable_gqa": True}
    outputs = []
    for own in segments[:num_groups]:
        parts = (tensor[:, :, own] for tensor in (query, key, value))
        outputs.append(scaled_dot_product_attention(*parts, is_causal=True, **options))
    for own in segments[num_groups:]:
        if own.start == own.stop:
            continue
        prompt = segments[bisect_right(starts, own.start - layout.num_prompt_tokens) - 1]
        keys, values = (torch.cat([tensor[:, :, prompt], tensor[:, :, own]], dim=2) for tensor in (key, value))
        size = own.stop - own.start
        seen = torch.ones(size, keys.shape[2], dtype=torch.bool, device=query.device)
        seen = seen.tril(keys.shape[2] - size)
        outputs.append(scaled_dot_product_attention(query[:, :, own], keys, values, attn_mask=seen, **options))
    return torch.cat(outputs, dim=2).transpose(1, 2)
