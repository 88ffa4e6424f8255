"""Sends metrics to Weights & Biases."""

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path

import wandb

from rlhf_data.errors import ConfigError
from rlhf_train.run.trackers.spec import TrackerSpec


def check_key() -> None:
    """Raise ConfigError when WANDB_MODE asks for an API key and there is none, or it is refused.

    `wandb.init` would wait for input.
    """
    if os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun"):
        return
    hint = "set WANDB_API_KEY, run `wandb login` once, or set WANDB_MODE=offline"
    try:
        has_key = wandb.login(prompt=False)
    except (wandb.Error, ValueError) as error:  # a key of a wrong form, or one that the server does not know
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"Weights & Biases does not take the API key: {reason}", hint=hint) from None
    if not has_key:
        raise ConfigError("Weights & Biases has no API key", hint=hint)


class WandbTracker:
    """Sends metrics to Weights & Biases, or writes them to the run's folder if WANDB_MODE is `offline`.

    `where` is the web page of the run, or the folder that `wandb sync` uploads.
    """

    def __init__(self, spec: TrackerSpec, folder: Path, config: str, run_id: str | None = None) -> None:
        """Start a run, or continue `run_id`.

        Raises ConfigError when there is no API key, or when the server refuses the run.
        """
        check_key()
        try:
            self._run = wandb.init(
                entity=spec.wandb_org,
                project=spec.wandb_project or spec.project,
                group=spec.wandb_group,
                name=spec.run_name,
                id=run_id,
                resume=None if run_id is None else "allow",
                dir=folder,
                config=tomllib.loads(config),
                settings=wandb.Settings(console="off", silent=True),
            )
        except wandb.Error as error:
            hint = "see ``wandb_org`` and ``wandb_project``, or set WANDB_MODE=offline"
            raise ConfigError(f"Weights & Biases refuses the run: {error}", hint=hint) from error
        self.run_id = self._run.id
        # An offline run has no web page; reading `url` would print a warning.
        self.where = self._run.dir if self._run.offline else self._run.url

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Tracker`."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """See `Tracker`. Uploads the remaining metrics, or writes them to the run's folder."""
        self._run.finish()
        if self._run.offline:
            # In an offline run `finish` returns before wandb's service process has written the file. `teardown` stops
            # the service and waits for it.
            wandb.teardown()
