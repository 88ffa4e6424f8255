"""Processes that tests start, and what tests see of the processes of this machine."""

import contextlib
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.context import BaseContext
from pathlib import Path

from rlhf_rollout.host import local_gpus


def forked_context(preload: str) -> BaseContext:
    """Return a context of `multiprocessing` whose processes are forks of one that has only imported `preload`.

    So one import serves all. On a machine with a GPU they are new processes, because such imports initialize CUDA,
    after which a fork cannot use it.
    """
    if local_gpus():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([preload])
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    forkserver.ensure_running()
    os.environ["PYTHONPATH"] = before
    return context


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
