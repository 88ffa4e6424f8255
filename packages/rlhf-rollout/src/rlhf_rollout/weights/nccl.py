"""Weights that the trainer broadcasts to the workers of all engines: by NCCL between GPUs, by gloo between CPUs.

The trainer and the workers form a group of torch.distributed beside the default groups of DeepSpeed and vLLM. They keep
it from one update to the next. The trainer is rank 0.
"""

import secrets
import socket
import time
from collections.abc import Sequence
from concurrent.futures import Future
from datetime import timedelta
from threading import Thread
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from rlhf_data.errors import EngineError
from rlhf_rollout.host import stay_on_loopback
from rlhf_rollout.weights.buffer import BucketBuffer, OpenBuffer, OpenMemory

TIMEOUT_S = 60.0  # for members to meet, and for one broadcast
_POLL_S = 0.0005


class BroadcastHandle(NamedTuple):
    """How the workers of an engine take part in a broadcast.

    Attributes:
        host, port: address of the store where the members of the group meet.
        group: name of the group in the store.
        num_ranks: members of the group.
        first_rank: rank of the engine's first worker; its workers have consecutive ranks.
        number: sequence number of the broadcast in the group, so that each has a handle of its own.
        size_bytes: how much is sent.
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
        name: the group's name in the store.
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
        """Return torch's group. For gloo, wait for the other members; RuntimeError if it takes over `TIMEOUT_S`."""
        limit = timedelta(seconds=TIMEOUT_S)
        if not self._on_gpu:
            met: Future[Any] = Future()
            Thread(target=self._meet_by_gloo, args=[met, limit], daemon=True).start()
            try:
                return met.result(TIMEOUT_S)
            except TimeoutError:
                raise RuntimeError(f"the members of the group did not meet within {TIMEOUT_S:g} s") from None
        options = distributed.ProcessGroupNCCL.Options()
        # NCCL's own watchdog ends the process: the limit here comes first.
        options._timeout = 2 * limit
        return distributed.ProcessGroupNCCL(*self._place, options)

    def _meet_by_gloo(self, met: Future[Any], limit: timedelta) -> None:
        """Set `met` to the group. Gloo waits several times the `limit` for a member that came and hangs."""
        try:
            met.set_result(distributed.ProcessGroupGloo(*self._place, limit))
        except RuntimeError as error:
            met.set_exception(error)


class _Broadcaster:
    """Keeps the trainer in the group with its engines from one update to the next.

    Attributes:
        group: None before the first update, and once a member is lost. The next buffer then begins another.
    """

    def __init__(self, workers_per_engine: int, host: str) -> None:
        self._workers_per_engine = workers_per_engine
        self._host = host
        self._device = torch.device("cpu")
        if torch.cuda.is_available():
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._store: distributed.TCPStore | None = None
        self._members: tuple[str, ...] = ()
        self.group: BroadcastGroup | None = None
        # Sending from another stream than the one that fills the next bucket, it waits for nothing there.
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._num_sent = 0

    def open_buffer(self, size_bytes: int, engines: Sequence[str]) -> "Buffer":
        """Return a buffer for these engines, by the names of their processes. New ones need a new group."""
        if self.group is None or self._members != tuple(engines):
            self.leave()
            self._members = tuple(engines)
            num_ranks = 1 + len(engines) * self._workers_per_engine
            self.group = BroadcastGroup(secrets.token_hex(16), self._meeting_place(), 0, num_ranks, self._device)
        return Buffer(self, torch.empty(size_bytes, dtype=torch.uint8, device=self._device))

    def handles(self, size_bytes: int) -> list[BroadcastHandle]:
        """Return the handles of the next broadcast, one per engine."""
        if self.group is None or self._store is None:
            raise EngineError("the group that broadcasts weights has lost a member")
        num_ranks = 1 + len(self._members) * self._workers_per_engine
        place = (self._store.host, self._store.port, self.group.name, num_ranks)
        first_ranks = range(1, num_ranks, self._workers_per_engine)
        return [BroadcastHandle(*place, first_rank, self._num_sent, size_bytes) for first_rank in first_ranks]

    def broadcast(self, data: Tensor) -> None:
        """Send `data` to all engines. Raises EngineError as `BroadcastGroup.broadcast`."""
        assert self.group is not None
        self._num_sent += 1
        with torch.cuda.stream(self._stream):  # does nothing without a stream
            self.group.broadcast(data)

    def leave(self) -> None:
        """Leave the group, if there is one."""
        if self.group is not None:
            self.group.close()
            self.group = None

    def _meeting_place(self) -> distributed.TCPStore:
        """Return the store of this process, which listens on the address by which other nodes reach this one."""
        if self._store is None:
            stay_on_loopback(self._host)
            listener = socket.create_server((self._host, 0), backlog=1024)
            address = (self._host, listener.getsockname()[1])
            limit = timedelta(seconds=TIMEOUT_S)
            self._store = distributed.TCPStore(
                *address, None, True, limit, wait_for_workers=False, master_listen_fd=listener.detach()
            )
        return self._store


class Buffer(BucketBuffer):
    """Memory that a thread broadcasts while the engines receive it and another part of it is written."""

    holds_two = True

    def __init__(self, broadcaster: _Broadcaster, data: Tensor) -> None:
        self.data = data
        self._sent: Tensor | None = None  # what was published last
        self._spare: Tensor | None = None  # a second buffer of the same size, once there were two fillings
        self._broadcaster = broadcaster
        self._end_bytes = 0
        self._thread: Thread | None = None
        self._error: EngineError | None = None

    @classmethod
    def sender(cls, workers_per_engine: int, host: str) -> OpenBuffer:
        """See `BucketBuffer`."""
        return _Broadcaster(workers_per_engine, host).open_buffer

    @classmethod
    def receiver(cls) -> OpenMemory:
        """See `BucketBuffer`. What it returns keeps this worker in its group."""
        joined: list[BroadcastGroup] = []

        def open_memory(handle: BroadcastHandle, device: torch.device) -> Tensor:
            """Return what the trainer broadcasts, [size_bytes] uint8. Raises as `BroadcastGroup.broadcast`."""
            if not joined or joined[0].name != handle.group:
                for group in joined:
                    group.close()
                joined[:] = [_join(handle, device)]
            data = torch.empty(handle.size_bytes, dtype=torch.uint8, device=device)
            joined[0].broadcast(data)
            return data

        return open_memory

    def reserve(self, end_bytes: int) -> None:
        """See `BucketBuffer`."""
        if self._sent is self.data:
            self.data = torch.empty_like(self.data) if self._spare is None else self._spare
            self._spare = self._sent
        self._end_bytes = end_bytes

    def publish(self) -> None:
        """See `BucketBuffer`. Starts the broadcast, which waits for the engines."""
        # Each filling has handles of its own, so that engines receive each one.
        self.handles = self._broadcaster.handles(self._end_bytes)
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


def _join(handle: BroadcastHandle, device: torch.device) -> BroadcastGroup:
    """Return an engine's worker's membership in the group of a handle."""
    stay_on_loopback(handle.host)
    # The workers of an engine with tensor parallelism are the ranks of their default group.
    own = distributed.get_rank() if distributed.is_initialized() else 0
    try:
        limit = timedelta(seconds=TIMEOUT_S)
        store = distributed.TCPStore(handle.host, handle.port, None, False, limit, wait_for_workers=False)
        return BroadcastGroup(handle.group, store, handle.first_rank + own, handle.num_ranks, device)
    except RuntimeError as error:
        message = f"the group that broadcasts weights cannot be joined at {handle.host}:{handle.port}: {error}"
        raise EngineError(message, hint="the nodes of a run must reach each other on all ports") from error
