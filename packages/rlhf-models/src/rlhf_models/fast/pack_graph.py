"""Training passes over full packs, replayed from CUDA graphs.

The host launches two graphs in place of thousands of kernels, which matters where launching takes longer than running.
A CUDA graph replays the same kernels on the same memory with the same shapes. Packs differ in all three, hence:

- a pack is copied into fixed buffers and filled up to one of a few shapes (`PackShape`) with sequences that give no
  gradient (fillers);
- gradients are not stored in `weight.grad` but added to float32 sums that stay where they are in memory;
- everything that would make the host wait for the device is kept out of the captured passes, because waiting cannot be
  captured.

This file chooses shapes; `passes.py` runs and captures the passes of one shape.
"""

import gc
import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_models.attention.packed import PACKED_ATTENTIONS
from rlhf_models.batch import TokenBatch
from rlhf_models.fast.passes import FREE_SHARE, Passes, Replay, capture

logger = logging.getLogger(__name__)

_NUM_SEEN = 16  # packs that run without graphs first, from which the number of sequences is learned
_LEAST_FILL = 0.5  # share of the budget; smaller packs are rare and run without graphs
_SIZES = 128  # pack sizes are rounded up to multiples of budget / _SIZES, so that filling costs at most 1 / _SIZES
_MAX_GRAPHS = 16  # shapes to capture; each takes memory for its graph and time for its capture
# The longest sequence is rounded up to a multiple of this. Attention launches blocks for the longest sequence in every
# sequence, so a larger bound costs time.
_LONGEST_STEP = 128
# Config fields of mixture-of-experts models: the kernels that their layers launch depend on the data, unlike a graph.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts_per_tok")


def can_be_replayed(config: Any) -> bool:
    """Return whether a transformers model launches the same kernels for all inputs, as far as its config tells."""
    text = config.get_text_config()
    return text._attn_implementation in PACKED_ATTENTIONS and not any(getattr(text, name, None) for name in _EXPERTS)


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

    The first packs run without graphs, to learn how many sequences a pack has. Later, three kinds of passes run without
    graphs: those of a pack that fits no shape, those without gradient, and a forward pass before the backward pass of
    the previous one. All graphs share one memory pool, so only one pair of passes can be in progress. Weights and sums
    must not move in memory, because graphs hold their addresses.

    Attributes:
        backbone: in training mode, without gradient checkpointing.
        num_tokens: tokens of a full pack (the budget).
        gradient_sums: the float32 tensor to which the gradient of each trained weight is added. `weight.grad` stays
            None.
        uses_graphs: False runs the same passes kernel by kernel, which also works without CUDA.
    """

    backbone: nn.Module
    num_tokens: int
    gradient_sums: Mapping[nn.Parameter, Tensor]
    uses_graphs: bool = field(default=True, kw_only=True)
    _seen: list[tuple[int, ...]] = field(default_factory=list, init=False)  # lengths of the first packs
    _largest: PackShape | None = field(default=None, init=False)
    _passes: dict[PackShape, Passes] = field(default_factory=dict, init=False)
    _num_bytes: int = field(default=0, init=False)  # device memory of all graphs
    _takes_more: bool = field(default=True, init=False)  # whether further shapes may be captured

    def __call__(self, batch: TokenBatch) -> Tensor | None:
        """Return the hidden states [1, T, D] of a batch, or None if the caller must run it without graphs."""
        # A captured forward pass keeps its activations for a backward pass, which only training makes.
        if not (torch.is_grad_enabled() and self.backbone.training and batch.is_packed) or batch.shared is not None:
            return None
        if not self.num_tokens * _LEAST_FILL <= sum(batch.lengths) <= self.num_tokens:
            return None
        if self._largest is None:
            self._learn(batch)
            return None
        if any(each.awaits_backward for each in self._passes.values()):
            # Its activations are in the memory that all graphs share; another forward pass would overwrite them.
            return None
        passes, bounds = self._passes_for(batch)
        if passes is None:
            return None
        passes.read(batch, bounds)
        return Replay.apply(passes, batch.input_ids.shape[1], passes.anchor)

    def _learn(self, batch: TokenBatch) -> None:
        """Note a pack's lengths; after `_NUM_SEEN` packs, fix the largest shape."""
        self._seen.append(batch.lengths)
        if len(self._seen) == _NUM_SEEN:
            most = max(map(len, self._seen))
            longest = max(map(max, self._seen))
            # Room for packs with more sequences than any seen so far, and for those that fill a pack up.
            num_sequences = most + max(3, most // 8)
            self._largest = PackShape(self.num_tokens, num_sequences, _rounded_up(longest, _LONGEST_STEP))

    def _passes_for(self, batch: TokenBatch) -> tuple[Passes | None, list[int]]:
        """Return the passes of the shape that fits a batch, captured if they are new, and the bounds of the full pack.

        The passes are None if no shape fits.
        """
        total = sum(batch.lengths)
        longest = max(batch.lengths)
        num_tokens = min(_rounded_up(total, max(self.num_tokens // _SIZES, 1)), self.num_tokens)
        shape = PackShape(num_tokens, self._largest.num_sequences, _rounded_up(longest, _LONGEST_STEP))
        if not self._passes:  # capture the largest shape first: the memory pool then suffices for all that follow
            shape = self._largest
        fitting = [each for each in self._passes if each.num_tokens >= total and each.longest >= longest]
        # The last graph is reserved for a pack with a longer sequence than any before. It has the full size, so that it
        # fits all such packs that follow.
        is_last = len(self._passes) == _MAX_GRAPHS - 1
        if shape not in self._passes and fitting and (is_last or not self._takes_more):
            # Nothing can be captured for this pack: fill it up to the captured shape that costs least.
            shape = min(fitting, key=lambda each: (each.num_tokens, each.longest))
        elif shape not in self._passes and is_last:
            shape = replace(shape, num_tokens=self.num_tokens)
        bounds = shape.bounds(batch.lengths)
        if bounds is None:
            return None, []
        if shape not in self._passes and self._takes_more and (passes := self._prepare(shape.longest, bounds)):
            self._passes[shape] = passes
            self._takes_more = len(self._passes) < _MAX_GRAPHS
        return self._passes.get(shape), bounds

    def _prepare(self, longest: int, bounds: Sequence[int]) -> Passes | None:
        """Capture the passes of a shape. If that fails or leaves too little memory, return None and capture no more."""
        # The first of the two warms up, the second is captured.
        passes = [Passes(self.backbone, longest, bounds, self.gradient_sums) for _ in range(2)]
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


def _rounded_up(value: int, step: int) -> int:
    return -(-value // step) * step
