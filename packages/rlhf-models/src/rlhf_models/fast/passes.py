"""A forward and a backward pass of a backbone over the same memory every time, and their capture as CUDA graphs."""

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from rlhf_kernels import accumulate_
from rlhf_models.attention.packed import NO_MASK
from rlhf_models.attention.shared_prompts import bounds_arguments
from rlhf_models.batch import TokenBatch, to_device

# Memory that must stay free, as a share of that of the graphs. Packs that run without graphs need as much again from
# the ordinary pool, and the head and its logits get half as much.
FREE_SHARE = 1.5
_MAX_HELD_BYTES = 512 << 20  # gradients kept alive while a second stream adds them to their sums


class Passes:
    """A forward and a backward pass that use the same memory every time, so that they can be captured and replayed.

    Args:
        backbone: in training mode.
        longest: largest number of tokens per sequence.
        bounds: bounds of a pack of this shape; its last element is the number of tokens.
        sums: the float32 tensor to which the gradient of each trained weight is added.
    """

    def __init__(
        self, backbone: nn.Module, longest: int, bounds: Sequence[int], sums: Mapping[nn.Parameter, Tensor]
    ) -> None:
        self._backbone = backbone
        self._longest = longest
        device = next(backbone.parameters()).device
        # Parameters that share the weights' memory. Autograd runs the node that accumulates a weight's gradient on the
        # stream on which it was created, and that is not the capture stream for the weights themselves.
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
        # Two tensors, not two views into one: for a view, layers would be compiled again.
        self._input_ids = torch.zeros(1, bounds[-1], dtype=torch.int64, device=device)
        self._position_ids = torch.zeros_like(self._input_ids)
        self._cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=device)
        # A second stream adds gradients to their sums: that is bound by memory bandwidth and the matrix products by
        # arithmetic, so running both at the same time saves time.
        self._adding = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._held: list[Tensor] = []  # gradients that the second stream is still reading
        self._gradient: Tensor | None = None  # gradient of the hidden states, the input of the backward pass
        self._hidden: Tensor | None = None  # output of the forward pass
        self.launch_forward: Callable[[], None] = self.run_forward
        self.launch_backward: Callable[[], None] = self.run_backward
        # An input of the `Replay` node that requires a gradient; without one autograd would not call its backward.
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
        if self._gradient is None:  # its shape is known only after the first pass
            self._gradient = torch.zeros_like(self._hidden)

    def _track_rows(self, embedding: nn.Module, inputs: tuple[Tensor], rows: Tensor) -> Tensor:
        """Hook of the input embedding: have the gradient of its output `rows` added to the sums."""
        return _Rows.apply(rows, functools.partial(self._add_rows, inputs[0]), self._row_anchor)

    def _add_rows(self, token_ids: Tensor, gradient: Tensor) -> None:
        """Add the gradient of the tokens' embedding rows to the sums, in a fixed order."""
        if (padding := self._embedding.padding_idx) is not None:
            # torch gives the padding row no gradient; the function that adds rows must not either.
            gradient = gradient.masked_fill((token_ids == padding)[..., None], 0.0)
        # With `accumulate`, index_put_ sorts the ids and adds in order; index_add_ adds atomically, in any order.
        self._row_sums.index_put_((token_ids.flatten(),), gradient.flatten(0, -2).float(), accumulate=True)

    def run_backward(self) -> None:
        """Run the backward pass kernel by kernel, from `_gradient` (zeros until `backward` sets it), into the sums."""
        self._hidden.backward(self._gradient)
        self._hidden = self._hidden.detach()  # releases the autograd graph and its activations
        self._await_sums()

    def _adder(self, total: Tensor) -> Callable[[Tensor], None]:
        """Return a hook that moves a weight's gradient to its sum, on the second stream if there is one."""

        def add(weight: Tensor) -> None:
            gradient = weight.grad
            weight.grad = None  # or autograd would add the next gradient to this one
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
        """Make the current stream wait for the second one, and release the gradients that it has added."""
        if self._held:
            torch.cuda.current_stream().wait_stream(self._adding)
            self._held.clear()

    def adopt_gradient(self, other: "Passes") -> None:
        """Use the same gradient tensor as `other`."""
        self._gradient = other._gradient

    def read(self, batch: TokenBatch, bounds: Sequence[int]) -> None:
        """Copy a pack into the buffers, with the bounds of the pack it is filled up to."""
        count = batch.input_ids.shape[1]
        for own, part in ((self._input_ids, batch.input_ids), (self._position_ids, batch.position_ids)):
            own[:, :count].copy_(part)
            # Fillers have token 0 at position 0: any valid tokens do, because their results are not used.
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
        self._gradient[:, count:].zero_()  # fillers add nothing to the gradients of the weights
        self.launch_backward()
        self.user = lambda: None


class Replay(torch.autograd.Function):
    """A node of the autograd graph whose forward and backward are the two passes.

    Its only differentiable input is the anchor of `Passes`: the gradients of the weights go to their sums and do not
    travel through the caller's autograd graph.
    """

    @staticmethod
    def forward(ctx: Any, passes: Passes, count: int, anchor: Tensor) -> Tensor:
        ctx.passes = passes
        # Weak: when the caller drops the graph without a backward pass, the passes are free for the next pack.
        passes.user = weakref.ref(ctx)
        return passes.forward(count)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.passes.backward(gradient)
        return None, None, None


class _Rows(torch.autograd.Function):
    """Returns the rows of an embedding unchanged, and gives their gradient to a function instead of to autograd."""

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


def capture(warm_up: Passes, passes: Passes, pool: Any) -> tuple[int, int]:
    """Run `warm_up`, then capture `passes` as CUDA graphs. Return the bytes that the graphs take and those still free.

    The warm-up compiles kernels and then runs in a mode that raises RuntimeError where the host waits for the device.
    This finds passes that cannot be captured before capture begins, because a failed capture never frees its memory.
    For the same reason, the first graphs are not captured if their memory would leave less than `FREE_SHARE` of it.
    Forward and backward are two graphs, because the head and the loss run between them, kernel by kernel.
    """
    stream = _capture_stream()
    mode = torch.cuda.get_sync_debug_mode()
    stream.wait_stream(torch.cuda.current_stream())
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved()
    try:
        with torch.cuda.stream(stream):
            # The first round may wait for the device: torch.compile and autotuning do.
            for strictness in (mode, "error"):
                torch.cuda.set_sync_debug_mode(strictness)
                warm_up.run_forward()
                warm_up.run_backward()
    finally:
        torch.cuda.set_sync_debug_mode(mode)
        torch.cuda.synchronize()
    needed = torch.cuda.memory_reserved() - reserved
    torch.cuda.empty_cache()  # return what earlier passes left in the cache, so that the graphs can have it
    before = torch.cuda.mem_get_info()[0]
    if pool is None and before < (1 + FREE_SHARE) * needed:
        raise torch.OutOfMemoryError(f"they would take {needed >> 20} of {before >> 20} MiB")
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
