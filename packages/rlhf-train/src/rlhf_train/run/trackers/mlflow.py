"""Sends metrics to MLflow."""

import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from mlflow import MlflowClient
from mlflow.entities import Metric
from mlflow.exceptions import MlflowException

from rlhf_data.errors import ConfigError
from rlhf_data.safety import without_secrets
from rlhf_train.run.trackers.spec import TrackerSpec


class MlflowTracker:
    """Sends metrics to an MLflow tracking server or to a local store, with the configuration as an artifact.

    `where` names the tracking URI, the experiment and the run.
    """

    def __init__(self, spec: TrackerSpec, folder: Path, config: str, run_id: str | None = None) -> None:
        """Start a run, or continue `run_id`. Raises ConfigError when the server or store cannot be used."""
        assert spec.use_mlflow
        if urlsplit(spec.use_mlflow).scheme in ("", "file"):
            # MLflow no longer develops folder stores, and refuses to open one without this variable.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        try:
            self._client = MlflowClient(tracking_uri=spec.use_mlflow)
            experiment = self._client.get_experiment_by_name(spec.project)
            experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(spec.project)
            self.run_id = run_id or self._client.create_run(experiment_id, run_name=spec.run_name).info.run_id
            self._client.update_run(self.run_id, "RUNNING")
            self._client.log_text(self.run_id, config, "config.toml")
        except (MlflowException, OSError, ImportError) as error:
            raise ConfigError(
                without_secrets(f"MLflow at {spec.use_mlflow} cannot be used: {error}"),
                hint="give ``use_mlflow`` the URI of a tracking server, or a folder",
            ) from error
        self.where = f"{without_secrets(spec.use_mlflow)}, experiment {spec.project}, run {self.run_id}"

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Tracker`. Names change to the characters that MLflow allows, for example `pass@4` to `pass_at_4`."""
        now_ms = int(time.time() * 1000)
        entries = [Metric(metric_name(name), float(value), now_ms, step) for name, value in metrics.items()]
        self._client.log_batch(self.run_id, entries)

    def close(self) -> None:
        """See `Tracker`. The run is marked as finished."""
        self._client.set_terminated(self.run_id)


def metric_name(name: str) -> str:
    """Return `name` with only characters that MLflow allows: letters, digits, `_`, `-`, `.`, `:`, `/` and space."""
    return re.sub(r"[^/\w.\- :]", "_", name.replace("@", "_at_"))
