"""AdamW with its states in host memory or on a disk, for models whose states leave no room on the device."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from rlhf_models.host_states import HostStates, zeros_on_host
from rlhf_train.engine import bf16_moments
from rlhf_train.engine.deepspeed_internals import leave_stage_1, leave_stage_3

CHUNK_SIZE = 1 << 23  # elements of master weights: with their two moments in float32, 96 MiB
_MULTIPLE = 64  # elements, so that every buffer is aligned
_NUM_BUFFERS = 3  # on the device: a chunk comes, another is updated, a third leaves


class _Part(NamedTuple):
    """What an update of some weights needs: [n] each.

    Attributes:
        master: float32 weights, in host memory.
        weight: bfloat16 weights, on the device.
        gradient: float32, on the device; None where DeepSpeed makes it for each update.
    """

    master: Tensor
    weight: Tensor
    gradient: Tensor | None


class HostAdamW(torch.optim.AdamW):
    """AdamW for bfloat16 weights, whose float32 master weights and moments are in host memory.

    An update brings them to the device chunk by chunk, and copies earlier chunks back meanwhile. It changes every
    element as torch.optim.AdamW does, to the last bit, or with moments in bfloat16 as `Bf16MomentsAdamW`.
    """

    def take_over(
        self, wrapper: Any, *, is_sharded: bool, rank: int, dtype: torch.dtype, folder: str | None = None
    ) -> None:
        """Move the master weights of DeepSpeed's bfloat16 optimizer to host memory, and start moments of type `dtype`.

        `wrapper` is that of ZeRO stage 1, or of stage 3 if `is_sharded`, and `rank` the number of this rank among those
        that share the weights out. The memory may be a file in `folder`. DeepSpeed's step then reduces and clips
        gradients, and gathers weights. The update between them is `step`.

        Raises EngineError when there is no place for the states, or DeepSpeed's master weights are not those of the
        weights.
        """
        parts = leave_stage_3(wrapper) if is_sharded else leave_stage_1(wrapper, rank)
        self._parts = {known: _Part(*tensors) for known, tensors in parts.items()}
        masters = [part.master for part in self._parts.values()]
        pinned = any(master.is_cuda for master in masters)
        self._host_states = HostStates(folder=folder)
        self._host_states.offload(masters)
        moments = zeros_on_host(
            [master.to("meta", dtype) for master in [*masters, *masters]], pinned=pinned, folder=folder
        )
        for master, average, square in zip(masters, moments, moments[len(masters) :], strict=False):
            self.state[master] |= {"step": torch.zeros(()), "exp_avg": average, "exp_avg_sq": square}
        if pinned:
            torch.cuda.empty_cache()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update the weights. Returns when the states are in host memory again."""
        [device] = {part.weight.device for part in self._parts.values()}
        longest = max(len(part.master) for part in self._parts.values())
        size = min(CHUNK_SIZE, longest + -longest % _MULTIPLE)
        dtypes = [torch.float32, *[next(iter(self.state.values()))["exp_avg"].dtype] * 2]
        buffers = _DeviceBuffers(size, device, dtypes)
        for group in self.param_groups:
            for known in group["params"]:
                part = self._parts[known]
                state = self.state[part.master]
                states = (part.master, state["exp_avg"], state["exp_avg_sq"])
                gradient = known.grad if part.gradient is None else part.gradient
                num_updates = float(state["step"])
                chunks = zip(*(tensor.split(size) for tensor in (*states, gradient, part.weight)), strict=True)
                for number, chunk in enumerate(chunks):
                    _update(group, buffers, num_updates, number * size, chunk[:3], *chunk[3:])
                state["step"] += 1
        buffers.finish()


def _update(
    group: Mapping[str, Any],
    buffers: "_DeviceBuffers",
    num_updates: float,
    start: int,
    states: Sequence[Tensor],
    gradient: Tensor,
    weight: Tensor,
) -> None:
    """Make update number `num_updates`, from 0, of one chunk, whose first element is number `start`: master weights and
    two moments, [n] each."""
    master, average, square = buffers.bring(states)
    if average.dtype == torch.bfloat16:
        bf16_moments.update_(group, int(num_updates) + 1, master, gradient, average, square, start=start)
    else:
        beta1, beta2 = group["betas"]
        adamw(
            [master],
            [gradient],
            [average],
            [square],
            [],
            [torch.full((), num_updates, dtype=torch.float32, device=gradient.device)],
            foreach=group["foreach"],
            fused=group["fused"],
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
    weight.copy_(master)
    buffers.take_back(states)


class _DeviceBuffers:
    """Memory on the device through which chunks pass, in order. On a GPU, copies overlap with each other."""

    def __init__(self, size: int, device: torch.device, dtypes: Sequence[torch.dtype]) -> None:
        self._buffers = []
        for _ in range(_NUM_BUFFERS):
            self._buffers.append([torch.empty(size, device=device, dtype=dtype) for dtype in dtypes])
        self._number = 0  # of the current chunk
        self._streams = [torch.cuda.Stream(device) for _ in range(2)] if device.type == "cuda" else []
        self._left: dict[int, torch.cuda.Event] = {}  # by buffer: the chunk in it is in host memory again
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream())  # the memory may still be in use

    def bring(self, chunk: Sequence[Tensor]) -> list[Tensor]:
        """Return a chunk of tensors [n] on the device, for the current stream."""
        buffer = self._buffer(chunk)
        if not self._streams:
            _copy(buffer, chunk)
            return buffer
        coming = self._streams[0]
        with torch.cuda.stream(coming):
            if self._number >= _NUM_BUFFERS:
                coming.wait_event(self._left[self._number % _NUM_BUFFERS])
            _copy(buffer, chunk)
        torch.cuda.current_stream().wait_stream(coming)
        return buffer

    def take_back(self, chunk: Sequence[Tensor]) -> None:
        """Copy what is in the buffer of the last `bring` to its host memory."""
        buffer = self._buffer(chunk)
        if not self._streams:
            _copy(chunk, buffer)
        else:
            leaving = self._streams[1]
            leaving.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(leaving):
                _copy(chunk, buffer)
            self._left[self._number % _NUM_BUFFERS] = leaving.record_event()
        self._number += 1

    def finish(self) -> None:
        """Wait until all chunks are in host memory."""
        for stream in self._streams:
            stream.synchronize()

    def _buffer(self, chunk: Sequence[Tensor]) -> list[Tensor]:
        return [part[: len(chunk[0])] for part in self._buffers[self._number % _NUM_BUFFERS]]


def _copy(to: Sequence[Tensor], source: Sequence[Tensor]) -> None:
    for target, part in zip(to, source, strict=True):
        target.copy_(part, non_blocking=True)
