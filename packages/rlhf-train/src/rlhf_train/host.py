"""What this machine has to give: GPUs and ports."""

import os
import socket
from pathlib import Path


def local_gpus() -> int:
    """Return the number of GPUs, by CUDA_VISIBLE_DEVICES or the driver's device files: no GPU library is needed."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([device for device in visible.split(",") if device.strip() not in ("", "-1")])
    return len([path for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdigit()])


def free_port() -> int:
    """Return a TCP port that is free on this host now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
