"""What the ranks of an offline run do together for a checkpoint. Every rank makes the same calls."""

import os
import socket
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import torch

from rlhf_data.errors import CheckpointError, ConfigError
from rlhf_train.run.checkpoint import Checkpoint, Checkpoints

Part = TypeVar("Part")
_LATE_S = 60.0  # network file systems show a new file of another node up to this late
_POLL_S = 0.1


def of_all_ranks(own: Part) -> list[Part]:
    """Return the values of `own` from all ranks, in the order of ranks. Collective."""
    gathered = [own] * torch.distributed.get_world_size()
    if len(gathered) > 1:
        torch.distributed.all_gather_object(gathered, own)
    return gathered


def check_shared(folder: Path) -> None:
    """Raise ConfigError on all ranks unless each sees the files that rank 0 writes in `folder`. Collective.

    The folder need not exist: rank 0 writes a marker into it or the nearest parent that exists, and removes it. Where
    rank 0 may not write, nothing is checked.
    """
    if torch.distributed.get_world_size() == 1:
        return
    marker = None
    with ExitStack() as stack:
        if torch.distributed.get_rank() == 0:
            try:
                there = next(path for path in (folder, *folder.parents) if path.exists())
                marker = stack.enter_context(tempfile.NamedTemporaryFile(prefix=".rlhf-", dir=there)).name
            except OSError:
                pass  # a checkpoint that cannot be written is a warning
        marker = of_all_ranks(marker)[0]
        if marker is None:
            return
        looks = of_all_ranks((socket.gethostname(), _appears(Path(marker))))
    blind = [f"rank {rank} ({host})" for rank, (host, has_seen) in enumerate(looks) if not has_seen]
    if blind:
        message = f"{', '.join(blind[:3])} cannot see what rank 0 ({looks[0][0]}) writes to {folder}"
        hint = (
            "a run on several nodes needs a disk that they share, at the same path: see ``OfflineJob.model_path`` and"
            " ``CheckpointSpec.folder``; with ``CheckpointSpec.full=False``, which saves nothing to continue from, it"
            " needs none"
        )
        raise ConfigError(message, hint=hint)


def _appears(path: Path) -> bool:
    """Wait until a file is there; return whether it is. Listing the folder makes NFS ask its server anew."""
    deadline = time.monotonic() + _LATE_S
    while True:
        try:
            if path.name in os.listdir(path.parent):
                return True
        except OSError:
            pass  # the folder may be new as well
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)


class SharedCheckpoints(Checkpoints):
    """The checkpoints of a run, which rank 0 alone begins and puts in force."""

    def begin(self, step: int) -> Path:
        """See `Checkpoints`. Collective: if rank 0 cannot write, all ranks raise."""
        staging = error = None
        if torch.distributed.get_rank() == 0:
            try:
                staging = super().begin(step)
            except CheckpointError as failure:
                error = failure
        staging, error = of_all_ranks((staging, error))[0]
        if error is not None:
            raise error
        return staging

    def commit(self, *args: Any) -> Checkpoint | None:
        """See `Checkpoints`."""
        return super().commit(*args) if torch.distributed.get_rank() == 0 else None
