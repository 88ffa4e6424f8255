"""Samples what the GPUs of a machine do, by NVML. Torch-free: a process of its own does so on each machine."""

import importlib
import logging
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

PERIOD_S = 1.0  # NVML averages use over up to a second itself

_logger = logging.getLogger(__name__)


class GpuReading(NamedTuple):
    """What a GPU did since the last reading.

    Attributes:
        name: of the product, as NVML says it.
        samples: sum, largest and number of the samples of each quantity: "utilization" in [0, 1], "memory_bytes" and
            "power_watts". What NVML does not tell is absent.
    """

    name: str
    samples: Mapping[str, tuple[float, float, int]]


class GpuMeter:
    """Samples the GPUs of a run on this machine, on a thread, until the process ends. Never raises.

    Args:
        gpus: as CUDA_VISIBLE_DEVICES names them: by their numbers or unique names.
        nvml: the module `pynvml` (of nvidia-ml-py); None to import it. Without it, readings are empty.
        period_s: time between samples in seconds; None for `PERIOD_S`.
    """

    def __init__(self, gpus: Sequence[str], nvml: Any = None, period_s: float | None = None) -> None:
        self._period_s = PERIOD_S if period_s is None else period_s
        self._lock = threading.Lock()
        self._devices: list[_Device] = []
        try:
            nvml = nvml or importlib.import_module("pynvml")
            nvml.nvmlInit()
            self._devices = [_Device(nvml, gpu) for gpu in gpus]
        except Exception as error:  # a missing package, or an error of NVML's own
            _logger.warning("what GPUs do is not logged: %s", error)
            return
        threading.Thread(target=self._sample, daemon=True).start()

    def _sample(self) -> None:
        pause = threading.Event()
        while not pause.wait(self._period_s):
            with self._lock:
                for device in self._devices:
                    device.sample()

    def take(self) -> tuple[str, list[GpuReading]]:
        """Return the name of this machine, and a reading of each GPU in their order."""
        with self._lock:
            return socket.gethostname(), [device.take() for device in self._devices]


class _Device:
    """A GPU, and what was sampled of it since the last `take`."""

    def __init__(self, nvml: Any, gpu: str) -> None:
        handle = nvml.nvmlDeviceGetHandleByIndex(int(gpu)) if gpu.isdigit() else _named(nvml, gpu)
        name = nvml.nvmlDeviceGetName(handle)
        self._name = name.decode() if isinstance(name, bytes) else name
        self._reads: dict[str, Callable[[], float]] = {
            "utilization": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
            "memory_bytes": lambda: float(nvml.nvmlDeviceGetMemoryInfo(handle).used),
            "power_watts": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        }
        self._samples: dict[str, tuple[float, float, int]] = {}

    def sample(self) -> None:
        for name, read in list(self._reads.items()):
            try:
                value = read()
                total, largest, count = self._samples.get(name, (0.0, value, 0))
                self._samples[name] = total + value, max(largest, value), count + 1
            except Exception as error:  # of NVML: such as a part of a GPU, of which it tells no use
                _logger.warning("%s of %s is not logged: %s", name, self._name, error)
                del self._reads[name]

    def take(self) -> GpuReading:
        if not self._samples:  # a step that is shorter than the time between samples
            self.sample()
        samples, self._samples = self._samples, {}
        return GpuReading(self._name, samples)


def _named(nvml: Any, name: str) -> Any:
    """Return NVML's handle of a GPU by its unique name. CUDA also takes the beginning of the name of a whole GPU."""
    if name.startswith("GPU-"):
        for handle in map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount())):
            if nvml.nvmlDeviceGetUUID(handle).startswith(name):
                return handle
    return nvml.nvmlDeviceGetHandleByUUID(name)
