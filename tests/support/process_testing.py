"""What tests see of the processes of this machine."""

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path


def stat_of(process_id: int) -> list[str]:
    """Return the fields of a process from its state on; empty if there is none."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    return []


def is_running(process_id: int) -> bool:
    """Return whether a process runs; one that has ended and was not waited for does not."""
    return stat_of(process_id)[:1] not in ([], ["Z"], ["X"])


def descendants() -> set[int]:
    """Return the ids of the processes below this one, those included that have ended and nobody has waited for."""
    stats = {int(path.name): stat_of(int(path.name)) for path in Path("/proc").iterdir() if path.name.isdigit()}
    parents = {process_id: int(stat[1]) for process_id, stat in stats.items() if stat}
    found = {os.getpid()}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {os.getpid()}


def eventually(condition: Callable[[], bool]) -> bool:
    """Return what `condition` returns in the end: True, or False after a minute."""
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()
