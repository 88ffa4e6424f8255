"""Writes metrics as TensorBoard events."""

from collections.abc import Mapping
from pathlib import Path


class TensorBoardTracker:
    """Writes scalar events to a folder."""

    def __init__(self, path: Path, resumed_step: int | None = None) -> None:
        """`resumed_step` is the last step whose events stay, in a run that continues."""
        from torch.utils.tensorboard import SummaryWriter

        self.where = str(path)
        self.run_id = None
        self._writer = SummaryWriter(path, purge_step=None if resumed_step is None else resumed_step + 1)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Tracker`."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """See `Tracker`."""
        self._writer.close()
