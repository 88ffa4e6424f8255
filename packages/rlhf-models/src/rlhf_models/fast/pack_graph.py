"""Training passes over full packs, replayed from CUDA graphs.

The host launches two graphs in place of thousands of kernels, which matters where launching takes longer than running.
A CUDA graph replays the same kernels on the same memory with the same shapes. Packs differ in all three, hence:

- a pack is copied into fixed buffers and filled up to one of a few shapes (`PackShape`) with sequences that give no
  gradient (fillers). A shape gets graphs once it would have spared as much as capturing them takes;
- gradients are not stored in `weight.grad` but added to float32 sums that stay where they are in memory;
- everything that would make the host wait for the device is kept out of the captured passes, because waiting cannot be
  captured.

This file chooses shapes; `passes.py` runs and captures the passes of one shape.
"""

import gc
import itertools
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_models.attention.packed import PACKED_ATTENTIONS
from rlhf_models.attention.states_apart import stateful_layers
from rlhf_models.batch import TokenBatch
from rlhf_models.fast.passes import FREE_SHARE, Passes, Replay, capture

logger = logging.getLogger(__name__)

_NUM_EAGER = 16  # packs that run without graphs, because they fit no shape, before a shape is captured for them
_LEAST_FILL = 0.5  # share of the largest pack; smaller packs are rare and run without graphs
_SIZES = 128  # pack sizes are rounded up to multiples of budget / _SIZES, so that filling costs at most 1 / _SIZES
_MAX_GRAPHS = 16  # shapes to capture; each takes memory for its graph and time for its capture
# A capture takes two passes that warm up, one that is recorded, and about as long as this many operations.
_CAPTURE_PASSES, _CAPTURE_FLOP = 3, 2e14
# The longest sequence is rounded up to a multiple of this. Attention launches blocks for the longest sequence in every
# sequence, so a larger bound costs time. It is counted as this share of a token per position.
_LONGEST_STEP, _IDLE_SHARE = 128, 1 / 64
# Config fields of mixture-of-experts models: the kernels that their layers launch depend on the data, unlike a graph.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts_per_tok")


def can_be_replayed(config: Any) -> bool:
    """Return whether a transformers model launches the same kernels for all inputs, as far as its config tells."""
    text = config.get_text_config()
    others = stateful_layers(config) or any(getattr(text, name, None) for name in _EXPERTS)
    return text._attn_implementation in PACKED_ATTENTIONS and not others


@dataclass(frozen=True, slots=True)
class PackShape:
    """The shape to which the packs of one graph are filled up.

    Attributes:
        num_tokens: tokens per pack.
        num_sequences: largest number of sequences per pack, including fillers.
        longest: largest number of tokens per sequence.
    """

    num_tokens: int
    num_sequences: int
    longest: int

    @property
    def cost(self) -> float:
        """What a pass costs, in tokens."""
        return self.num_tokens + _IDLE_SHARE * self.num_sequences * self.longest

    def bounds(self, lengths: tuple[int, ...]) -> list[int] | None:
        """Return the bounds [num_sequences + 1] of a pack of sequences with these lengths, or None if they do not fit.

        Filler sequences take the missing tokens; empty sequences at the end take the missing number of sequences.
        """
        bounds = list(itertools.accumulate(lengths, initial=0))
        if bounds[-1] > self.num_tokens or max(lengths) > self.longest:
            return None
        # No filler may exceed `longest` either, because attention is captured with that bound.
        while bounds[-1] < self.num_tokens:
            bounds.append(min(bounds[-1] + self.longest, self.num_tokens))
        missing = self.num_sequences + 1 - len(bounds)
        return bounds + [self.num_tokens] * missing if missing >= 0 else None


@dataclass(eq=False, slots=True)
class PackGraph:
    """Forward and backward pass of a backbone over packs, as two CUDA graphs for each of a few shapes.

    Three kinds of passes run without graphs: those of a pack that fits no shape, those without gradient, and a forward
    pass before the backward pass of the previous one. Packs that fit no shape, and fillers, add up to a debt. When it
    equals what a capture takes, the shape of the pack at hand is captured: sizes that occur once are never captured,
    and those that cost most are the likeliest to be. The first shape is a little larger than all packs so far.

    All graphs share one memory pool, so only one pair of passes can be in progress. Weights and sums must not move in
    memory, because graphs hold their addresses.

    Attributes:
        backbone: in training mode, without gradient checkpointing.
        num_tokens: the most tokens per pack (the budget).
        gradient_sums: the float32 tensor to which the gradient of each trained weight is added. `weight.grad` stays
            None.
        uses_graphs: False runs the same passes kernel by kernel, which also works without CUDA.
    """

    backbone: nn.Module
    num_tokens: int
    gradient_sums: Mapping[nn.Parameter, Tensor]
    uses_graphs: bool = field(default=True, kw_only=True)
    _most_tokens: int = field(default=0, init=False)  # of any pack so far
    _most_sequences: int = field(default=0, init=False)  # of any pack so far
    _longest: int = field(default=0, init=False)  # tokens of any sequence so far
    _debt: float = field(default=0.0, init=False)  # in captures
    _passes: dict[PackShape, Passes] = field(default_factory=dict, init=False)
    _num_bytes: int = field(default=0, init=False)  # device memory of all graphs
    _takes_more: bool = field(default=True, init=False)  # whether further shapes may be captured

    def __call__(self, batch: TokenBatch) -> Tensor | None:
        """Return the hidden states [1, T, D] of a batch, or None if the caller must run it without graphs."""
        # A captured forward pass keeps its activations for a backward pass, which only training makes.
        if not (torch.is_grad_enabled() and self.backbone.training and batch.is_packed) or batch.shared is not None:
            return None
        num_tokens = sum(batch.lengths)
        if num_tokens > self.num_tokens:
            return None
        self._most_tokens = max(self._most_tokens, num_tokens)
        self._most_sequences = max(self._most_sequences, len(batch.lengths))
        self._longest = max(self._longest, *batch.lengths)
        if num_tokens < self._most_tokens * _LEAST_FILL:
            return None
        if any(each.awaits_backward for each in self._passes.values()):
            # Its activations are in the memory that all graphs share; another forward pass would overwrite them.
            return None
        shape = self._shape_for(batch.lengths)
        if shape is None:
            return None
        passes = self._passes[shape]
        passes.read(batch, shape.bounds(batch.lengths))
        return Replay.apply(passes, batch.input_ids.shape[1], passes.anchor)

    def _shape_for(self, lengths: tuple[int, ...]) -> PackShape | None:
        """Return the cheapest captured shape for a pack, perhaps captured for it, or None if it fits none."""
        fitting = [shape for shape in self._passes if shape.bounds(lengths) is not None]
        cheapest = min(fitting, key=lambda shape: shape.cost, default=None)
        if cheapest is None:
            # With room for larger packs that follow, and so that the memory pool suffices for all others.
            wanted = self._shape(_with_room(self._most_tokens), self._longest)
            self._debt += 1 / _NUM_EAGER
        else:
            wanted = self._shape(sum(lengths), max(lengths))
            self._debt += max(cheapest.cost - wanted.cost, 0.0) / self._capture_cost
        # The last graph is left to packs that fit no other.
        has_room = len(self._passes) < _MAX_GRAPHS - (cheapest is not None)
        if self._debt < 1 or not has_room or not self._takes_more:
            return cheapest
        self._debt = 0.0
        passes = self._prepare(wanted, lengths)
        if passes is None:
            return cheapest
        self._passes[wanted] = passes
        return wanted

    def _shape(self, num_tokens: int, longest: int) -> PackShape:
        """Return the shape of packs of so many tokens, whose longest sequence has `longest`."""
        longest = _rounded_up(longest, _LONGEST_STEP)
        num_tokens = min(_rounded_up(num_tokens, max(self.num_tokens // _SIZES, 1)), self.num_tokens)
        # Fillers of the smallest pack, or sequences of packs that have more of them than any so far.
        num_fillers = int(num_tokens - self._most_tokens * _LEAST_FILL) // longest + 1
        return PackShape(num_tokens, max(self._most_sequences + num_fillers, _with_room(self._most_sequences)), longest)

    @property
    def _capture_cost(self) -> float:
        """What a capture costs, in tokens of passes. A pass has six operations per weight and token."""
        num_weights = sum(weight.numel() for weight in self.backbone.parameters())
        return _CAPTURE_PASSES * self.num_tokens + _CAPTURE_FLOP / (6 * num_weights)

    def _prepare(self, shape: PackShape, lengths: tuple[int, ...]) -> Passes | None:
        """Capture the passes of a shape. If that fails or leaves too little memory, return None and capture no more."""
        bounds = shape.bounds(lengths)
        # The first of the two warms up, the second is captured.
        passes = [Passes(self.backbone, shape.longest, bounds, self.gradient_sums) for _ in range(2)]
        if not self.uses_graphs:
            return passes[0]
        try:
            taken, left = capture(*passes, next((each.pool for each in self._passes.values()), None))
            if left < FREE_SHARE * (self._num_bytes + taken):
                raise torch.OutOfMemoryError(
                    f"they take {self._num_bytes + taken >> 20} MiB, {left >> 20} MiB are left"
                )
        except (RuntimeError, torch.OutOfMemoryError) as error:
            logger.warning("some passes run kernel by kernel, because capturing CUDA graphs failed: %s", str(error))
            self._takes_more = False
        else:
            self._num_bytes += taken
            return passes[1]
        del passes  # the last reference to graphs that will not be replayed
        gc.collect()  # graphs are in reference cycles, which keep their memory until collected
        torch.cuda.empty_cache()
        return None


def _with_room(most: int) -> int:
    return most + max(3, most // 8)


def _rounded_up(value: int, step: int) -> int:
    return -(-value // step) * step
