"""The interface of trackers, and the settings that choose them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


class Tracker(Protocol):
    """Records the metrics of a run.

    Attributes:
        where: path or address where people find them.
        run_id: with which the tracker finds the run again; None for a file.
    """

    where: str
    run_id: str | None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record metrics of a step, or of an update of an offline run.

        Steps never decrease. One step may be logged several times with different names. Values may be NaN or infinite.
        """

    def close(self) -> None:
        """Write or send everything that was logged, and release all resources."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerSpec:
    """The trackers of a run besides `metrics.jsonl`, and how often they get metrics.

    Attributes:
        project: name of the MLflow experiment, and of the Weights & Biases project if `wandb_project` is None.
        run_name: name of this run in all trackers; None for a name that the tracker chooses.
        logging_steps: steps, or updates of an offline run, between two that are sent to trackers.
        use_tensorboard: folder of event files; None for one in the run's folder.
        use_wandb: use Weights & Biases. The key comes from WANDB_API_KEY or `wandb login`, and is never part of this
            record.
        wandb_org, wandb_group, wandb_project: entity, group and project of the run in Weights & Biases; None for the
            account's defaults.
        use_mlflow: tracking URI of MLflow, or a folder; None for no MLflow.
    """

    project: str = "rlhf"
    run_name: str | None = None
    logging_steps: int = 1
    use_tensorboard: str | None = None
    use_wandb: bool = False
    wandb_org: str | None = None
    wandb_group: str | None = None
    wandb_project: str | None = None
    use_mlflow: str | None = None
