"""What every tracker does, and which ones a run has."""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from rlhf_data.errors import ConfigError


class Tracker(Protocol):
    """Records the numbers of a run.

    Attributes:
        where: where people find them: a path or an address.
    """

    where: str

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record metrics under a step, or under an update of an offline run. Steps never decrease; one step may come
        several times, with other names. NaN and infinities are values."""

    def close(self) -> None:
        """Finish: everything that was logged is where it belongs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerSpec:
    """Which trackers a run has beside `metrics.jsonl`, and how often they are told.

    Attributes:
        project: heads the runs of one kind: the Weights & Biases project, where none is named, and the MLflow
            experiment.
        run_name: of this run.
        logging_steps: steps, or updates of an offline run, from one that is tracked to the next.
        tensorboard_dir: folder of event files; None for one in the run's folder.
        wandb: use Weights & Biases. The key comes from WANDB_API_KEY or `wandb login`, and is never part of a spec.
        wandb_org, wandb_group, wandb_project: where the run is filed there; None for the account's own.
        mlflow_uri: MLflow's tracking URI, or a folder; None for no MLflow.
    """

    project: str = "rlhf"
    run_name: str | None = None
    logging_steps: int = 1
    tensorboard_dir: str | None = None
    wandb: bool = False
    wandb_org: str | None = None
    wandb_group: str | None = None
    wandb_project: str | None = None
    mlflow_uri: str | None = None

    def check_installed(self) -> None:
        """Raise ConfigError for a tracker whose library is not installed."""
        for wanted, flag, module in ((self.wandb, "use_wandb", "wandb"), (self.mlflow_uri, "use_mlflow", "mlflow")):
            if wanted and importlib.util.find_spec(module) is None:
                message = f"--{flag} needs the Python package {module}, which is not installed"
                raise ConfigError(message, hint=f"pip install 'rlhf-cli[{module}]'")
