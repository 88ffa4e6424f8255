"""Starts the trackers of a run; each library is imported only where it is wanted."""

from pathlib import Path

from rlhf_train.run.trackers.spec import Tracker, TrackerSpec


def open_tensorboard(spec: TrackerSpec, folder: Path) -> Tracker:
    """Return the tracker for TensorBoard; `folder` is for its events where `spec` names none."""
    from rlhf_train.run.trackers.tensorboard import TensorBoardTracker

    if spec.tensorboard_dir is None:
        return TensorBoardTracker(folder)
    return TensorBoardTracker(Path(spec.tensorboard_dir) / (spec.run_name or folder.parent.name))


def open_remote(spec: TrackerSpec, folder: Path, config: str) -> dict[str, Tracker]:
    """Return the trackers that may lie on other machines, by their names for people.

    Args:
        spec: which.
        folder: of the run; what they leave on this machine goes into it.
        config: the resolved configuration as TOML, which they show.

    Raises:
        ConfigError: one cannot start.
    """
    trackers: dict[str, Tracker] = {}
    if spec.wandb:
        from rlhf_train.run.trackers.wandb import WandbTracker

        trackers["Weights & Biases"] = WandbTracker(spec, folder, config)
    if spec.mlflow_uri is not None:
        from rlhf_train.run.trackers.mlflow import MlflowTracker

        trackers["MLflow"] = MlflowTracker(spec, folder, config)
    return trackers
