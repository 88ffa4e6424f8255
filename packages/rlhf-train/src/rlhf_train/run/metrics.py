"""Metrics to which ranks and micro-batches contribute parts. The class of a metric says how parts combine.

Each class has `merge`, which combines two parts, and `result`, which returns the number to log.

docs/metrics.md explains every metric by its name.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from itertools import islice

import torch
from torch import Tensor

METRIC_PREFIXES = {"actor": "policy", "critic": "value", "draft": "draft"}  # of the metrics of a model's updates


@dataclass(frozen=True, slots=True)
class Sum:
    """The sum of all parts. The value may be a tensor, as in `Mean`."""

    value: float | Tensor

    def merge(self, other: "Sum") -> "Sum":
        return Sum(self.value + other.value)

    def result(self) -> float:
        return float(self.value)


@dataclass(frozen=True, slots=True)
class Mean:
    """The total of all parts divided by their count; NaN when the count is 0.

    Total and count may be zero-dimensional tensors on the device until `on_host` copies them to the host.
    """

    total: float | Tensor
    count: float | Tensor

    def merge(self, other: "Mean") -> "Mean":
        return Mean(self.total + other.total, self.count + other.count)

    def result(self) -> float:
        return float(self.total / self.count) if self.count else float("nan")


@dataclass(frozen=True, slots=True)
class Max:
    """The largest value of all parts; NaN when any part is NaN. The value may be a tensor, as in `Mean`."""

    value: float | Tensor

    def merge(self, other: "Max") -> "Max":
        if isinstance(self.value, Tensor) and isinstance(other.value, Tensor):
            return Max(torch.maximum(self.value, other.value))  # comparing them here would wait for the device
        other_is_nan = other.value != other.value  # every comparison with NaN is False
        return other if other.value > self.value or other_is_nan else self

    def result(self) -> float:
        return float(self.value)


Metric = Sum | Mean | Max


def merge_metrics(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Merge parts by name. Raises TypeError when a name has metrics of two classes."""
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            if name in merged and type(merged[name]) is not type(metric):
                raise TypeError(f"metric {name} is both {type(merged[name]).__name__} and {type(metric).__name__}")
            merged[name] = merged[name].merge(metric) if name in merged else metric  # type: ignore[arg-type]
    return merged


def on_host(metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """Return the metrics with tensors replaced by numbers, waiting for the device only once."""
    parts = [getattr(metric, field.name) for metric in metrics.values() for field in fields(metric)]
    tensors = [part.double() for part in parts if isinstance(part, Tensor)]
    numbers = iter(torch.stack(tensors).tolist() if tensors else [])
    values = iter([next(numbers) if isinstance(part, Tensor) else part for part in parts])
    # Metrics have one or two fields; `values` holds those of all metrics in order.
    return {name: type(metric)(*islice(values, len(fields(metric)))) for name, metric in metrics.items()}


def results(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Return the numbers to log. Means with a count of 0 are left out; any other NaN stays, so that people see it."""
    counted = {name: metric for name, metric in metrics.items() if not isinstance(metric, Mean) or metric.count}
    return {name: metric.result() for name, metric in counted.items()}
