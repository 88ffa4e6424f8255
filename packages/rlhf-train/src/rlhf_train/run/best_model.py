"""Keeps the weights with the best evaluation in a folder. Torch-free."""

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path

STATE_FILE = "state.json"


class BestModel:
    """A folder with the weights whose evaluation had the highest value of a metric, or with `lowest` the lowest."""

    def __init__(self, metric: str, folder: Path, *, lowest: bool = False) -> None:
        self.metric = metric
        self._folder = folder
        self._lowest = lowest
        self._best = math.inf if lowest else -math.inf

    def beaten_by(self, metrics: Mapping[str, float]) -> bool:
        """Return whether the metric is better than at all evaluations before; at the first one it is."""
        value = metrics[self.metric]
        return value < self._best if self._lowest else value > self._best

    @property
    def staging(self) -> Path:
        """The folder to write the weights to before `keep` moves them into place."""
        return self._folder.with_name(f".{self._folder.name}.new")

    def keep(self, step: int, metrics: Mapping[str, float], state: Mapping[str, float], *, writes: bool = True) -> None:
        """Replace the folder by `staging`, and write the step, the value and `state` to a file in it.

        All ranks call this; only the one that `writes` touches the disk.
        """
        self._best = metrics[self.metric]
        if not writes:
            return
        summary = {"step": step, "metric": self.metric, "value": self._best, **state}
        (self.staging / STATE_FILE).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        old = self._folder.with_name(f".{self._folder.name}.old")
        if self._folder.exists():
            self._folder.rename(old)
        self.staging.rename(self._folder)
        shutil.rmtree(old, ignore_errors=True)
