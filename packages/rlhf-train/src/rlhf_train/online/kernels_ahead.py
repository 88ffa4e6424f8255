"""Processes that compile the kernels of a step while a trainer loads its models and compiles their layers.

What Triton and FlashAttention 4 compile is kept on the disk, where the trainer finds it. Compiled by the trainer after
its layers, it would take as long again.
"""

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from rlhf_train.online.job import OnlineJob
from rlhf_train.specs import ModelSpec

PARTS = ("attention", "passes")  # see `one_layer.run_part`
_MIN_CORES = 8  # on fewer, the processes would slow the trainer and the engines down


@contextmanager
def compiled_ahead(models: Mapping[str, ModelSpec], job: OnlineJob, rank: int) -> Iterator[None]:
    """Compile kernels beside what a `with` block does, if there is time for it. What is left at its end is ended."""
    children = [_start(part, models, job) for part in PARTS] if is_worth_it(models, job, rank) else []
    try:
        yield
    finally:
        for child in children:
            with child:  # waits for its end
                child.kill()


def is_worth_it(models: Mapping[str, ModelSpec], job: OnlineJob, rank: int) -> bool:
    """Return whether `rank` is the first of its rank set on its node, has layers to compile, and cores to spare."""
    if job.plan.device == "cpu" or len(os.sched_getaffinity(0)) < _MIN_CORES:
        return False
    role, spec = next(iter(models.items()))
    nodes = [place.node for place in job.plan.trainers_of(role).places]
    return nodes.index(nodes[rank]) == rank and spec.packing and spec.may_compile


def _start(part: str, models: Mapping[str, ModelSpec], job: OnlineJob) -> subprocess.Popen[bytes]:
    with tempfile.TemporaryFile() as given:
        pickle.dump((part, dict(models), replace(job, prompts=())), given)
        given.seek(0)
        environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-m", "rlhf_train.online.one_layer"]
        silent = subprocess.DEVNULL
        return subprocess.Popen(command, stdin=given, stdout=silent, stderr=silent, env=environ)
