"""Writes metrics as JSON lines."""

import json
import math
from collections.abc import Mapping
from pathlib import Path

from rlhf_train.background import cannot_write


class JsonlTracker:
    """Appends one JSON object per call to a file. The line is in the file when `log` returns."""

    def __init__(self, path: Path) -> None:
        self.where = str(path)
        self.run_id = None
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Tracker`. NaN and infinities become null, because JSON has neither. Raises RlhfError when the file
        cannot be written."""
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        try:
            self._file.write(json.dumps({"step": step, **finite}) + "\n")
        except OSError as error:
            raise cannot_write(self.where, error) from error

    def close(self) -> None:
        """See `Tracker`. Raises RlhfError when the file cannot be written."""
        try:
            self._file.close()
        except OSError as error:
            raise cannot_write(self.where, error) from error
