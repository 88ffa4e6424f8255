"""AdamW with its states in host memory or on a disk, for models whose states leave no room on the device."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from rlhf_models.host_states import HostStates, zeros_on_host
from rlhf_train.engine import bf16_moments

CHUNK_SIZE = 1 << 23  # elements of master weights: with their two moments in float32, 96 MiB
_MULTIPLE = 64  # elements, so that every place is aligned
_NUM_PLACES = 3  # on the device: a chunk comes, another is updated, a third leaves


class HostAdamW(torch.optim.AdamW):
    """AdamW for bfloat16 weights, whose float32 master weights and moments are in host memory.

    An update brings them to the device chunk by chunk, and copies earlier chunks back meanwhile. It changes every
    element as torch.optim.AdamW does, to the last bit, or with moments in bfloat16 as `Bf16MomentsAdamW`.
    """

    def take_over(self, optimizer: Any, rank: int, dtype: torch.dtype, folder: str | None = None) -> None:
        """Move the master weights of DeepSpeed's bfloat16 optimizer to host memory, and start moments of type `dtype`.

        `rank` is the number of this rank among those that share them out, and the memory may be a file in `folder`.
        DeepSpeed's step then reduces and clips gradients, and gathers weights. The update between them is `step`.

        Raises EngineError when there is no place for the states.
        """
        masters = optimizer.fp32_groups_flat_partition
        gradients = optimizer.fp32_groups_gradient_flat_partition
        weights = [parts[rank] for parts in optimizer.bf16_partitioned_groups]
        self._on_device = dict(zip(masters, zip(gradients, weights, strict=True), strict=True))
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
        # Without them, DeepSpeed neither gives them gradients, which are on another device, nor rounds them to weights.
        optimizer.fp32_groups_flat_partition = []
        optimizer._hp_optimizer_states_linked = True

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update the weights. Returns when the states are in host memory again."""
        [device] = {weight.device for _, weight in self._on_device.values()}
        longest = max(map(len, self._on_device))
        size = min(CHUNK_SIZE, longest + -longest % _MULTIPLE)
        dtypes = [torch.float32, *[next(iter(self.state.values()))["exp_avg"].dtype] * 2]
        places = _Places(size, device, dtypes)
        for group in self.param_groups:
            for master in group["params"]:
                state = self.state[master]
                states = (master, state["exp_avg"], state["exp_avg_sq"])
                num_updates = float(state["step"])
                chunks = zip(*(part.split(size) for part in (*states, *self._on_device[master])), strict=True)
                for number, chunk in enumerate(chunks):
                    _update(group, places, num_updates, number * size, chunk[:3], *chunk[3:])
                state["step"] += 1
        places.finish()


def _update(
    group: Mapping[str, Any],
    places: "_Places",
    num_updates: float,
    start: int,
    states: Sequence[Tensor],
    gradient: Tensor,
    weight: Tensor,
) -> None:
    """Make update number `num_updates`, from 0, of one chunk, whose first element is number `start`: master weights and
    two moments, [n] each."""
    master, average, square = places.bring(states)
    if average.dtype == torch.bfloat16:
        bf16_moments.update_(group, int(num_updates) + 1, master, gradient, average, square, start=start)
        weight.copy_(master)
        places.take_back(states)
        return
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
    places.take_back(states)


class _Places:
    """Memory on the device through which chunks pass, in order. On a GPU, copies overlap with each other."""

    def __init__(self, size: int, device: torch.device, dtypes: Sequence[torch.dtype]) -> None:
        self._places = [[torch.empty(size, device=device, dtype=dtype) for dtype in dtypes] for _ in range(_NUM_PLACES)]
        self._number = 0  # of the current chunk
        self._streams = [torch.cuda.Stream(device) for _ in range(2)] if device.type == "cuda" else []
        self._left: dict[int, torch.cuda.Event] = {}  # by place: the chunk in it is in host memory again
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream())  # the memory may still be in use

    def bring(self, chunk: Sequence[Tensor]) -> list[Tensor]:
        """Return a chunk of tensors [n] on the device, for the current stream."""
        place = self._place(chunk)
        if not self._streams:
            _copy(place, chunk)
            return place
        coming = self._streams[0]
        with torch.cuda.stream(coming):
            if self._number >= _NUM_PLACES:
                coming.wait_event(self._left[self._number % _NUM_PLACES])
            _copy(place, chunk)
        torch.cuda.current_stream().wait_stream(coming)
        return place

    def take_back(self, chunk: Sequence[Tensor]) -> None:
        """Copy what is in the place of the last `bring` to its host memory."""
        place = self._place(chunk)
        if not self._streams:
            _copy(chunk, place)
        else:
            leaving = self._streams[1]
            leaving.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(leaving):
                _copy(chunk, place)
            self._left[self._number % _NUM_PLACES] = leaving.record_event()
        self._number += 1

    def finish(self) -> None:
        """Wait until all chunks are in host memory."""
        for stream in self._streams:
            stream.synchronize()

    def _place(self, chunk: Sequence[Tensor]) -> list[Tensor]:
        return [part[: len(chunk[0])] for part in self._places[self._number % _NUM_PLACES]]


def _copy(to: Sequence[Tensor], source: Sequence[Tensor]) -> None:
    for target, part in zip(to, source, strict=True):
        target.copy_(part, non_blocking=True)
