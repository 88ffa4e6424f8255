"""Metrics as JSON lines."""

import json
import math
from collections.abc import Mapping
from pathlib import Path


class JsonlTracker:
    """Appends one JSON object per step to a file."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of one step. NaN and infinities become null, because JSON has neither."""
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write(json.dumps({"step": step, **finite}) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()
