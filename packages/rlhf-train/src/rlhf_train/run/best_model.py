"""A folder that holds the weights with the best evaluation so far. Torch-free."""

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path

STATE_FILE = "state.json"


class BestModel:
    """Decides which evaluation is the best so far, and replaces the folder's weights by those of the best one.

    Args:
        metric: name of the metric that decides.
        folder: of the best weights.
        lowest: whether lower values are better.
    """

    def __init__(self, metric: str, folder: Path, *, lowest: bool = False) -> None:
        self.metric = metric
        self._folder = folder
        self._lowest = lowest
        self._best = math.inf if lowest else -math.inf

    def beaten_by(self, metrics: Mapping[str, float]) -> bool:
        """Return whether the metric is better than in all earlier evaluations. Any number is better than none."""
        value = metrics[self.metric]
        return value < self._best if self._lowest else value > self._best

    def state(self) -> dict[str, float] | None:
        """Return the best value so far by the metric's name, for `restore`; None before the first evaluation."""
        return {self.metric: self._best} if math.isfinite(self._best) else None

    def restore(self, state: Mapping[str, float] | None) -> None:
        """Continue with the best value of another process, unless another metric decided there."""
        self._best = (state or {}).get(self.metric, self._best)

    @property
    def staging(self) -> Path:
        """The folder for new weights, which `keep` then moves into place.

        A run that dies while it writes leaves the previous best weights intact.
        """
        return self._folder.with_name(f".{self._folder.name}.new")

    def keep(self, step: int, metrics: Mapping[str, float], state: Mapping[str, float], *, writes: bool = True) -> None:
        """Replace the folder by `staging`, with the step, the metric's value and `state` in a JSON file.

        All ranks call this, so that all know the best value. Only the rank with `writes` True touches the disk.
        """
        self._best = metrics[self.metric]
        if not writes:
            return
        summary = {"step": step, "metric": self.metric, "value": self._best, **state}
        (self.staging / STATE_FILE).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        old = self._folder.with_name(f".{self._folder.name}.old")
        if self._folder.exists():
            shutil.rmtree(old, ignore_errors=True)  # of a process that was killed before it had removed it
            self._folder.rename(old)
        self.staging.rename(self._folder)
        shutil.rmtree(old, ignore_errors=True)
