"""The weights that an evaluation liked best, kept in a folder. Torch-free."""

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path

STATE_FILE = "state.json"


class BestModel:
    """The folder with the weights that a metric of the evaluation was highest with, or `lowest`."""

    def __init__(self, metric: str, folder: Path, *, lowest: bool = False) -> None:
        self.metric = metric
        self._folder = folder
        self._lowest = lowest
        self._best = math.inf if lowest else -math.inf

    def beaten_by(self, metrics: Mapping[str, float]) -> bool:
        """Say whether an evaluation that has the metric is better than all before it; the first one is."""
        value = metrics[self.metric]
        return value < self._best if self._lowest else value > self._best

    @property
    def staging(self) -> Path:
        """Where to write the weights before `keep` puts them into place."""
        return self._folder.with_name(f".{self._folder.name}.new")

    def keep(self, step: int, metrics: Mapping[str, float], state: Mapping[str, float], *, writes: bool = True) -> None:
        """Let what lies in `staging` be the best, with a file that says of which step, at what value, and `state`; of
        several ranks, one `writes`."""
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
