"""What the GPUs of a run do, by samples that NVML takes on each machine, and what share of their peak models reach."""

import importlib
import logging
import re
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rlhf_train.cluster.places import PlacementPlan
from rlhf_train.cluster.ray_session import wait
from rlhf_train.run.metrics import Max, Mean, Metric, merge_metrics, results

_ANSWER_S = 5.0  # the run waits for a meter at most
PERIOD_S = 1.0  # NVML averages use over up to a second itself

# Operations per second of dense matrix products in bfloat16, by a part of NVML's name; the first that fits counts.
# Source: NVIDIA's data sheets of these products, whose numbers with sparsity are twice as large.
PEAK_FLOPS = {
    "GB200": 2.5e15,
    "B200": 2.25e15,
    "H200": 989.4e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989.4e12,
    "H800": 989.4e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A40": 149.7e12,
    "A30": 165e12,
    "A10": 125e12,
    "RTX 4090": 165.2e12,
    "RTX 3090": 71e12,
}

_logger = logging.getLogger(__name__)


class GpuReading(NamedTuple):
    """What a GPU did since the last reading.

    Attributes:
        name: of the product, as NVML says it.
        metrics: by name, without that of a machine; empty for what NVML does not tell.
    """

    name: str
    metrics: Mapping[str, Metric]


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
        get = nvml.nvmlDeviceGetHandleByIndex if gpu.isdigit() else nvml.nvmlDeviceGetHandleByUUID
        handle = get(int(gpu) if gpu.isdigit() else gpu)
        name = nvml.nvmlDeviceGetName(handle)
        self._name = name.decode() if isinstance(name, bytes) else name
        self._reads: dict[str, Callable[[], Metric]] = {
            "utilization": lambda: Mean(nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100, 1),
            "memory_bytes": lambda: Max(float(nvml.nvmlDeviceGetMemoryInfo(handle).used)),
            "power_watts": lambda: Mean(nvml.nvmlDeviceGetPowerUsage(handle) / 1000, 1),
        }
        self._found: dict[str, Metric] = {}

    def sample(self) -> None:
        for name, read in list(self._reads.items()):
            try:
                self._found = merge_metrics([self._found, {name: read()}])
            except Exception as error:  # of NVML: such as a part of a GPU, of which it tells no use
                _logger.warning("%s of %s is not logged: %s", name, self._name, error)
                del self._reads[name]

    def take(self) -> GpuReading:
        found, self._found = self._found, {}
        return GpuReading(self._name, found)


def gpu_metrics(readings: Mapping[tuple[int, int], tuple[str, GpuReading]], plan: PlacementPlan) -> dict[str, float]:
    """Return the metrics of GPUs: of all, of each machine, and of the processes of each kind.

    Args:
        readings: by node and GPU of the plan, the machine's name with the reading.
        plan: tells whose GPUs they are. One that several kinds of processes use counts for each of them.
    """
    parts: list[dict[str, Metric]] = []
    users = {card: [p.name for p in plan.all_processes if card in p.cards] for card in readings}
    for card, (host, reading) in readings.items():
        for suffix in ("", *(f"_{re.sub(r'[^A-Za-z0-9_-]', '_', name)}" for name in (host, *users[card]))):
            parts.append({f"gpu/{name}{suffix}": metric for name, metric in reading.metrics.items()})
    return results(merge_metrics(parts))


def peak_flops(name: str) -> float | None:
    """Return the dense operations per second in bfloat16 of a GPU by NVML's name, or None if it is not known."""
    return next((peak for part, peak in PEAK_FLOPS.items() if re.search(rf"\b{part}\b", name)), None)


def flops_utilization(
    flops: Mapping[str, float],
    peaks: Mapping[tuple[int, int], float],
    trained_on: Sequence[tuple[int, int]],
    *,
    step_s: float,
    train_s: float,
) -> dict[str, float]:
    """Return the model FLOPs utilisation (MFU) of a step and of its updates, in [0, 1].

        throughput/mfu       = (generate + experience + train) / (step_s * sum of the peaks of all GPUs)
        throughput/train_mfu = train / (train_s * sum of the peaks of the GPUs that train)

    Args:
        flops: operations that the models' passes need, by "generate", "experience" and "train"; see `PassCosts`.
            What is computed again, such as for gradient checkpointing, does not count.
        peaks: operations per second of each GPU, by node and GPU.
        trained_on: the GPUs of the processes that train.
        step_s, train_s: seconds of the step, without evaluation and saving, and of its updates.

    Source: Chowdhery et al. 2022, PaLM, appendix B, which has tokens per second in the place of the sums.
    """
    found: dict[str, float] = {}
    if step_s > 0 and peaks:
        found["throughput/mfu"] = sum(flops.values()) / (step_s * sum(peaks.values()))
    trained = sum(peaks.get(card, 0.0) for card in set(trained_on))
    if train_s > 0 and trained:
        found["throughput/train_mfu"] = flops.get("train", 0.0) / (train_s * trained)
    return found


class GpuWatch:
    """The metrics of a run's GPUs, by a `GpuMeter` on each node. What cannot be measured is absent, never an error.

    Args:
        meters: handles of the meters, by node.
        plan: of the run.
        dtype: in which models run; peaks are known for "bfloat16" and "float16".
    """

    def __init__(self, meters: Sequence[Any], plan: PlacementPlan, dtype: str) -> None:
        self._meters = list(meters)
        self._plan = plan
        self._has_peaks = dtype in ("bfloat16", "float16")

    def step(self, flops: Mapping[str, float], num_tokens: int, *, step_s: float, train_s: float) -> dict[str, float]:
        """Return the metrics since the last call.

        Args:
            flops, step_s, train_s: see `flops_utilization`.
            num_tokens: sampled tokens.
        """
        found: dict[str, float] = {}
        if step_s > 0:
            found["throughput/response_tokens_per_gpu"] = num_tokens / step_s / self._plan.num_gpus
        readings = self._read()
        peaks = {card: peak_flops(reading.name) for card, (_, reading) in readings.items()}
        known = {card: peak for card, peak in peaks.items() if peak is not None}
        if self._has_peaks and len(known) == self._plan.num_gpus:
            trained_on = [card for placed in self._plan.trainers for card in placed.cards]
            found |= flops_utilization(flops, known, trained_on, step_s=step_s, train_s=train_s)
        return found | gpu_metrics(readings, self._plan)

    def _read(self) -> dict[tuple[int, int], tuple[str, GpuReading]]:
        try:
            taken = wait([meter.take.remote() for meter in self._meters], timeout_s=_ANSWER_S, what="NVML")
        except Exception as error:  # a meter that hangs or has died must not end a run
            _logger.warning("what GPUs do is no longer logged: %s", error)
            self._meters = []
            return {}
        return {
            (node, gpu): (host, reading)
            for node, (host, readings) in enumerate(taken)
            for gpu, reading in enumerate(readings)
        }
