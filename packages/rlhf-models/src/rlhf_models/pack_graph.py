"""Passes over full packs, replayed from CUDA graphs: the host launches two graphs instead of thousands of kernels."""

import functools
import gc
import itertools
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from rlhf_kernels import accumulate_
from rlhf_models.attention import NO_MASK, PACKED_ATTENTION, bounds_arguments
from rlhf_models.batch import TokenBatch, to_device

logger = logging.getLogger(__name__)

_NUM_SEEN = 16  # packs that are run as they come, to learn the shape from
_LEAST_FILL = 0.5  # of the budget; smaller packs are rare, and run as they come
_SIZES = 128  # a pack is filled up to the next of so many parts of the budget
_MAX_GRAPHS = 16
# What the longest sequence is rounded up to: attention pays for tokens that it lacks, as for sequences of no tokens.
_LONGEST_STEP = 128
_MAX_HELD_BYTES = 512 << 20  # of gradients that are being added to their sums beside the backward pass
# Config fields of models that send tokens to experts: what a layer launches depends on its data, which no graph allows.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts_per_tok")


def can_be_replayed(config: Any) -> bool:
    """Return whether the passes of such a transformers model are the same launches whatever its inputs, as far as its
    config tells."""
    text = config.get_text_config()
    return text._attn_implementation == PACKED_ATTENTION and not any(getattr(text, name, None) for name in _EXPERTS)


@dataclass(frozen=True, slots=True)
class PackShape:
    """What the packs of a graph are brought to.

    Attributes:
        num_tokens: of a pack.
        num_sequences: in a pack at most, those that fill it up included.
        longest: tokens of a sequence at most.
    """

    num_tokens: int
    num_sequences: int
    longest: int

    def bounds(self, lengths: tuple[int, ...]) -> list[int] | None:
        """Return the bounds [num_sequences + 1] of such sequences and of those that fill the pack up, empty ones at the
        end; None when they do not fit."""
        bounds = list(itertools.accumulate(lengths, initial=0))
        if bounds[-1] > self.num_tokens or max(lengths) > self.longest:
            return None
        while bounds[-1] < self.num_tokens:
            bounds.append(min(bounds[-1] + self.longest, self.num_tokens))
        missing = self.num_sequences + 1 - len(bounds)
        return bounds + [self.num_tokens] * missing if missing >= 0 else None


class PackGraph:
    """The forward and the backward pass of a backbone over packs, as two CUDA graphs for each of a few shapes.

    A pack is filled up to a shape by sequences that carry no loss. How many sequences there are is learned from the
    first packs. One that does not fit, a pass without gradient, and one whose forward pass comes before the backward
    pass of the one before, are run without the graphs. Graphs share their memory: only one is under way at a time.
    Weights and sums must stay where they are in memory.

    Args:
        backbone: in training mode, without gradient checkpointing.
        num_tokens: of a full pack, the budget.
        gradient_sums: what the gradient of each weight that is trained is added to, float32; it is never its `grad`.
        uses_graphs: False launches the same passes one kernel after the other, as where there is no CUDA.
    """

    def __init__(
        self,
        backbone: nn.Module,
        num_tokens: int,
        gradient_sums: Mapping[nn.Parameter, Tensor],
        *,
        uses_graphs: bool = True,
    ) -> None:
        self._backbone = backbone
        self._num_tokens = num_tokens
        self._gradient_sums = gradient_sums
        self._uses_graphs = uses_graphs
        self._seen: list[tuple[int, ...]] = []
        self._largest: PackShape | None = None
        self._passes: dict[PackShape, _Passes] = {}
        self._num_bytes = 0  # of the graphs
        self._takes_more = True

    def __call__(self, batch: TokenBatch) -> Tensor | None:
        """Return the hidden states [1, T, D] of a batch, or None when it is to be run without the graphs."""
        if not (torch.is_grad_enabled() and self._backbone.training and batch.is_packed):
            return None
        if not self._num_tokens * _LEAST_FILL <= sum(batch.lengths) <= self._num_tokens:
            return None
        if self._largest is None:
            self._learn(batch)
            return None
        if any(each.awaits_backward for each in self._passes.values()):  # and holds what the graphs share
            return None
        passes, bounds = self._passes_for(batch)
        if passes is None:
            return None
        passes.read(batch, bounds)
        return _Replay.apply(passes, batch.input_ids.shape[1], passes.anchor)

    def _learn(self, batch: TokenBatch) -> None:
        self._seen.append(batch.lengths)
        if len(self._seen) == _NUM_SEEN:
            most, longest = max(map(len, self._seen)), max(map(max, self._seen))
            num_sequences = most + max(3, most // 8)
            self._largest = PackShape(self._num_tokens, num_sequences, _rounded_up(longest, _LONGEST_STEP))

    def _passes_for(self, batch: TokenBatch) -> tuple["_Passes | None", list[int]]:
        """Return the passes of the shape that a batch is to be filled up to, prepared if need be, and its bounds."""
        total, longest = sum(batch.lengths), max(batch.lengths)
        num_tokens = min(_rounded_up(total, max(self._num_tokens // _SIZES, 1)), self._num_tokens)
        shape = PackShape(num_tokens, self._largest.num_sequences, _rounded_up(longest, _LONGEST_STEP))
        if not self._passes:  # the first takes packs of all sizes, and has memory for all that follow
            shape = self._largest
        fitting = [each for each in self._passes if each.num_tokens >= total and each.longest >= longest]
        is_last = len(self._passes) == _MAX_GRAPHS - 1  # kept for a pack with a longer sequence
        if shape not in self._passes and fitting and (is_last or not self._takes_more):
            shape = min(fitting, key=lambda each: (each.num_tokens, each.longest))
        elif shape not in self._passes and is_last:
            shape = replace(shape, num_tokens=self._num_tokens)
        bounds = shape.bounds(batch.lengths)
        if bounds is None:
            return None, []
        if shape not in self._passes and self._takes_more and (passes := self._prepare(shape.longest, bounds)):
            self._passes[shape] = passes
            self._takes_more = len(self._passes) < _MAX_GRAPHS
        return self._passes.get(shape), bounds

    def _prepare(self, longest: int, bounds: Sequence[int]) -> "_Passes | None":
        passes = [_Passes(self._backbone, longest, bounds, self._gradient_sums) for _ in range(2)]
        if not self._uses_graphs:
            return passes[0]
        try:
            taken, left = _capture(*passes, next((each.pool for each in self._passes.values()), None))
            # Without graphs a pass takes as much again; half of it is for the head and what else there is.
            if left < 1.5 * (self._num_bytes + taken):
                raise torch.OutOfMemoryError(
                    f"they take {self._num_bytes + taken >> 20} MiB, {left >> 20} MiB are left"
                )
        except (RuntimeError, torch.OutOfMemoryError) as error:
            logger.warning("some passes are launched kernel by kernel, for CUDA graphs of them failed: %s", str(error))
            self._takes_more = False
        else:
            self._num_bytes += taken
            return passes[1]
        del passes
        gc.collect()  # graphs hold themselves in a circle
        torch.cuda.empty_cache()
        return None


class _Passes:
    """A forward and a backward pass that read and write the same memory every time."""

    def __init__(
        self, backbone: nn.Module, longest: int, bounds: Sequence[int], sums: Mapping[nn.Parameter, Tensor]
    ) -> None:
        self._backbone = backbone
        self._longest = longest
        device = next(backbone.parameters()).device
        # Stand-ins for the weights: the weights' own nodes in the autograd graph belong to another stream.
        self._weights = {}
        self._embedding = _embedding_of_rows(backbone)
        self._row_sums: Tensor | None = None  # of its gradient, which has few rows that are not 0
        self._row_anchor = torch.zeros((), device=device, requires_grad=True)
        for name, weight in backbone.named_parameters():
            by_row = self._embedding is not None and weight is self._embedding.weight
            self._weights[name] = stand_in = nn.Parameter(weight.detach(), weight.requires_grad and not by_row)
            if weight.requires_grad and by_row:
                self._row_sums = sums[weight].view(weight.shape)
            elif weight.requires_grad:
                stand_in.register_post_accumulate_grad_hook(self._adder(sums[weight]))
        self._input_ids, self._position_ids = torch.zeros(2, 1, bounds[-1], dtype=torch.int64, device=device)
        self._cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=device)
        # Adding moves memory, a product computes: side by side they take less time than one after the other.
        self._adding = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._held: list[Tensor] = []
        self._gradient: Tensor | None = None
        self._hidden: Tensor | None = None
        self.launch_forward: Callable[[], None] = self.run_forward
        self.launch_backward: Callable[[], None] = self.run_backward
        self.anchor = torch.zeros((), device=device, requires_grad=True)  # has autograd come back for the weights
        # The node of the autograd graph that will come back, while it lives.
        self.user: Callable[[], Any] = lambda: None
        self.pool: Any = None  # the graphs' memory

    @property
    def awaits_backward(self) -> bool:
        """Whether a forward pass was launched whose backward pass can still come."""
        return self.user() is not None

    def run_forward(self) -> None:
        """Launch the forward pass over what was read, one kernel after the other."""
        arguments = {
            "input_ids": self._input_ids,
            "position_ids": self._position_ids,
            "attention_mask": NO_MASK,
            "use_cache": False,
            **bounds_arguments(self._cu_seqlens, self._longest),
        }
        tracks = self._row_sums is not None
        with self._embedding.register_forward_hook(self._track_rows) if tracks else nullcontext(), torch.enable_grad():
            self._hidden = functional_call(self._backbone, self._weights, kwargs=arguments).last_hidden_state
        if self._gradient is None:
            self._gradient = torch.zeros_like(self._hidden)

    def _track_rows(self, embedding: nn.Module, inputs: tuple[Tensor], rows: Tensor) -> Tensor:
        return _Rows.apply(rows, functools.partial(self._add_rows, inputs[0]), self._row_anchor)

    def _add_rows(self, token_ids: Tensor, gradient: Tensor) -> None:
        """Add the gradient of the tokens' rows to the sums, always in the same order."""
        if (padding := self._embedding.padding_idx) is not None:
            gradient = gradient.masked_fill((token_ids == padding)[..., None], 0.0)
        self._row_sums.index_put_((token_ids.flatten(),), gradient.flatten(0, -2).float(), accumulate=True)

    def run_backward(self) -> None:
        """Launch the backward pass, at first from a gradient of zeros; gradients go to their sums."""
        self._hidden.backward(self._gradient)
        self._hidden = self._hidden.detach()
        self._await_sums()

    def _adder(self, total: Tensor) -> Callable[[Tensor], None]:
        def add(weight: Tensor) -> None:
            gradient, weight.grad = weight.grad, None
            if self._adding is None:
                accumulate_(total, gradient)
                return
            self._adding.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._adding):
                accumulate_(total, gradient)
            self._held.append(gradient)
            if sum(each.nbytes for each in self._held) > _MAX_HELD_BYTES:
                self._await_sums()

        return add

    def _await_sums(self) -> None:
        if self._held:
            torch.cuda.current_stream().wait_stream(self._adding)
            self._held.clear()

    def adopt_gradient(self, other: "_Passes") -> None:
        """Read the gradient where `other` does."""
        self._gradient = other._gradient

    def read(self, batch: TokenBatch, bounds: Sequence[int]) -> None:
        """Take a pack in, with the bounds of a full one."""
        count = batch.input_ids.shape[1]
        for own, part in ((self._input_ids, batch.input_ids), (self._position_ids, batch.position_ids)):
            own[:, :count].copy_(part)
            own[:, count:].zero_()
        self._cu_seqlens.copy_(to_device(torch.tensor(bounds, dtype=torch.int32), self._cu_seqlens.device))

    def forward(self, count: int) -> Tensor:
        """Return the hidden states of the first `count` tokens; the next pass writes over them."""
        self.launch_forward()
        return self._hidden[:, :count].detach()

    def backward(self, gradient: Tensor) -> None:
        """Go back from the gradient of those hidden states."""
        count = gradient.shape[1]
        self._gradient[:, :count].copy_(gradient)
        self._gradient[:, count:].zero_()
        self.launch_backward()
        self.user = lambda: None


class _Replay(torch.autograd.Function):
    """Both passes as one operator."""

    @staticmethod
    def forward(ctx: Any, passes: _Passes, count: int, anchor: Tensor) -> Tensor:
        ctx.passes = passes
        passes.user = weakref.ref(ctx)
        return passes.forward(count)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.passes.backward(gradient)
        return None, None, None


class _Rows(torch.autograd.Function):
    """Rows of an embedding, whose gradient is taken by a function."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, take: Callable[[Tensor], None], anchor: Tensor) -> Tensor:
        ctx.take = take
        return rows.clone()  # a model may change them in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.take(gradient)
        return None, None, None


def _embedding_of_rows(backbone: nn.Module) -> nn.Embedding | None:
    """Return the input embedding if a token's gradient goes to its row as it is, and nothing else uses the weight."""
    try:
        embedding = backbone.get_input_embeddings()
    except NotImplementedError:
        return None
    if type(embedding) is not nn.Embedding or embedding.scale_grad_by_freq or embedding.max_norm is not None:
        return None
    users = [part for part in backbone.modules() if getattr(part, "weight", None) is embedding.weight]
    return embedding if len(users) == 1 else None


def _rounded_up(value: int, step: int) -> int:
    return -(-value // step) * step


def _capture(warm_up: _Passes, passes: _Passes, pool: Any) -> tuple[int, int]:
    """Make the second passes graphs, after the first, which compile what is not yet compiled; return the bytes that the
    graphs take, and those that are left. Raises RuntimeError for passes that wait for the device, before any capture:
    one that fails under way keeps its memory."""
    stream, mode = _capture_stream(), torch.cuda.get_sync_debug_mode()
    stream.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(stream):
            for strictness in (mode, "error"):
                torch.cuda.set_sync_debug_mode(strictness)
                warm_up.run_forward()
                warm_up.run_backward()
    finally:
        torch.cuda.set_sync_debug_mode(mode)
        torch.cuda.synchronize()
    torch.cuda.empty_cache()  # what the passes before it left behind is theirs now
    before = torch.cuda.mem_get_info()[0]
    forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    passes.pool = pool or torch.cuda.graph_pool_handle()
    passes.adopt_gradient(warm_up)  # a tensor made while a graph is captured would be the graph's own
    with torch.cuda.graph(forward, pool=passes.pool, stream=stream):
        passes.run_forward()
    with torch.cuda.graph(backward, pool=passes.pool, stream=stream):
        passes.run_backward()
    passes.launch_forward, passes.launch_backward = forward.replay, backward.replay
    torch.cuda.empty_cache()
    left = torch.cuda.mem_get_info()[0]
    return before - left, left


@functools.cache
def _capture_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # of each, cuBLAS keeps memory
