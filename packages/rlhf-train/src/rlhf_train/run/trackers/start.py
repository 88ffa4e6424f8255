"""Starts the trackers of a run. A tracker's library is imported only if the tracker is used."""

import importlib.util
from collections.abc import Mapping
from pathlib import Path

from rlhf_data.errors import ConfigError, installs
from rlhf_train.run.trackers.spec import Tracker, TrackerSpec


def check_trackers(spec: TrackerSpec) -> None:
    """Raise ConfigError when the library of a chosen tracker is not installed, or Weights & Biases has no key."""
    for wanted, name, module in ((spec.use_wandb, "use_wandb", "wandb"), (spec.use_mlflow, "use_mlflow", "mlflow")):
        if wanted and importlib.util.find_spec(module) is None:
            message = f"``{name}`` needs the Python package {module}, which is not installed"
            raise ConfigError(message, hint=installs(f"rlhf-cli[{module}]"))
    if spec.use_wandb:
        from rlhf_train.run.trackers.wandb import check_key

        check_key()


def open_tensorboard(spec: TrackerSpec, folder: Path, resumed_step: int | None = None) -> Tracker:
    """Return the TensorBoard tracker. It writes to `folder` if `spec` names no folder.

    A run that continues after `resumed_step` hides the events of later steps, which it writes anew.
    """
    from rlhf_train.run.trackers.tensorboard import TensorBoardTracker

    if spec.use_tensorboard is not None:
        folder = Path(spec.use_tensorboard) / (spec.run_name or folder.parent.name)
    return TensorBoardTracker(folder, resumed_step)


def open_remote(
    spec: TrackerSpec, folder: Path, config: str, run_ids: Mapping[str, str] | None = None
) -> dict[str, Tracker]:
    """Return the trackers that may be on other machines, by their display names.

    Args:
        spec: chooses the trackers.
        folder: of the run, for files that trackers write locally.
        config: the resolved configuration as TOML, for the trackers to show.
        run_ids: of runs that go on, by the trackers' names; a tracker that is not in it starts a new run.

    Raises:
        ConfigError: a tracker cannot start.
    """
    trackers: dict[str, Tracker] = {}
    run_ids = run_ids or {}
    if spec.use_wandb:
        from rlhf_train.run.trackers.wandb import WandbTracker

        name = "Weights & Biases"
        trackers[name] = WandbTracker(spec, folder, config, run_ids.get(name))
    if spec.use_mlflow is not None:
        from rlhf_train.run.trackers.mlflow import MlflowTracker

        trackers["MLflow"] = MlflowTracker(spec, folder, config, run_ids.get("MLflow"))
    return trackers
