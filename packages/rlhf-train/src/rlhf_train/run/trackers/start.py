"""Starts the trackers of a run. A tracker's library is imported only if the tracker is used."""

from pathlib import Path

from rlhf_train.run.trackers.spec import Tracker, TrackerSpec


def open_tensorboard(spec: TrackerSpec, folder: Path) -> Tracker:
    """Return the TensorBoard tracker. It writes to `folder` if `spec` names no folder."""
    from rlhf_train.run.trackers.tensorboard import TensorBoardTracker

    if spec.tensorboard_dir is None:
        return TensorBoardTracker(folder)
    return TensorBoardTracker(Path(spec.tensorboard_dir) / (spec.run_name or folder.parent.name))


def open_remote(spec: TrackerSpec, folder: Path, config: str) -> dict[str, Tracker]:
    """Return the trackers that may be on other machines, by their display names.

    Args:
        spec: chooses the trackers.
        folder: of the run, for files that trackers write locally.
        config: the resolved configuration as TOML, for the trackers to show.

    Raises:
        ConfigError: a tracker cannot start.
    """
    trackers: dict[str, Tracker] = {}
    if spec.wandb:
        from rlhf_train.run.trackers.wandb import WandbTracker

        trackers["Weights & Biases"] = WandbTracker(spec, folder, config)
    if spec.mlflow_uri is not None:
        from rlhf_train.run.trackers.mlflow import MlflowTracker

        trackers["MLflow"] = MlflowTracker(spec, folder, config)
    return trackers
