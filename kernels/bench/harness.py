"""Shared by the benchmarks in this folder: timing, peak memory, error checks and reports."""

import argparse
import gc
import importlib
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parents[2] / "tools/bench"))
import runner

MIN_REPEATS, MAX_REPEATS, WARMUP = 5, 200, 2
GIB = 2**30

Call = Callable[[], object]


class SkippedError(Exception):
    """Raised with the reason why a measurement is skipped."""


class WrongError(Exception):
    """Raised if a result is too far from the float64 result."""


def operator(name: str) -> Callable[..., Any]:
    """Return an operator of `rlhf_kernels`. Raises SkippedError if there is none of that name."""
    try:
        return getattr(importlib.import_module("rlhf_kernels"), name)
    except AttributeError:
        raise SkippedError(f"rlhf_kernels has no {name}") from None


def median_ms(calls: Sequence[Call], *, seconds: float, graph: bool = False) -> float:
    """Return the median milliseconds per call, cycling over `calls`.

    Args:
        calls: the same work on different inputs.
        seconds: approximate time to repeat; at least 5 repeats are made.
        graph: replay the calls from one CUDA graph, for work that takes less time than its launch.
    """
    for call in [*calls] * WARMUP:
        call()
    if not torch.cuda.is_available():
        return statistics.median(_clocked(call) for _ in range(MIN_REPEATS) for call in calls)
    count = 1  # calls per measurement
    if graph:
        recorded = torch.cuda.CUDAGraph()
        count = len(calls)
        torch.cuda.synchronize()
        with torch.cuda.graph(recorded):
            for call in calls:
                call()
        calls = [recorded.replay]
        recorded.replay()
    start, end = _events(calls[0])
    torch.cuda.synchronize()
    fitting = seconds * 1000 / max(start.elapsed_time(end), 1e-3)
    repeats = int(min(MAX_REPEATS, max(MIN_REPEATS, fitting)))
    # Queue all calls before waiting for any, so that the device never waits for the host in between.
    events = [_events(calls[index % len(calls)]) for index in range(repeats)]
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events) / count


def _events(call: Call) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    return start, end


def _clocked(call: Call) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1000


def extra_gib(call: Call, results: Sequence[Tensor] = ()) -> float | None:
    """Return the peak device memory of a call in GiB, without what was allocated before and without `results`.

    None without a GPU.
    """
    if not torch.cuda.is_available():
        return None
    release()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before - sum(part.nbytes for part in results)) / GIB


def release() -> None:
    """Free unreferenced tensors and return cached memory to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def require(errors: Mapping[str, float], limits: Mapping[str, float]) -> None:
    """Raise WrongError unless every error is below its limit. NaN counts as above."""
    if not all(errors[name] < limit for name, limit in limits.items()):
        raise WrongError(", ".join(f"{name} {error:.2g}" for name, error in errors.items()))


def relative_error(got: Tensor, want: Tensor) -> float:
    """Return the norm of the difference divided by the norm of `want`. NaN anywhere gives NaN."""
    return float(((got.double() - want).norm() / want.norm().clamp(min=1e-300)).detach())


def attempt(measure: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """Return the result of `measure` with a status. An exception becomes a note and does not end the run."""
    try:
        return {"status": "ok", **measure()}
    except SkippedError as error:
        return {"status": "skipped", "note": str(error)}
    except WrongError as error:
        return {"status": "wrong", "note": str(error)}
    except torch.OutOfMemoryError:
        return {"status": "failed", "note": "out of memory"}
    except Exception as error:  # other libraries may raise anything
        return {"status": "failed", "note": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
    finally:
        release()


def options_parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser for the flags that both benchmarks share."""
    return runner.arguments(
        doc,
        quick=(False, "one size and few repeats: less than a minute"),
        seconds=(1.0, "how long to repeat each call"),
    )


def write(options: argparse.Namespace, benchmark: str, **content: Any) -> None:
    """Write a report."""
    runner.write(options, benchmark, content)


def print_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print rows as a Markdown table: numbers to three digits, None as a dash."""
    for row in (header, ["---"] * len(header), *rows):
        print("| " + " | ".join(_cell(value) for value in row) + " |")


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
