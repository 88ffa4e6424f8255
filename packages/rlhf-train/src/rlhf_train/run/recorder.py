"""What a run leaves behind: metrics, TensorBoard events, the resolved configuration, rollouts, and the final model."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_data.errors import ConfigError
from rlhf_data.records import RolloutGroup
from rlhf_rollout.records_io import RolloutWriter
from rlhf_train.run.trackers.jsonl import JsonlTracker
from rlhf_train.run.trackers.tensorboard import TensorBoardTracker

ARTIFACTS: Mapping[str, str] = {
    "metrics": "metrics.jsonl",
    "tensorboard": "tensorboard",
    "config": "config.toml",
    "rollouts": "rollouts.jsonl",
    "held-out rollouts": "eval_rollouts.jsonl",
    "final model": "model",
    "best model": "best_model",
    "averaged model": "ema_model",
    "critic": "critic",
}


def check_save_path(save_path: str) -> None:
    """Raise ConfigError when there is something in the folder already."""
    folder = Path(save_path)
    if folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(f"save_path {folder} is not empty", hint="name a new folder with --save_path")


class Recorder:
    """Writes a run's folder."""

    def __init__(self, save_path: str, config: str) -> None:
        """Make the folder and save the configuration. Raises ConfigError when there is something in it already."""
        check_save_path(save_path)
        self.folder = Path(save_path)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path("config").write_text(config, encoding="utf-8")
        self._trackers = [JsonlTracker(self.path("metrics")), TensorBoardTracker(self.path("tensorboard"))]
        self._writers: dict[str, RolloutWriter] = {}

    def path(self, artifact: str) -> Path:
        """Return where an artifact lies."""
        return self.folder / ARTIFACTS[artifact]

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the numbers of one step."""
        for tracker in self._trackers:
            tracker.log(step, metrics)

    def rollouts(self, artifact: str, step: int, groups: Sequence[RolloutGroup], **fields: Any) -> None:
        """Append one record a rollout, with the step and further `fields` in front."""
        if artifact not in self._writers:
            self._writers[artifact] = RolloutWriter(self.path(artifact))
        for group in groups:
            self._writers[artifact].write(group, step=step, **fields)

    def close(self) -> None:
        """Close every file."""
        for tracker in self._trackers:
            tracker.close()
        for writer in self._writers.values():
            writer.close()
