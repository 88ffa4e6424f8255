"""Fixtures of the benchmarks' tests."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import run


@pytest.fixture
def bench(tmp_path: Path) -> Callable[..., tuple[int, Any]]:
    """Return a function that runs a benchmark in this process; it returns the exit status and the report, if any."""

    def run_benchmark(name: str, *flags: str) -> tuple[int, Any]:
        out = tmp_path / "report.json"
        status = run.main([name, "--out", str(out), *flags])
        return status, json.loads(out.read_text(encoding="utf-8")) if out.exists() else None

    return run_benchmark
