"""Weights that the trainer's process serves to engines on other nodes."""

import socket
from collections.abc import Callable
from typing import Any

import torch

from rlhf_data.errors import EngineError

_TIMEOUT_S = 60.0  # without any progress


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


def opener() -> Callable[[Any, torch.device], torch.Tensor]:
    """Return `open_memory`, which keeps nothing between buckets."""
    return open_memory
