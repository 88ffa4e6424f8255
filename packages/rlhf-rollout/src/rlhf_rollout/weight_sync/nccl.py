"""Weights that the trainer broadcasts to the workers of all engines: by NCCL between GPUs, by gloo between CPUs.

The trainer and the workers form a group of torch.distributed beside the default groups of DeepSpeed and vLLM. They keep
it from one update to the next.
"""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from rlhf_data.errors import EngineError
from rlhf_rollout.host import stay_on_loopback

TIMEOUT_S = 60.0  # for members to meet, and for one broadcast
_POLL_S = 0.0005


class BroadcastHandle(NamedTuple):
    """How the workers of an engine take part in a broadcast.

    Attributes:
        host, port: of the store where the members of the group meet.
        group: name of the group in the store.
        num_ranks: members of the group. The trainer is rank 0.
        first_rank: of the engine's workers, which have consecutive ranks.
        number: of the broadcast in the group, so that each has a handle of its own.
        size_bytes: of what is sent.
    """

    host: str
    port: int
    group: str
    num_ranks: int
    first_rank: int
    number: int
    size_bytes: int


class BroadcastGroup:
    """This process's membership in a group. The members meet when they first broadcast.

    Attributes:
        name: of the group.
    """

    def __init__(self, name: str, store: distributed.Store, rank: int, num_ranks: int, device: torch.device) -> None:
        self.name = name
        self._place = (distributed.PrefixStore(name, store), rank, num_ranks)
        self._on_gpu = device.type == "cuda"
        self._group: Any = None

    def broadcast(self, data: Tensor) -> None:
        """Send rank 0's `data`, [n] uint8 on the group's device, to all members. Collective.

        Raises EngineError if it takes longer than `TIMEOUT_S`, or a member has left. The group can then send no more.
        """
        options = distributed.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        try:
            if self._group is None:
                self._group = self._meet()
            work = self._group.broadcast([data], options)
            until = time.monotonic() + TIMEOUT_S
            # To wait for a GPU would take no time limit: a member that has died would block this process for ever.
            while not work.is_completed():
                if time.monotonic() > until:
                    self._group.abort()
                    raise EngineError(f"a broadcast of weights took longer than {TIMEOUT_S:g} s")
                time.sleep(_POLL_S)
            work.wait()
        except RuntimeError as error:
            hint = "an engine may have died; if all live, ``weight_transfer=shared_memory`` sends through host memory"
            raise EngineError(f"weights could not be broadcast: {error}", hint=hint) from error

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.abort()

    def _meet(self) -> Any:
        """Wait for the other members; return torch's group."""
        limit = timedelta(seconds=TIMEOUT_S)
        if not self._on_gpu:
            return distributed.ProcessGroupGloo(*self._place, limit)
        options = distributed.ProcessGroupNCCL.Options()
        # NCCL's own watchdog ends the process: the limit here comes first.
        options._timeout = 2 * limit
        return distributed.ProcessGroupNCCL(*self._place, options)


def opener() -> Callable[[BroadcastHandle, torch.device], Tensor]:
    """Return the function that receives a broadcast, and which keeps this worker in its group."""
    joined: list[BroadcastGroup] = []

    def open_memory(handle: BroadcastHandle, device: torch.device) -> Tensor:
        """Return what the trainer broadcasts, [size_bytes] uint8 on `device`. Raises as `BroadcastGroup.broadcast`."""
        if not joined or joined[0].name != handle.group:
            for group in joined:
                group.close()
            joined[:] = [_join(handle, device)]
        data = torch.empty(handle.size_bytes, dtype=torch.uint8, device=device)
        joined[0].broadcast(data)
        return data

    return open_memory


def _join(handle: BroadcastHandle, device: torch.device) -> BroadcastGroup:
    stay_on_loopback(handle.host)
    # The workers of an engine with tensor parallelism are the ranks of their default group.
    own = distributed.get_rank() if distributed.is_initialized() else 0
    try:
        store = distributed.TCPStore(
            handle.host, handle.port, None, False, timedelta(seconds=TIMEOUT_S), wait_for_workers=False
        )
        return BroadcastGroup(handle.group, store, handle.first_rank + own, handle.num_ranks, device)
    except RuntimeError as error:
        message = f"the group that broadcasts weights cannot be joined at {handle.host}:{handle.port}: {error}"
        raise EngineError(message, hint="the nodes of a run must reach each other on all ports") from error
