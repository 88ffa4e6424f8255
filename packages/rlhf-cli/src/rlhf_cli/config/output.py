"""Options of output: the folder of a run, and the trackers of its metrics."""

import os
from collections.abc import Collection
from functools import cached_property
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator

from rlhf_cli.config.paths import read_own_code
from rlhf_data.errors import with_hint
from rlhf_data.options.checks import without_effect
from rlhf_data.options.declare import Section, flag, matching
from rlhf_train.algorithms.own_code import OwnCode
from rlhf_train.run.recorder import RecordFormat
from rlhf_train.run.trackers.spec import TrackerSpec

WANDB_KEY = "WANDB_API_KEY"


def _keep_key(value: Any) -> Any:
    """Return whether to use Weights & Biases. The value may also be an API key.

    A key is moved to the environment variable that the library reads, so that it never gets into a configuration, log
    or file.
    """
    if not isinstance(value, str) or value.strip().lower() in ("true", "false", "none", ""):
        return False if value in ("None", "none", "") else value
    os.environ[WANDB_KEY] = value.strip()
    return True


def _without_password(uri: str) -> str:
    if urlsplit(uri).password is not None:
        message = "the address has a password, which would be saved with the configuration"
        hint = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, and leave them out of --use_mlflow"
        raise ValueError(with_hint(message, hint))
    return uri


class OutputSection(Section, title="output"):
    """The folder of a run, and the trackers of its metrics."""

    save_path: str | None = flag(
        None, "new or empty folder for everything that a run writes; None: ./rlhf-output/COMMAND-DATE-TIME"
    )
    logging_steps: int = flag(
        1, "show and track every Nth step (ppo) or update (other commands); metrics.jsonl has all of them", ge=1
    )
    timeline: bool = flag(
        False, "write timeline.json: what processes did and waited for, and when; https://ui.perfetto.dev shows it"
    )
    use_tensorboard: str | None = flag(
        None, "folder for TensorBoard events, in which each run gets a folder; None: the run's own folder"
    )
    use_wandb: Annotated[bool, BeforeValidator(_keep_key)] = flag(
        False, "log to Weights & Biases with the key in WANDB_API_KEY; or give the key here, where it is never saved"
    )
    wandb_org: str | None = flag(None, "Weights & Biases team or user; None: the account's default")
    wandb_group: str | None = flag(None, "Weights & Biases group of runs")
    wandb_project: str | None = flag(None, "Weights & Biases project; None: rlhf-COMMAND")
    wandb_run_name: str | None = flag(None, "name of the run in all trackers; None: the name of its folder")
    use_mlflow: Annotated[str, AfterValidator(_without_password)] | None = flag(
        None, "log to MLflow: the URI of a tracking server, or a folder; the experiment is rlhf-COMMAND"
    )

    def trackers(self, command: str, run_name: str) -> TrackerSpec:
        """Return the trackers of a run. Unless --wandb_run_name names it, it is called `run_name`, as its folder."""
        own = {"project": f"rlhf-{command}", "run_name": self.wandb_run_name or run_name}
        return TrackerSpec(**own, **matching(TrackerSpec, self))

    def check(self, given: Collection[str]) -> list[str]:
        """Return a notice for each option that has no effect."""
        names = ["wandb_org", "wandb_group", "wandb_project"]
        return without_effect(given, (not self.use_wandb, names, "--use_wandb is off"))


class PpoOutputSection(OutputSection):
    """Adds the critic, rollouts, and metrics of the user's own."""

    save_value_network: bool = flag(False, "save the critic beside the policy")
    record: bool = flag(
        True, "write all rollouts that are trained on to rollouts.jsonl, which --replay and `rlhf replay` read"
    )
    record_token_values: bool = flag(
        True,
        "write token_values/, what was computed for each token: the gap between trainer and engine, ratio, advantage,"
        " entropy, and log-ratio to the reference, about 10 bytes per token, which `rlhf report` shows",
    )
    record_format: RecordFormat = flag(
        "jsonl",
        "of rollouts.jsonl and eval_rollouts.jsonl; columns: binary files rollouts.columns and eval_rollouts.columns, a"
        " quarter of the size, which `python -m rlhf_rollout.records_io FILE` prints as JSON lines",
    )
    metrics_path: str | None = flag(
        None,
        "FILE.py with `step_metrics`, your own function of the responses and scores of a step, whose numbers are the"
        " metrics own/NAME",
    )

    @cached_property
    def own_code(self) -> dict[str, OwnCode]:
        """See `read_own_code`."""
        return read_own_code(self)

    def check(self, given: Collection[str]) -> list[str]:
        """See `OutputSection.check`."""
        unused = without_effect(given, (not self.record, ["record_token_values"], "--record is off"))
        return super().check(given) + unused
