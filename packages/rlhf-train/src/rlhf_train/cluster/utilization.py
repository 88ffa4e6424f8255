"""How busy a process's GPU is, by samples that NVML takes."""

import logging
import re
import socket
import threading
from collections.abc import Callable

import torch

from rlhf_train.run.metrics import Mean

NAME = "gpu/utilization"
PERIOD_S = 1.0  # NVML averages over up to a second itself

_logger = logging.getLogger(__name__)


class Utilization:
    """Samples a GPU on a thread from when it is made until the process ends.

    Args:
        read: returns the percentage of its last period in which the GPU was computing.
        node: name of the machine.
        period_s: time between samples in seconds; None for `PERIOD_S`.
    """

    def __init__(self, read: Callable[[], float], node: str, period_s: float | None = None) -> None:
        self._read = read
        self._names = (NAME, f"{NAME}_{re.sub(r'[^A-Za-z0-9_-]', '_', node)}")
        self._period_s = PERIOD_S if period_s is None else period_s
        self._total = 0.0
        self._count = 0
        self._lock = threading.Lock()
        threading.Thread(target=self._sample, daemon=True).start()

    def _sample(self) -> None:
        pause = threading.Event()
        while not pause.wait(self._period_s):
            try:
                percent = self._read()
            except Exception as error:  # NVML's and the driver's own: a metric must not end a run
                _logger.warning("the GPU's utilization is no longer logged: %s", error)
                return
            with self._lock:
                self._total += percent / 100
                self._count += 1

    def take(self) -> dict[str, Mean]:
        """Return the mean share since the last call, in [0, 1], for all machines and for this one."""
        with self._lock:
            mean = Mean(self._total, self._count)
            self._total = 0.0
            self._count = 0
        return dict.fromkeys(self._names, mean)


def watch_gpu(device: torch.device) -> Utilization | None:
    """Start to sample a device; None for a CPU, and where NVML or its Python package (nvidia-ml-py) is missing."""
    if device.type != "cuda":
        return None
    try:
        torch.cuda.utilization(device)
    except Exception as error:  # a missing package, or an error of NVML's own
        _logger.info("the GPU's utilization is not logged: %s", error)
        return None
    return Utilization(lambda: torch.cuda.utilization(device), socket.gethostname())
