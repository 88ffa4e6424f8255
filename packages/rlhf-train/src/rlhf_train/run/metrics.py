"""Metrics that ranks and micro-batches contribute to. Their type says how parts combine.

Each kind has `merge`, which puts two parts together, and `result`, the number to log.

Names in metrics.jsonl: `rollout/*` for what was generated and its scores, `train/*` for the rewards that are trained
on, `policy/*`, `value/*`, `kl/*` and `entropy/*` for the updates, `mismatch/*` between engine and trainer, `eval/*` on
held-out prompts, `time/*` in seconds, `throughput/*` per second, and `samples/*` for counts of rollouts.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sum:
    """Adds up. The value may be a tensor, as in `Mean`."""

    value: float | Tensor

    def merge(self, other: "Sum") -> "Sum":
        return Sum(self.value + other.value)

    def result(self) -> float:
        return float(self.value)


@dataclass(frozen=True, slots=True)
class Mean:
    """Averages over the counts of all parts; NaN when the count is 0.

    Total and count may be zero-dimensional tensors until `on_host` copies them to the host.
    """

    total: float | Tensor
    count: float | Tensor

    def merge(self, other: "Mean") -> "Mean":
        return Mean(self.total + other.total, self.count + other.count)

    def result(self) -> float:
        return float(self.total / self.count) if self.count else float("nan")


@dataclass(frozen=True, slots=True)
class Max:
    """Keeps the largest value; NaN when any part is NaN."""

    value: float

    def merge(self, other: "Max") -> "Max":
        return other if other.value > self.value or other.value != other.value else self

    def result(self) -> float:
        return self.value


Metric = Sum | Mean | Max


def merge_metrics(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Combine the parts name by name. Raises TypeError when one name has two kinds."""
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            if name in merged and type(merged[name]) is not type(metric):
                raise TypeError(f"metric {name} is both {type(merged[name]).__name__} and {type(metric).__name__}")
            merged[name] = merged[name].merge(metric) if name in merged else metric  # type: ignore[arg-type]
    return merged


def on_host(metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """Return the metrics with tensors replaced by numbers, with one wait for the device."""
    parts = [getattr(metric, field.name) for metric in metrics.values() for field in fields(metric)]
    tensors = [part.double() for part in parts if isinstance(part, Tensor)]
    numbers = iter(torch.stack(tensors).tolist() if tensors else [])
    values = iter([next(numbers) if isinstance(part, Tensor) else part for part in parts])
    return {name: type(metric)(*(next(values) for _ in fields(metric))) for name, metric in metrics.items()}


def results(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Return the numbers to log, without means of nothing. A loss that is NaN stays: people must see it."""
    counted = {name: metric for name, metric in metrics.items() if not isinstance(metric, Mean) or metric.count}
    return {name: metric.result() for name, metric in counted.items()}
