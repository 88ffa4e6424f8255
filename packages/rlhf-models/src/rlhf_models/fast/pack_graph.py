"""Training passes over full packs, replayed from CUDA graphs.

The host launches two graphs in place of thousands of kernels, which matters where launching takes longer than running.
A CUDA graph replays the same kernels on the same memory with the same shapes. Packs differ in all three, hence:

- a pack is copied into fixed buffers and filled up with sequences without loss to one of a few shapes (`PackShape`);
- gradients are not stored in `weight.grad` but added to float32 sums that stay where they are in memory;
- everything that would make the host wait for the device is kept out of the captured passes.
"""

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

_NUM_SEEN = 16  # packs that run without graphs first, from which the number of sequences is learned
_LEAST_FILL = 0.5  # of the budget; smaller packs are rare and run without graphs
_SIZES = 128  # pack sizes are rounded up to multiples of budget / _SIZES
_MAX_GRAPHS = 16
# The longest sequence is rounded up to a multiple of this. Attention launches blocks for the longest sequence in every
# sequence, so a larger bound costs time.
_LONGEST_STEP = 128
_MAX_HELD_BYTES = 512 << 20  # gradients kept alive while a second stream adds them to their sums
# Config fields of mixture-of-experts models: the kernels that their layers launch depend on the data, unlike a graph.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts_per_tok")


def can_be_replayed(config: Any) -> bool:
    """Return whether a transformers model launches the same kernels for all inputs, as far as its config tells."""
    text = config.get_text_config()
    return text._attn_implementation == PACKED_ATTENTION and not any(getattr(text, name, None) for name in _EXPERTS)


@dataclass(frozen=True, slots=True)
class PackShape:
    """The shape to which the packs of one graph are filled up.

    Attributes:
        num_tokens: tokens per pack.
        num_sequences: largest number of sequences per pack, including those that fill it up.
        longest: largest number of tokens per sequence.
    """

    num_tokens: int
    num_sequences: int
    longest: int

    def bounds(self, lengths: tuple[int, ...]) -> list[int] | None:
        """Return the bounds [num_sequences + 1] of a pack of such sequences, or None if they do not fit.

        Sequences without loss fill up the tokens; empty sequences at the end fill up the number of sequences.
        """
        bounds = list(itertools.accumulate(lengths, initial=0))
        if bounds[-1] > self.num_tokens or max(lengths) > self.longest:
            return None
        # No filling sequence may exceed `longest` either, because attention is captured with that bound.
        while bounds[-1] < self.num_tokens:
            bounds.append(min(bounds[-1] + self.longest, self.num_tokens))
        missing = self.num_sequences + 1 - len(bounds)
        return bounds + [self.num_tokens] * missing if missing >= 0 else None


class PackGraph:
    """Forward and backward pass of a backbone over packs, as two CUDA graphs for each of a few shapes.

    The first packs run without graphs, to learn how many sequences a pack has. These always run without graphs: a pack
    that fits no shape, a pass without gradient, and a forward pass before the backward pass of the previous one. All
    graphs share one memory pool, so only one pair of passes can be in progress. Weights and sums must not move in
    memory.

    Args:
        backbone: in training mode, without gradient checkpointing.
        num_tokens: tokens of a full pack (the budget).
        gradient_sums: the float32 tensor to which the gradient of each trained weight is added. `weight.grad` stays
            None.
        uses_graphs: False runs the same passes kernel by kernel, which also works without CUDA.
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
        self._num_bytes = 0  # device memory of all graphs
        self._takes_more = True  # whether further shapes may be captured

    def __call__(self, batch: TokenBatch) -> Tensor | None:
        """Return the hidden states [1, T, D] of a batch, or None if the caller must run it without graphs."""
        if not (torch.is_grad_enabled() and self._backbone.training and batch.is_packed):
            return None
        if not self._num_tokens * _LEAST_FILL <= sum(batch.lengths) <= self._num_tokens:
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
        return _Replay.apply(passes, batch.input_ids.shape[1], passes.anchor)

    def _learn(self, batch: TokenBatch) -> None:
        self._seen.append(batch.lengths)
        if len(self._seen) == _NUM_SEEN:
            most = max(map(len, self._seen))
            longest = max(map(max, self._seen))
            # Room for packs with more sequences than any seen so far, and for those that fill a pack up.
            num_sequences = most + max(3, most // 8)
            self._largest = PackShape(self._num_tokens, num_sequences, _rounded_up(longest, _LONGEST_STEP))

    def _passes_for(self, batch: TokenBatch) -> tuple["_Passes | None", list[int]]:
        """Return the passes of the shape that fits a batch, captured if they are new, and the bounds of the full pack.

        The passes are None if no shape fits.
        """
        total = sum(batch.lengths)
        longest = max(batch.lengths)
        num_tokens = min(_rounded_up(total, max(self._num_tokens // _SIZES, 1)), self._num_tokens)
        shape = PackShape(num_tokens, self._largest.num_sequences, _rounded_up(longest, _LONGEST_STEP))
        if not self._passes:  # capture the largest shape first: the memory pool then suffices for all that follow
            shape = self._largest
        fitting = [each for each in self._passes if each.num_tokens >= total and each.longest >= longest]
        # The last graph is reserved for a pack with a longer sequence than any before, at full size.
        is_last = len(self._passes) == _MAX_GRAPHS - 1
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
        """Capture the passes of a shape. If that fails or leaves too little memory, return None and capture no more."""
        # The first of the two warms up, the second is captured.
        passes = [_Passes(self._backbone, longest, bounds, self._gradient_sums) for _ in range(2)]
        if not self._uses_graphs:
            return passes[0]
        try:
            taken, left = _capture(*passes, next((each.pool for each in self._passes.values()), None))
            # Packs that run without graphs need as much memory again. The other half is for the head and its logits.
            if left < 1.5 * (self._num_bytes + taken):
                raise torch.OutOfMemoryError(
                    f"they take {self._num_bytes + taken >> 20} MiB, {left >> 20} MiB are left"
                )
        except (RuntimeError, torch.OutOfMemoryError) as error:
            logger.warning("some passes run kernel by kernel, because capturing CUDA graphs failed: %s", str(error))
            self._takes_more = False
        else:
            self._num_bytes += taken
            return passes[1]
        del passes
        gc.collect()  # graphs are in reference cycles, which keep their memory until collected
        torch.cuda.empty_cache()
        return None


class _Passes:
    """A forward and a backward pass that use the same memory every time, so that they can be captured and replayed."""

    def __init__(
        self, backbone: nn.Module, longest: int, bounds: Sequence[int], sums: Mapping[nn.Parameter, Tensor]
    ) -> None:
        self._backbone = backbone
        self._longest = longest
        device = next(backbone.parameters()).device
        # Stand-ins that share the weights' memory: autograd runs a weight's own node on the stream it was created on,
        # which is not the capture stream.
        self._weights = {}
        self._embedding = _embedding_of_rows(backbone)
        # The input embedding's gradient has few nonzero rows. It is added row by row, without a dense [V, D] tensor.
        self._row_sums: Tensor | None = None
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
        # Adding gradients is bound by memory bandwidth, matrix products by arithmetic: overlapping them saves time.
        self._adding = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._held: list[Tensor] = []
        self._gradient: Tensor | None = None
        self._hidden: Tensor | None = None
        self.launch_forward: Callable[[], None] = self.run_forward
        self.launch_backward: Callable[[], None] = self.run_backward
        # An input of the `_Replay` node that requires a gradient; without one autograd would not call its backward.
        self.anchor = torch.zeros((), device=device, requires_grad=True)
        # Weak reference to the autograd node whose backward pass is outstanding.
        self.user: Callable[[], Any] = lambda: None
        self.pool: Any = None  # memory pool of the graphs

    @property
    def awaits_backward(self) -> bool:
        """Whether the backward pass of the latest forward pass can still be called."""
        return self.user() is not None

    def run_forward(self) -> None:
        """Run the forward pass over the buffers that `read` filled, kernel by kernel."""
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
        """Add the gradient of the tokens' embedding rows to the sums, in a fixed order."""
        if (padding := self._embedding.padding_idx) is not None:
            gradient = gradient.masked_fill((token_ids == padding)[..., None], 0.0)
        self._row_sums.index_put_((token_ids.flatten(),), gradient.flatten(0, -2).float(), accumulate=True)

    def run_backward(self) -> None:
        """Run the backward pass kernel by kernel, from `_gradient` (zeros until `backward` sets it), into the sums."""
        self._hidden.backward(self._gradient)
        self._hidden = self._hidden.detach()
        self._await_sums()

    def _adder(self, total: Tensor) -> Callable[[Tensor], None]:
        """Return a hook that moves a weight's gradient to its sum, on the second stream if there is one."""

        def add(weight: Tensor) -> None:
            gradient = weight.grad
            weight.grad = None
            if self._adding is None:
                accumulate_(total, gradient)
                return
            self._adding.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._adding):
                accumulate_(total, gradient)
            self._held.append(gradient)  # or the allocator could reuse its memory before the second stream has read it
            if sum(each.nbytes for each in self._held) > _MAX_HELD_BYTES:
                self._await_sums()

        return add

    def _await_sums(self) -> None:
        if self._held:
            torch.cuda.current_stream().wait_stream(self._adding)
            self._held.clear()

    def adopt_gradient(self, other: "_Passes") -> None:
        """Use the same gradient tensor as `other`."""
        self._gradient = other._gradient

    def read(self, batch: TokenBatch, bounds: Sequence[int]) -> None:
        """Copy a pack into the buffers, with the bounds of the pack it is filled up to."""
        count = batch.input_ids.shape[1]
        for own, part in ((self._input_ids, batch.input_ids), (self._position_ids, batch.position_ids)):
            own[:, :count].copy_(part)
            own[:, count:].zero_()
        self._cu_seqlens.copy_(to_device(torch.tensor(bounds, dtype=torch.int32), self._cu_seqlens.device))

    def forward(self, count: int) -> Tensor:
        """Return the hidden states of the first `count` tokens. The next forward pass overwrites them."""
        self.launch_forward()
        return self._hidden[:, :count].detach()

    def backward(self, gradient: Tensor) -> None:
        """Run the backward pass from the gradient of the hidden states that `forward` returned."""
        count = gradient.shape[1]
        self._gradient[:, :count].copy_(gradient)
        self._gradient[:, count:].zero_()
        self.launch_backward()
        self.user = lambda: None


class _Replay(torch.autograd.Function):
    """A node of the autograd graph whose forward and backward are the two passes."""

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
    """Passes rows of an embedding on, and hands their gradient to a function in place of autograd."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, take: Callable[[Tensor], None], anchor: Tensor) -> Tensor:
        ctx.take = take
        return rows.clone()  # clone: a model may change them in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.take(gradient)
        return None, None, None


def _embedding_of_rows(backbone: nn.Module) -> nn.Embedding | None:
    """Return the input embedding if its gradient can be added row by row, else None.

    That needs a plain lookup (no scaling by frequency, no norm bound) and a weight that no other module uses.
    """
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
    """Run `warm_up`, then capture `passes` as CUDA graphs. Return the bytes that the graphs take and those still free.

    The warm-up compiles kernels and then runs in a mode that raises RuntimeError where the host waits for the device.
    This finds passes that cannot be captured before capture begins, because a failed capture never frees its memory.
    """
    stream = _capture_stream()
    mode = torch.cuda.get_sync_debug_mode()
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
    torch.cuda.empty_cache()  # return what earlier passes left in the cache, so that the graphs can have it
    before = torch.cuda.mem_get_info()[0]
    forward = torch.cuda.CUDAGraph()
    backward = torch.cuda.CUDAGraph()
    passes.pool = pool or torch.cuda.graph_pool_handle()
    passes.adopt_gradient(warm_up)  # a tensor allocated during capture would belong to the graph's pool
    with torch.cuda.graph(forward, pool=passes.pool, stream=stream):
        passes.run_forward()
    with torch.cuda.graph(backward, pool=passes.pool, stream=stream):
        passes.run_backward()
    passes.launch_forward = forward.replay
    passes.launch_backward = backward.replay
    torch.cuda.empty_cache()
    left = torch.cuda.mem_get_info()[0]
    return before - left, left


@functools.cache
def _capture_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # one for all captures: cuBLAS allocates a workspace per stream
