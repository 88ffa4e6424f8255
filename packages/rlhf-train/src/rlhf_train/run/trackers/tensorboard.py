"""Writes metrics as TensorBoard events."""

from collections.abc import Mapping
from pathlib import Path


class TensorBoardTracker:
    """Writes scalar events to a folder."""

    def __init__(self, path: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.where = str(path)
        self._writer = SummaryWriter(path)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Tracker`."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """See `Tracker`."""
        self._writer.close()
