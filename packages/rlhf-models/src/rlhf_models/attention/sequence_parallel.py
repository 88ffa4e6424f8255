"""Sequence parallelism: the ranks of a group divide the tokens of every packed batch among them.

Each rank runs the layers on its own part of the tokens. Around attention, ranks exchange tokens for heads: each gets
all tokens of some heads, and attends to them as one rank would. Activations take 1 / size of the memory. Outputs are
gathered, so that every rank has those of all tokens.

Source: Jacobs et al. 2023, DeepSpeed-Ulysses, arXiv:2309.14509.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed

from rlhf_data.errors import ConfigError
from rlhf_models.attention.states_apart import stateful_layers
from rlhf_models.batch import TokenBatch


@dataclass(frozen=True, slots=True)
class SequencePart:
    """One rank's part of a packed batch, which is padded to a multiple of the group's size. T' = T / size after that.

    Attributes:
        input_ids, position_ids: [1, T'] int64, the tokens of this rank.
        cu_seqlens: [S + 1] int32, the bounds of all sequences of the batch. Padding is a sequence of its own.
        longest: length of the longest sequence.
        padding_mask: [1, T'] bool, True for real tokens; None if the batch needs no padding.
        routes: [1, T', layers, top_k] int16, see `TokenBatch`.
    """

    input_ids: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    longest: int
    padding_mask: Tensor | None = None
    routes: Tensor | None = None


class SequenceGroup:
    """The ranks that divide the tokens of a batch. All of them make the same calls with the same batch.

    Gradients: each rank computes the same loss from gathered outputs, and its backward pass gives the part of the
    gradient that flows through its own tokens. The gradient of a weight is the sum over the ranks of the group.

    Attributes:
        size: number of ranks.
        rank: number of this rank in the group, from 0.
    """

    def __init__(self, group: distributed.ProcessGroup) -> None:
        self._group = group
        self.size = distributed.get_world_size(group)
        self.rank = distributed.get_rank(group)

    def part_of(self, batch: TokenBatch) -> SequencePart:
        """Return this rank's part of a packed batch. Raises ConfigError for a batch that is not packed."""
        if not batch.is_packed:
            raise ConfigError("only packed batches can be divided over ranks", hint="turn packing on")
        width = self._width(batch)
        num_padding = width * self.size - batch.input_ids.shape[1]
        input_ids = torch.nn.functional.pad(batch.input_ids, (0, num_padding))
        position_ids = torch.nn.functional.pad(batch.position_ids, (0, num_padding))
        cu_seqlens = batch.cu_seqlens
        start = self.rank * width
        mask = None
        if num_padding:
            cu_seqlens = torch.cat([cu_seqlens, cu_seqlens[-1:] + num_padding])
            mask = torch.arange(start, start + width, device=input_ids.device)[None] < batch.input_ids.shape[1]
        routes = batch.routes
        if routes is not None:
            routes = torch.nn.functional.pad(routes, (0, 0, 0, 0, 0, num_padding), value=-1)[:, start : start + width]
        return SequencePart(
            input_ids[:, start : start + width],
            position_ids[:, start : start + width],
            cu_seqlens,
            max(*batch.lengths, num_padding),
            mask,
            routes,
        )

    def divide(self, index: Tensor, batch: TokenBatch) -> tuple[Tensor, list[int]]:
        """Divide positions among the ranks that have their tokens.

        Args:
            index: [N] int64, ascending positions in the flattened batch. On a GPU, this call waits for it.
            batch: the packed batch.

        Returns:
            This rank's positions, counted from its first token, [n] int64 on the device of the batch, and the number of
            positions of every rank, for `gather`.

        Raises:
            ValueError: the positions do not ascend.
        """
        on_host = index.cpu()
        if (on_host.diff() < 0).any():
            raise ValueError("positions that are divided over ranks must ascend")
        width = self._width(batch)
        bounds = torch.searchsorted(on_host, torch.arange(self.size + 1) * width).tolist()
        counts = [high - low for low, high in itertools.pairwise(bounds)]
        own = on_host[bounds[self.rank] : bounds[self.rank + 1]] - self.rank * width
        return own.to(batch.input_ids.device), counts

    def gather(self, values: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the values of all ranks, [N, ...], in the order of ranks.

        Args:
            values: [n, ...] of this rank.
            counts: n of every rank; their sum is N.
        """
        return _Gather.apply(values, tuple(counts), self._group)

    def gather_tokens(self, values: Tensor, batch: TokenBatch) -> Tensor:
        """Return the values of all tokens, [1, T], from those of each rank's tokens, [1, T']."""
        gathered = self.gather(values[0], [self._width(batch)] * self.size)
        return gathered[None, : batch.input_ids.shape[1]]

    def sum(self, value: Tensor) -> Tensor:
        """Return the sum of `value` over the ranks, without a gradient."""
        total = value.detach().clone()
        distributed.all_reduce(total, group=self._group)
        return total

    def to_heads(self, tensor: Tensor) -> Tensor:
        """Exchange tokens for heads: [1, H, T', D] with all heads becomes [1, H / size, T, D] with all tokens.

        If `size` does not divide H, heads are repeated until it does; see `check_heads`.
        """
        _, num_heads, width, dim = tensor.shape
        copies = self.size // math.gcd(num_heads, self.size)
        if copies > 1:
            tensor = tensor.repeat_interleave(copies, dim=1)
        received = _Exchange.apply(tensor.reshape(self.size, -1, width, dim), self._group)
        return received.transpose(0, 1).reshape(1, -1, self.size * width, dim)

    def to_tokens(self, tensor: Tensor) -> Tensor:
        """Exchange heads for tokens: [1, T, H / size, D] with all tokens becomes [1, T', H, D] with all heads."""
        _, num_tokens, num_heads, dim = tensor.shape
        width = num_tokens // self.size
        received = _Exchange.apply(tensor.reshape(self.size, width, num_heads, dim), self._group)
        return received.transpose(0, 1).reshape(1, width, self.size * num_heads, dim)

    def _width(self, batch: TokenBatch) -> int:
        """Return the number of tokens of each rank."""
        return -(-batch.input_ids.shape[1] // self.size)


def check_heads(config: Any, size: int) -> None:
    """Raise ConfigError unless `size` ranks can divide the attention heads of a transformers model, and its tokens.

    Ranks have equal numbers of heads for queries. Fewer heads for keys and values are repeated, at most until there is
    one for each head for queries.
    """
    if stateful_layers(config):
        message = (
            f"sequence parallelism divides tokens, and layers of a {config.model_type} model carry a state over them"
        )
        raise ConfigError(message, hint="turn it off")
    layers = layer_configs(config)
    counts = {(own.num_attention_heads, getattr(own, "num_key_value_heads", None)) for own in layers}

    def divides(number: int) -> bool:
        return all(can_divide(num_heads, num_kv_heads or num_heads, number) for num_heads, num_kv_heads in counts)

    if divides(size):
        return
    fewest = min(num_heads for num_heads, _ in counts)
    possible = [str(number) for number in range(2, fewest + 1) if divides(number)]
    message = f"sequence parallelism over {size} ranks divides attention heads, and the model has {fewest}"
    raise ConfigError(message, hint=f"use {' or '.join(possible)} ranks" if possible else "turn it off")


def layer_configs(config: Any) -> list[Any]:
    """Return the configs of a transformers model's layers for text: one for all layers unless their sizes differ.

    The heads of Gemma 4's layers without a window have a size of their own, and the config of the whole then has none.
    """
    text = config.get_text_config()
    return list(text.per_layer_config) if getattr(text, "is_heterogeneous", False) else [text]


def can_divide(num_heads: int, num_kv_heads: int, size: int) -> bool:
    """Return whether `size` ranks can divide heads of queries, [H], and of keys and values, [K]."""
    copies = size // math.gcd(num_kv_heads, size)
    return num_heads % size == 0 and num_heads % (num_kv_heads * copies) == 0


class _Exchange(torch.autograd.Function):
    """Sends the i-th of [size, ...] parts to rank i, and returns the parts that the ranks sent to this one.

    The exchange of a matrix of parts transposes it, so that gradients take the same way back.
    """

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: distributed.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchanged(parts, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _exchanged(gradient, ctx.group), None


def _exchanged(parts: Tensor, group: distributed.ProcessGroup) -> Tensor:
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    distributed.all_to_all_single(received, parts, group=group)
    return received


class _Gather(torch.autograd.Function):
    """Concatenates the values of all ranks; the gradient of a rank's values is its part of the result's gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, counts: tuple[int, ...], group: distributed.ProcessGroup) -> Tensor:
        rank = distributed.get_rank(group)
        ctx.own = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
        longest = max(counts)
        if not longest:
            return values.clone()
        # Collectives want parts of one size.
        padded = values.new_zeros(longest, *values.shape[1:])
        padded[: len(values)] = values
        gathered = values.new_empty(len(counts) * longest, *values.shape[1:])
        distributed.all_gather_into_tensor(gathered, padded, group=group)
        return torch.cat([part[:count] for part, count in zip(gathered.split(longest), counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient[ctx.own], None, None
