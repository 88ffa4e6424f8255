"""Metrics of the GPUs of a run: what they do, as the meters say, and what share of their peak models reach."""

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_train.cluster.gpu_meter import GpuReading
from rlhf_train.cluster.places import PlacementPlan
from rlhf_train.cluster.ray_session import wait
from rlhf_train.run.metrics import Max, Mean, Metric, merge_metrics, results

_ANSWER_S = 5.0  # the run waits for a meter at most

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
            parts += [{f"gpu/{name}{suffix}": _metric(name, *of)} for name, of in reading.samples.items()]
    return results(merge_metrics(parts))


def _metric(name: str, total: float, largest: float, count: int) -> Metric:
    return Max(largest) if name == "memory_bytes" else Mean(total, count)


def peak_flops(name: str) -> float | None:
    """Return the dense operations per second in bfloat16 of a GPU by NVML's name, or None if it is not known.

    That of a part of a GPU, which NVML names like "NVIDIA H200 MIG 1g.18gb", is not.
    """
    if re.search(r"\bMIG\b", name):
        return None
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
