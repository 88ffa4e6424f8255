"""Where metrics are written: a JSON line a step, and TensorBoard events."""

import json
import math
from collections.abc import Mapping
from pathlib import Path


class JsonlTracker:
    """Appends one JSON object a step to a file."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of one step; what is not finite becomes null, for JSON has no NaN."""
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write(json.dumps({"step": step, **finite}) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoardTracker:
    """Writes scalar events into a folder."""

    def __init__(self, path: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(path)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of one step."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()
