"""`replay`: repeat one step of a run from what it recorded, and compare the metrics."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_cli.commands.ppo import COMMAND_LINE as PPO
from rlhf_cli.config.paths import CONFIG_FILE, OWN_CODE, user_path
from rlhf_cli.console.capture import captured
from rlhf_cli.console.exits import SUCCESS, exit_status
from rlhf_data.errors import ConfigError, DataError
from rlhf_data.options.checks import lacking
from rlhf_data.options.command_line import CommandLine, read_toml, show_parsed
from rlhf_data.options.declare import Config, Section, flag
from rlhf_data.options.exits import FAILURE
from rlhf_data.safety import MASK
from rlhf_train.algorithms.own_code import FOLDER as OWN_FOLDER
from rlhf_train.run.interrupts import Interrupts

if TYPE_CHECKING:
    from rlhf_cli.console.views import Console
    from rlhf_train.online_job import OnlineJob

DESCRIPTION = """`rlhf replay RUN_DIR --step N` trains step N of the run in that folder once more, from the rollouts
that it recorded and from its newest checkpoint before step N (from the initial models without one), and compares all
metrics but times. No engine and no reward is started, and nothing in RUN_DIR changes. The status is 0 if all metrics
agree, else 1."""

# Metrics that the rollouts and the models decide: the others tell how rollouts were made, or how long things took.
_COMPARED = (
    *(
        "rollout/",
        "train/",
        "policy/",
        "value/",
        "kl/",
        "entropy/",
        "mismatch/",
        "async/staleness",
        "async/mixed",
        "own/",
    ),
    *("samples/trained", "samples/stale_tokens", "samples/nonfinite_tokens"),
)
# What a replay must not send to trackers, or write.
_QUIET = ("--record", "false", "--use_wandb", "false", "--use_mlflow", "None", "--use_tensorboard", "None")


class ReplaySection(Section, title="replay"):
    """Which step is repeated."""

    run: str | None = flag(None, "the same as RUN_DIR")
    step: int | None = flag(None, "the step to repeat", ge=1)
    tolerance: float = flag(
        0.0,
        "largest difference between two metrics that still agree, as a share of the recorded one, or of 1 if that is"
        " smaller. 0: equal bits, as on CPUs with the same number of threads. GPUs add up in an order that varies, and"
        " need a tolerance",
        ge=0,
    )


class ReplayConfig(Config):
    """All options of `replay`."""

    replay: ReplaySection = ReplaySection()

    def missing(self) -> list[ConfigError]:
        """See `Config`."""
        hint = "write `rlhf replay RUN_DIR --step N`"
        found = lacking(self.replay, "run", "a run must be named", hint)
        return found + lacking(self.replay, "step", "one step is repeated", hint)


COMMAND_LINE = CommandLine(
    config=ReplayConfig,
    prog="rlhf replay",
    words="RUN_DIR --step N",
    description=DESCRIPTION,
    resolve=user_path,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    with Interrupts():
        return exit_status(_run, argv)


def _run(argv: Sequence[str]) -> int:
    parsed = COMMAND_LINE.parse_naming("--run", argv)
    section = parsed.config.replay
    show_parsed(parsed)
    if parsed.dry_run:
        return SUCCESS
    assert section.run and section.step
    run = user_path(section.run)
    recorded = _metrics(run, section.step)

    from rlhf_cli.console.views import Console

    with tempfile.TemporaryDirectory(prefix="rlhf-replay-") as scratch:
        folder = Path(scratch) / "run"
        with captured(folder) as (_, err):
            console = Console(err, err)  # stdout is for the comparison
            try:
                _repeat(run, section.step, folder, console)
            finally:
                console.done()
        rows = compare(recorded, _metrics(folder, section.step), section.tolerance)
    width = max(len(name) for name, *_ in rows)
    print("  ".join(["metric".ljust(width), *(title.rjust(22) for title in ("recorded", "replayed", "difference"))]))
    for name, *numbers, agrees in rows:
        cells = ("-".rjust(22) if number is None else f"{number!r:>22}" for number in numbers)
        print("  ".join([name.ljust(width), *cells, *([] if agrees else ["differs"])]))
    num_other = sum(not agrees for *_, agrees in rows)
    print(f"step {section.step}: {len(rows) - num_other} of {len(rows)} metrics agree within {section.tolerance:g}")
    return FAILURE if num_other else SUCCESS


def _metrics(run: Path, step: int) -> dict[str, float | None]:
    """Return the metrics of a step that are compared. Raises DataError if the run has none."""
    path = run / "metrics.jsonl"
    if not path.is_file():
        hint = "name the folder of a run: its --save_path, or rlhf-output/COMMAND-DATE-TIME"
        raise DataError(f"there is no run in {run}: it has no metrics.jsonl", hint=hint)
    last = 0
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            line = json.loads(text)
            last = max(last, line["step"])
            if line["step"] == step and "time/step" in line:
                return {name: value for name, value in line.items() if name.startswith(_COMPARED)}
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}:{number} is no line of metrics: {error}", hint="repair or remove it") from None
    raise DataError(f"{path} has no step {step}", hint=f"the last step that it has is {last}: use --step {last}")


def _repeat(run: Path, step: int, folder: Path, console: "Console") -> None:
    """Train up to a step of a run, and leave the metrics in a folder."""
    console.working("checking models and record")
    job = _job(run, step, folder)

    from rlhf_cli.console.views import RunView
    from rlhf_train.online import run_online

    run_online(job, RunView(console, step))


def _job(run: Path, step: int, folder: Path) -> "OnlineJob":
    """Return the job that repeats a step of a run, and writes to `folder`.

    Raises DataError for a step that is not in the record, and ConfigError like `rlhf ppo`.
    """
    from rlhf_cli.commands.ppo_job import make_job, make_plan
    from rlhf_cli.preflight.devices import find_gpus
    from rlhf_cli.preflight.inputs import check_inputs
    from rlhf_train.run.checkpoint import CheckpointSpec

    stored = read_toml(run / CONFIG_FILE, PPO.config)
    # Secrets of addresses are not stored, and nothing asks the servers there.
    texts = {name: value for name, value in stored.items() if isinstance(value, str)}
    flags = {name: text.replace(MASK, "") for name, text in texts.items() if MASK in text}
    flags |= {"replay": str(run), "save_path": str(folder)}
    copies = {name: run / OWN_FOLDER / f"{function}.py" for name, function in OWN_CODE.items() if name in stored}
    flags |= {name: str(path) for name, path in copies.items() if path.is_file()}
    config = PPO.parse([*(f"--{name}={value}" for name, value in flags.items()), *_QUIET]).config
    inputs = check_inputs(config, folder)
    if step > inputs.recording.num_steps:
        message = f"{inputs.recording.path} has {inputs.recording.num_steps} complete steps, and --step is {step}"
        raise DataError(message, hint=f"use --step {inputs.recording.num_steps}")
    nodes, ray_address = find_gpus()
    job = make_job(config, inputs, make_plan(config, nodes), folder, ray_address)
    # Without `full`, nothing is ever written to the run's own checkpoints.
    home = CheckpointSpec(folder=stored.get("ckpt_path") or "").home(run)
    checkpoints = CheckpointSpec(folder=str(home), full=False, resume=True, before=step)
    return replace(job, num_steps=step, checkpoints=checkpoints, saves_models=False)


def compare(
    recorded: Mapping[str, float | None], replayed: Mapping[str, float | None], tolerance: float
) -> list[tuple[str, float | None, float | None, float | None, bool]]:
    """Return for each metric its name, both values, the difference, and whether they agree.

    Values are None where they are missing or not finite, and then agree only if both are. Others agree if
    |difference| <= tolerance x max(1, |recorded|).
    """
    rows = []
    for name in sorted(recorded.keys() | replayed.keys()):
        one = recorded.get(name)
        other = replayed.get(name)
        difference = None if one is None or other is None else other - one
        agrees = name in recorded and name in replayed and one == other
        if difference is not None:
            agrees = abs(difference) <= tolerance * max(1.0, abs(one))
        rows.append((name, one, other, difference, agrees))
    return rows
