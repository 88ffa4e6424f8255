"""What the ranks of an offline run do together for a checkpoint. Every rank makes the same calls."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from rlhf_data.errors import CheckpointError
from rlhf_train.engine.deepspeed import DeepSpeedEngine
from rlhf_train.run.checkpoint import Checkpoint, Checkpoints
from rlhf_train.run.rank_state import StateWriter, file_name

Part = TypeVar("Part")


def of_all_ranks(own: Part) -> list[Part]:
    """Return the values of `own` from all ranks, in the order of ranks. Collective."""
    gathered = [own] * torch.distributed.get_world_size()
    if len(gathered) > 1:
        torch.distributed.all_gather_object(gathered, own)
    return gathered


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


class RankModel:
    """This rank's part of the model of a run, as `rlhf_train.run.checkpointing.Models`. All methods are collective.

    Args:
        engine: trains the model.
        kind: "actor" or "reward": the first word of the files' names.
        save: writes the model as a Hugging Face folder.
    """

    def __init__(self, engine: DeepSpeedEngine, kind: str, save: Callable[[Path], None]) -> None:
        self._engines = {kind: engine}
        self._save = save
        self._num_ranks = torch.distributed.get_world_size()
        self._writer = StateWriter(torch.distributed.get_rank(), self._num_ranks)

    def save_state(self, folder: str) -> list[str]:
        """See `Models`."""
        self._writer.save(self._engines, Path(folder))
        return [file_name(kind, rank, self._num_ranks) for kind in self._engines for rank in range(self._num_ranks)]

    def finish_state(self) -> None:
        """See `Models`."""
        self._writer.finish()
        of_all_ranks(None)

    def load_state(self, folder: str) -> None:
        """See `Models`."""
        self._writer.load(self._engines, Path(folder))

    def save(self, role: str, path: str) -> None:
        """See `Models`."""
        self._save(Path(path))
