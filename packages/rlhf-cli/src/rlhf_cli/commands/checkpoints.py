"""`checkpoints`: list, verify and prune the checkpoints of a run, and export the model of one."""

import shutil
import time
import tomllib
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_cli.config.model import OfflineModelSection
from rlhf_cli.config.paths import CONFIG_FILE, check_output_folder, model_path, parts, user_path
from rlhf_cli.console.exits import SUCCESS, exit_status
from rlhf_cli.preflight.here import Absent
from rlhf_data.errors import CheckpointError, ConfigError
from rlhf_data.options.checks import lacking, without_effect
from rlhf_data.options.command_line import CommandLine
from rlhf_data.options.declare import Config, flag, one_of
from rlhf_data.options.exits import FAILURE
from rlhf_data.options.sections import TrustSection
from rlhf_data.own_code import trusted
from rlhf_rollout.commands.terminal import TERMINAL, log_file
from rlhf_train.run.checkpoint import FOLDER, MANIFEST, Checkpoint, folders, read_checkpoint, superfluous
from rlhf_train.specs import ModelSpec

if TYPE_CHECKING:
    from rlhf_train.engine.shards import ShardReader

DESCRIPTION = """`rlhf checkpoints RUN_DIR` lists the checkpoints of the run in that folder, of `ppo` or of a command
over fixed examples: step, metric, size, age, and what is wrong with one that is not whole."""
_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
_ROLES = ("actor", "critic", "draft", "reward")
Role = one_of(_ROLES)


class CheckpointsSection(TrustSection, title="checkpoints"):
    """What to do with the checkpoints of a run."""

    run: str | None = flag(None, "the same as RUN_DIR")
    verify: bool = flag(False, "read all files and compare them with their hashes; the status is 1 if one differs")
    prune: int | None = flag(
        None, "remove all whole checkpoints but the newest N and the best; --dry_run lists them", ge=1
    )
    export: int | None = flag(None, "write the model of the checkpoint of this step to --output_path, without a GPU")
    role: Role | None = flag(None, "model to export; None: the policy, or the reward model of `rm`")
    output_path: str | None = flag(None, "new or empty folder for the exported model")


class CheckpointsConfig(Config):
    """All options of `checkpoints`."""

    checkpoints: CheckpointsSection = CheckpointsSection()

    def missing(self) -> list[ConfigError]:
        """See `Config`."""
        section = self.checkpoints
        found = lacking(section, "run", "a run must be named", "write `rlhf checkpoints RUN_DIR`")
        if section.export is not None:
            found += lacking(section, "output_path", "--export writes a folder", "add --output_path DIR")
        return found

    def check(self, given: Collection[str]) -> list[str]:
        """See `Config`."""
        section = self.checkpoints
        if section.export is not None and section.prune is not None:
            raise ConfigError("--export and --prune are two tasks", hint="export first, then prune")
        return without_effect(
            given, (section.export is None, ["role", "output_path", "trust_remote_code"], "there is no --export")
        )


COMMAND_LINE = CommandLine(
    config=CheckpointsConfig, prog="rlhf checkpoints", words="RUN_DIR", description=DESCRIPTION, resolve=user_path
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    return exit_status(_run, argv)


def _run(argv: Sequence[str]) -> int:
    parsed = COMMAND_LINE.parse_naming("--run", argv)
    section = parsed.config.checkpoints
    for notice in parsed.notices:
        TERMINAL.say(f"notice: {notice}")
    if section.run is None:
        raise parsed.missing[0]
    run = user_path(section.run)
    found = _find(run)
    if section.export is not None:
        _export(run, found, section, dry_run=parsed.dry_run)
        return SUCCESS
    if section.prune is not None:
        _prune(found, section.prune, dry_run=parsed.dry_run)
        return SUCCESS
    lines = [("step", "metric", "size", "age", "state")]
    for path in found:
        lines.append(_row(path, verify=section.verify))
    widths = [max(len(line[column]) for line in lines) for column in range(4)]
    for *cells, state in lines:
        print("  ".join([*(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)), state]))
    return FAILURE if section.verify and any(line[-1] != "whole" for line in lines[1:]) else SUCCESS


def _find(run: Path) -> list[Path]:
    """Return the folders of a run's checkpoints, the oldest first. Raises ConfigError if there are none."""
    if not run.is_dir():
        raise ConfigError(f"there is no folder {run}", hint="name the folder of a run, its --save_path")
    home = Path(_options(run).get("checkpoint", {}).get("ckpt_path") or run / FOLDER)
    found = folders(home)
    if not found:
        hint = "runs save them with --save_steps N, and when they end early; --ckpt_path names another folder"
        raise ConfigError(f"there are no checkpoints in {home}", hint=hint)
    return found


def _options(run: Path) -> dict[str, Any]:
    """Return the options of a run by section; none if its folder has no configuration."""
    path = run / CONFIG_FILE
    try:
        return tomllib.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", hint="name the folder of a run") from None


def _problems(path: Path, *, verify: bool) -> list[str]:
    try:
        return read_checkpoint(path).problems(content=verify)
    except CheckpointError as error:
        return [str(error).partition("\n")[0]]


def _row(path: Path, *, verify: bool) -> tuple[str, ...]:
    """Return the step, the metric, the size, the age and the state of a checkpoint."""
    step = path.name.removeprefix("step-")
    try:
        checkpoint = read_checkpoint(path)
    except CheckpointError as error:
        return step, "-", "-", "-", str(error).partition("\n")[0]
    seconds = max(time.time() - (path / MANIFEST).stat().st_mtime, 0)
    length, unit = next((row for row in _UNITS if seconds >= row[0]), _UNITS[-1])
    metric = "-" if checkpoint.metric is None else f"{checkpoint.metric:.4g}"
    size = f"{checkpoint.size_bytes / 2**20:.1f} MiB"
    state = "; ".join(checkpoint.problems(content=verify)) or "whole"
    return step, metric, size, f"{seconds // length:.0f} {unit}", state


def _prune(found: Sequence[Path], num: int, *, dry_run: bool) -> None:
    """Remove whole checkpoints but the newest and the best. The others may be of use to a person, who can see them."""
    whole = [read_checkpoint(path) for path in found if not _problems(path, verify=True)]
    gone = superfluous(whole, max_num=num)
    for checkpoint in gone:
        print(f"{'would remove' if dry_run else 'removed'} {checkpoint.path}")
        if not dry_run:
            shutil.rmtree(checkpoint.path)
    print(f"{len(whole) - len(gone)} of {len(found)} checkpoints are whole and kept")


def _export(run: Path, found: Sequence[Path], section: CheckpointsSection, *, dry_run: bool) -> None:
    """Write the model of one checkpoint as a Hugging Face folder."""
    paths = {int(path.name.removeprefix("step-")): path for path in found}
    if section.export not in paths:
        message = f"--export {section.export}: there is no checkpoint of this step, but of {', '.join(map(str, paths))}"
        raise ConfigError(message, hint=f"use --export {max(paths)}")
    path = paths[section.export]
    if problems := _problems(path, verify=True):
        raise CheckpointError(f"{path} is not whole: {'; '.join(problems[:3])}", hint="export that of another step")
    checkpoint = read_checkpoint(path)
    there = sorted({name.partition("-")[0] for name in checkpoint.files if name.endswith(".safetensors")} & set(_ROLES))
    role = section.role or (there[0] if there else "")
    if role not in there:
        message = f"the checkpoint {path} has no state of {role or 'a model'}, but of {', '.join(there) or 'none'}"
        raise ConfigError(message, hint="use --role with one that it has; with --disable_ds_ckpt it has only `hf`")
    out = user_path(section.output_path)
    check_output_folder(out, "--output_path")
    spec = _model_spec(_options(run), checkpoint, role, section.trust_remote_code)
    absent = Absent()
    absent.models("pretrain", spec.path)
    if dry_run and absent.unseen:
        TERMINAL.say(f"notice: not checked: {absent.unseen[0]}")
    else:
        with TERMINAL.progress.doing(f"checking {spec.path}"):
            _check_model(spec, checkpoint, role)
    print(f"{'would write' if dry_run else 'writing'} the {role} of {path} to {out}")
    if not dry_run:
        with TERMINAL.captured(log_file("checkpoints", str(out))), TERMINAL.progress.doing(f"loading {role}"):
            _write_model(spec, checkpoint, role, out)
        print(f"written to {out}")


def _model_spec(options: dict[str, Any], checkpoint: Checkpoint, role: str, may_run: bool) -> ModelSpec:
    """Return what a run with these options began a model with."""
    given = options.get("model", {})
    section = OfflineModelSection(**{name: given[name] for name in given.keys() & OfflineModelSection.model_fields})
    base = section.pretrain
    lora = section.lora
    if role == "critic":
        lora = section.adapters(given.get("critic_lora_rank", section.lora_rank))
        rewards = parts(options.get("reward", {}).get("reward_pretrain", ""))
        base = given.get("critic_pretrain") or next(iter(rewards), base)
    if role == "draft":
        lora = None
        base = options.get("engine", {}).get("vllm_draft_model")
    if base is None:
        raise ConfigError(f"the run's {CONFIG_FILE} names no model", hint="put the one of the run into its folder")
    spec = section.spec(model_path(trusted(base, may_run)), {"zero_stage": 0})
    images = "trained" if options.get("data", {}).get("image_key") else ""
    return replace(spec, lora=lora, images=images, chat_template=checkpoint.state().get("run", {}).get("chat_template"))


def _check_model(spec: ModelSpec, checkpoint: Checkpoint, role: str) -> None:
    """Check that the model which a run began with is there, and has the weights that a checkpoint changes.

    Reads the headers of its files only, and nothing of a model that is named on the hub but its tokenizer.
    """
    import torch

    from rlhf_models.loading import check_critic, check_trained_copy, check_weights, load_tokenizer
    from rlhf_models.lora import add_lora

    load_tokenizer(spec.path)  # is written, too
    check_weights(spec.path)
    has_values = role not in ("actor", "draft")
    if has_values:
        check_critic(spec.path)
    model = check_trained_copy(spec.path, spec.dtype, has_values=has_values)
    if model is None:
        return
    if spec.lora is not None:
        with torch.device("meta"):
            add_lora(model, spec.lora)
    reader = _reader(checkpoint, role)
    # Weights that text does not reach are not trained, and not in the checkpoint.
    reader.check({name: weight.numel() for name, weight in model.named_parameters() if f"weight/{name}" in reader})


def _reader(checkpoint: Checkpoint, role: str) -> "ShardReader":
    from rlhf_train.engine.shards import ShardReader

    return ShardReader(sorted(checkpoint.path.glob(f"{role}-*-of-*.safetensors")))


def _write_model(spec: ModelSpec, checkpoint: Checkpoint, role: str, out: Path) -> None:
    from rlhf_models.reward import moments_fields
    from rlhf_train.engine.shards import load_weights
    from rlhf_train.offline.epochs import score_moments
    from rlhf_train.run.models import load_model, write_model

    model = load_model(role, spec)
    load_weights(model, _reader(checkpoint, role))
    run = checkpoint.state().get("run", {})
    fields = dict(run.get("saved_fields", {}))
    if role == "reward" and run.get("evaluated"):
        fields |= moments_fields(*score_moments(run["evaluated"]))
    elif role == "reward":
        fields |= {"mean": None, "std": None}  # those of the model that the run began with
        TERMINAL.say("notice: the run evaluated nothing, so no mean and deviation of scores are stored with the model")
    write_model(model, model.state_dict(), spec, out, fields)
