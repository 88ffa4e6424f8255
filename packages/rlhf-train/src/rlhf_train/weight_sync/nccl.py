"""Weight sync by broadcast from rank 0 to the workers of all engines: by NCCL between GPUs, by gloo between CPUs."""

import secrets
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from threading import Thread

import torch
from torch import Tensor, distributed

from rlhf_data.errors import EngineError
from rlhf_rollout.host import stay_on_loopback
from rlhf_rollout.ray_actors import node_address
from rlhf_rollout.weight_sync import Medium
from rlhf_rollout.weight_sync.nccl import TIMEOUT_S, BroadcastGroup, BroadcastHandle


class Broadcaster:
    """Keeps the group of the trainer and its engines from one update to the next.

    Args:
        workers_per_engine: processes of each engine, one per GPU.
    """

    def __init__(self, workers_per_engine: int) -> None:
        self._workers_per_engine = workers_per_engine
        self._device = torch.device("cpu")
        if torch.cuda.is_available():
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._store: distributed.TCPStore | None = None
        self._address = ("", 0)
        self._members: tuple[str, ...] = ()
        self._group: BroadcastGroup | None = None
        # Sending from another stream than the one that fills the next bucket, it waits for nothing there.
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._num_sent = 0

    def open_buffer(self, size_bytes: int, engines: Sequence[str]) -> "NcclBuffer":
        """Return a buffer for these engines, by the names of their processes. New ones need a new group."""
        if self._group is None or self._members != tuple(engines):
            self.leave()
            self._members = tuple(engines)
            num_ranks = 1 + len(engines) * self._workers_per_engine
            self._group = BroadcastGroup(secrets.token_hex(16), self._meeting_place(), 0, num_ranks, self._device)
        return NcclBuffer(self, torch.empty(size_bytes, dtype=torch.uint8, device=self._device), len(engines))

    def handles(self, num_engines: int, size_bytes: int) -> list[BroadcastHandle]:
        """Return the handles of the next broadcast, one per engine."""
        if self._group is None:
            raise EngineError("the group that broadcasts weights has lost a member")
        size = self._workers_per_engine
        own = {"group": self._group.name, "num_ranks": 1 + num_engines * size}
        place = dict(zip(("host", "port"), self._address, strict=True))
        return [
            BroadcastHandle(**place, **own, first_rank=1 + engine * size, number=self._num_sent, size_bytes=size_bytes)
            for engine in range(num_engines)
        ]

    def broadcast(self, data: Tensor) -> None:
        """Send `data` to all engines. Raises EngineError as `BroadcastGroup.broadcast`."""
        assert self._group is not None
        self._num_sent += 1
        with torch.cuda.stream(self._stream):  # does nothing without a stream
            self._group.broadcast(data)

    def leave(self) -> None:
        """Leave the group, if there is one. The next buffer begins another."""
        if self._group is not None:
            self._group.close()
            self._group = None

    def _meeting_place(self) -> distributed.TCPStore:
        """Return the store of this process, which listens on the address by which other nodes reach this one."""
        if self._store is None:
            host = node_address()
            stay_on_loopback(host)
            listener = socket.create_server((host, 0), backlog=1024)
            self._address = (host, listener.getsockname()[1])
            self._store = distributed.TCPStore(
                *self._address,
                None,
                True,
                timedelta(seconds=TIMEOUT_S),
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )
        return self._store


class NcclBuffer:
    """A `BucketBuffer` that a thread broadcasts while the engines receive it and another part of it is written."""

    medium: Medium = "nccl"
    holds_two = True

    def __init__(self, broadcaster: Broadcaster, data: Tensor, num_engines: int) -> None:
        self.data = data
        self._sent: Tensor | None = None  # what was published last
        self._spare: Tensor | None = None  # of the same size, once there were two fillings
        self._broadcaster = broadcaster
        self._num_engines = num_engines
        self._end_bytes = 0
        self._thread: Thread | None = None
        self._error: EngineError | None = None

    @property
    def handles(self) -> Sequence[BroadcastHandle]:
        """See `BucketBuffer`. Each filling has handles of its own, so that engines receive each one."""
        return self._handles

    def reserve(self, end_bytes: int) -> None:
        """See `BucketBuffer`."""
        if self._sent is self.data:
            self.data = torch.empty_like(self.data) if self._spare is None else self._spare
            self._spare = self._sent
        self._end_bytes = end_bytes

    def publish(self) -> None:
        """See `BucketBuffer`. Starts the broadcast, which waits for the engines."""
        self._handles = self._broadcaster.handles(self._num_engines, self._end_bytes)
        if self.data.is_cuda:
            torch.cuda.current_stream(self.data.device).synchronize()
        self._sent = self.data
        self._thread = Thread(target=self._send, args=[self.data[: self._end_bytes]], daemon=True)
        self._thread.start()

    def settle(self) -> str | None:
        """See `BucketBuffer`. A group that has lost an engine is of no use to the others."""
        assert self._thread is not None
        self._thread.join()
        self._thread = None
        if self._error is None:
            return None
        self._broadcaster.leave()
        return str(self._error)

    def close(self) -> None:
        """See `BucketBuffer`. Ends a broadcast that was not settled, as an engine may not have taken part in it."""
        if self._thread is not None:
            self._broadcaster.leave()
        self.data = self.data.new_empty(0)
        self._sent = None
        self._spare = None

    def _send(self, data: Tensor) -> None:
        try:
            self._broadcaster.broadcast(data)
        except EngineError as error:
            self._error = error


def opener(workers_per_engine: int) -> Callable[[int, Sequence[str]], NcclBuffer]:
    """Return the function that opens buffers for the engines of one run."""
    return Broadcaster(workers_per_engine).open_buffer
