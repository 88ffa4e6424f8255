"""Processes that compile the kernels of a step while a trainer loads its models and compiles their layers.

What Triton and FlashAttention 4 compile is kept on the disk, where the trainer finds it. Compiled by the trainer after
its layers, it would take as long again.
"""

import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from tempfile import TemporaryDirectory, TemporaryFile

from rlhf_train.learning.rehearsal import share_beside_engines
from rlhf_train.online_job import OnlineJob
from rlhf_train.specs import ModelSpec

PARTS = ("attention", "passes")  # see `one_layer.run_part`
_MIN_CORES = 8  # on fewer, the processes would slow the trainer and the engines down
_LEAST_ROOM = 0.5  # of the GPU's memory, beside engines that start meanwhile; see `one_layer.MEMORY_SHARE`

logger = logging.getLogger(__name__)


@contextmanager
def compiled_ahead(models: Mapping[str, ModelSpec], job: OnlineJob, rank: int) -> Iterator[None]:
    """Compile kernels beside what a `with` block does, if there is time for it. What is left at its end is ended.

    If that is not possible, the trainer compiles them itself.
    """
    with ExitStack() as ends:
        if is_worth_it(models, job, rank):
            try:
                folder = ends.enter_context(TemporaryDirectory(ignore_cleanup_errors=True))
                for part in PARTS:
                    ends.enter_context(_process(part, models, job, folder))
            except (OSError, pickle.PicklingError, AttributeError, TypeError) as error:
                logger.info("no kernels are compiled beside the start of the trainer: %s", error)
        yield


def is_worth_it(models: Mapping[str, ModelSpec], job: OnlineJob, rank: int) -> bool:
    """Return whether `rank` is the first of its rank set on its node, has layers to compile, and has cores and memory
    to spare."""
    if job.plan.device == "cpu" or len(os.sched_getaffinity(0)) < _MIN_CORES:
        return False
    role, spec = next(iter(models.items()))
    nodes = [place.node for place in job.plan.trainers_of(role).places]
    is_first = nodes.index(nodes[rank]) == rank
    has_room = share_beside_engines(job.plan, job.engine, role, rank) >= _LEAST_ROOM
    return is_first and has_room and spec.packing and spec.may_compile_ahead


@contextmanager
def _process(part: str, models: Mapping[str, ModelSpec], job: OnlineJob, folder: str) -> Iterator[None]:
    """Run `one_layer` for the time of a `with` block, with its files in `folder`."""
    with TemporaryFile() as given:
        pickle.dump((part, dict(models), replace(job, prompts=(), eval_prompts=()), os.getpid()), given)
        given.seek(0)
        environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TMPDIR": folder}
        command = [
            sys.executable,
            "-P",
            "-m",
            "rlhf_train.learning.one_layer",
        ]  # -P: without the working directory
        silent = subprocess.DEVNULL
        child = subprocess.Popen(command, stdin=given, stdout=silent, stderr=silent, env=environ)
    with child:  # waits for its end
        try:
            yield
        finally:
            child.kill()
