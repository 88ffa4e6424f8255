"""Weight sync over the network: this process serves a buffer to engines on any node."""

import secrets
import socket
from collections.abc import Callable, Sequence
from hmac import compare_digest
from socketserver import BaseRequestHandler, ThreadingTCPServer
from threading import Thread
from typing import Any

import torch

from rlhf_rollout.ray_actors import node_address
from rlhf_rollout.weight_sync import Medium

_TOKEN_BYTES = 32
_TIMEOUT_S = 60.0  # without any progress


class TcpBuffer:
    """A `BucketBuffer` in this process, which answers every connection that begins with its token."""

    medium: Medium = "tcp"
    holds_two = False

    def __init__(self, size_bytes: int, engines: Sequence[str]) -> None:
        self.data = torch.empty(size_bytes, dtype=torch.uint8)
        self._num_engines = len(engines)
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._num_filled = 0
        self._end_bytes = 0
        buffer = self

        class Handler(BaseRequestHandler):
            def handle(self) -> None:
                buffer._answer(self.request)

        self._server = ThreadingTCPServer((node_address(), 0), Handler)
        self._server.daemon_threads = True
        Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def handles(self) -> Sequence[Any]:
        """See `BucketBuffer`. Each filling has handles of its own, so that an engine reads each one."""
        return [(*self._server.server_address, self._token, self._num_filled, self._end_bytes)] * self._num_engines

    def reserve(self, end_bytes: int) -> None:
        """See `BucketBuffer`."""
        self._end_bytes = end_bytes

    def publish(self) -> None:
        """See `BucketBuffer`."""
        self._num_filled += 1

    def settle(self) -> None:
        """See `BucketBuffer`. Engines have read the buffer when they answer."""

    def close(self) -> None:
        """See `BucketBuffer`."""
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, connection: socket.socket) -> None:
        connection.settimeout(_TIMEOUT_S)
        if compare_digest(connection.recv(_TOKEN_BYTES, socket.MSG_WAITALL), self._token):
            connection.sendall(memoryview(self.data.numpy())[: self._end_bytes])


def opener(workers_per_engine: int) -> Callable[[int, Sequence[str]], TcpBuffer]:
    """Return the function that opens buffers."""
    return TcpBuffer
