"""Weights over the network: the trainer's process serves a buffer to engines on any node."""

import secrets
import socket
from collections.abc import Sequence
from functools import partial
from hmac import compare_digest
from socketserver import BaseRequestHandler, ThreadingTCPServer
from threading import Thread
from typing import Any

import torch

from rlhf_data.errors import EngineError
from rlhf_rollout.weights.buffer import HOST_WINDOW, BucketBuffer, OpenBuffer, no_memory

_TOKEN_BYTES = 32
_TIMEOUT_S = 60.0  # without any progress
_WAITING = 1024  # connections: all workers of all engines connect at once
_STOP_POLL_S = 0.02  # within which the server notices that it is to stop, which each update waits for


class _Server(ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = _WAITING


class Buffer(BucketBuffer):
    """Memory of this process, which answers every connection that begins with its token."""

    window = HOST_WINDOW
    may_read_again = True

    def __init__(self, size_bytes: int, engines: Sequence[str], host: str) -> None:
        try:
            self.data = torch.empty(size_bytes, dtype=torch.uint8)
        except RuntimeError as error:
            raise no_memory(size_bytes, error) from error
        self._num_engines = len(engines)
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._num_filled = 0
        self._end_bytes = 0
        buffer = self

        class Handler(BaseRequestHandler):
            def handle(self) -> None:
                buffer._answer(self.request)

        self._server = _Server((host, 0), Handler)
        Thread(target=self._server.serve_forever, args=[_STOP_POLL_S], daemon=True).start()

    @classmethod
    def sender(cls, workers_per_engine: int, host: str) -> OpenBuffer:
        """See `BucketBuffer`."""
        return partial(cls, host=host)

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

    def close(self) -> None:
        """See `BucketBuffer`."""
        self._server.shutdown()
        self._server.server_close()
        self.data = self.data.new_empty(0)  # the server's class refers to this object until garbage is collected

    def _answer(self, connection: socket.socket) -> None:
        connection.settimeout(_TIMEOUT_S)
        if compare_digest(connection.recv(_TOKEN_BYTES, socket.MSG_WAITALL), self._token):
            left = memoryview(self.data.numpy())[: self._end_bytes]
            while left:
                left = left[connection.send(left) :]  # each call has the time limit; `sendall` has it for all bytes

    @staticmethod
    def open_memory(handle: tuple[str, int, bytes, int, int], device: torch.device) -> torch.Tensor:
        """Return the bytes that the sender has now as a flat uint8 tensor on the host, whatever the engine's `device`.

        Args:
            handle: host and port of the sender, its token, the number of the filling, and its size in bytes.
            device: not used.

        Raises:
            EngineError: the sender cannot be reached, or ends the connection.
        """
        host, port, token, _, size_bytes = handle
        data = torch.empty(size_bytes, dtype=torch.uint8)
        left = memoryview(data.numpy())
        try:
            with socket.create_connection((host, port), timeout=_TIMEOUT_S) as connection:
                connection.sendall(token)
                while left:
                    num_read = connection.recv_into(left)
                    if not num_read:
                        raise ConnectionError("the sender ended the connection")
                    left = left[num_read:]
        except OSError as error:
            message = f"{socket.gethostname()} cannot read weights from {host}:{port}: {error}"
            raise EngineError(message, hint="the nodes of a run must reach each other on all ports") from error
        return data
