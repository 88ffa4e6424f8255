"""Checks of a run that continues: whether it has a checkpoint, and which options differ from those it had."""

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from rlhf_cli.config.checkpoint import CheckpointSection
from rlhf_cli.config.paths import (
    CONFIG_FILE,
    check_output_folder,
    check_writable,
    output_folder,
    user_folder,
    user_path,
    with_full_paths,
)
from rlhf_data.errors import ConfigError
from rlhf_data.options.command_line import to_toml
from rlhf_train.algorithms.own_code import OwnCodeError

_MANIFEST = "step-*/manifest.json"  # in the folder of checkpoints

# Sections and options without a trace in the numbers of a step.
_NO_TRACE = {
    *("checkpoint", "output", "evaluation"),  # sections
    *("reward_num_workers", "reward_batch_size", "reward_timeout_s"),
    *("agent_num_workers", "agent_timeout_s"),
    *("eval_dataset", "eval_split", "data_num_workers", "data_cache"),
}
# Options that decide what the saved state belongs to.
_FIXED = (
    *("pretrain", "ref_pretrain", "critic_pretrain", "teacher_model", "lora_rank", "critic_lora_rank"),
    *("target_modules", "optim", "advantage_estimator", "prompt_data", "dataset", "seed", "difficulty_pool"),
    *("policy_loss_path", "advantage_path", "group_filter_path", "load_in_4bit", "adaptive_mix"),
)
# Options that decide how many steps a run has, or how many updates on fixed examples.
_ONLINE_LENGTH = ("train_steps", "num_episodes")
_OFFLINE_LENGTH = ("max_epochs",)


def run_folder(section: CheckpointSection, save_path: str | None, command: str) -> Path:
    """Return the folder of a run: that of --resume or --save_path, else a new one in ./rlhf-output.

    --load_checkpoint alone names no folder. As in OpenRLHF, whose checkpoints have a default folder, the same command
    line then continues the run that it began: the newest of `command` in ./rlhf-output that has a checkpoint.
    """
    named = section.resume or save_path
    if named is None and section.load_checkpoint and section.ckpt_path is None:
        home = user_folder() / "rlhf-output"
        manifests = home.glob(f"{command}-*/checkpoints/{_MANIFEST}")
        newest = max(manifests, key=lambda path: path.stat().st_mtime, default=None)
        if newest is not None:
            return newest.parents[2]
    return output_folder(named, command)


def check_run_folders(section: CheckpointSection, folder: Path) -> None:
    """Raise ConfigError if a run cannot use `folder` for its results, or the folder of --ckpt_path for its checkpoints.

    The checkpoints of another run would count as its own: as the newest to continue from, or as those to remove.
    """
    is_over = _has_results(folder) and not has_checkpoint(section, folder)  # --resume would be refused
    can_continue = (folder / CONFIG_FILE).is_file() and not is_over
    hint = f"name a new one, or add --resume {folder}" if can_continue else "name a new one"
    check_output_folder(folder, holds_run=section.continues, hint=hint)
    if section.continues:
        _check_kind(_home(section, folder))
    if section.ckpt_path is None:
        return
    home = user_path(section.ckpt_path)
    if not section.continues and any(home.glob(_MANIFEST)):
        hint = "name another folder; or add --load_checkpoint to continue from the newest of them"
        raise ConfigError(f"--ckpt_path {home} holds the checkpoints of another run", hint=hint)
    check_writable(home, "--ckpt_path")


def has_checkpoint(section: CheckpointSection, folder: Path) -> bool:
    """Return whether the run in `folder` has a checkpoint to continue from."""
    return not section.disable_ds_ckpt and any(_home(section, folder).glob(_MANIFEST))


def _check_kind(home: Path) -> None:
    """Raise ConfigError if a folder holds checkpoints of OpenRLHF, which are DeepSpeed's, and none of this program."""
    if any(home.glob(_MANIFEST)):
        return
    theirs = sorted(path for pattern in ("global_step*", "*/global_step*") for path in home.glob(pattern))
    if not theirs:
        return
    models = [str(path) for path in theirs if (path / "config.json").is_file()]
    model = models[-1] if models else "MODEL, a Hugging Face folder that it saved"
    message = f"{home} holds a checkpoint of OpenRLHF, {theirs[-1].name}, whose state cannot be read here"
    raise ConfigError(message, hint=f"name another folder, and start from its weights: --pretrain {model}")


def _home(section: CheckpointSection, folder: Path) -> Path:
    return user_path(section.ckpt_path) if section.ckpt_path else folder / "checkpoints"


def steps_of_ended_run(section: CheckpointSection, folder: Path) -> int | None:
    """Return the number of steps, or of updates on fixed examples, of the run that continues in `folder`, if it has
    ended: it has saved its models after the last step, and a checkpoint of that step. None for any other run."""
    from rlhf_models.checkpoint.files import check_weights
    from rlhf_train.run.recorder import ARTIFACTS, ended_after

    done = ended_after(folder / ARTIFACTS["metrics"])
    model = folder / ARTIFACTS["final model"]
    if not section.continues or done is None or not model.is_dir():
        return None
    try:
        check_weights(model)
    except ConfigError:
        return None
    return done if (_home(section, folder) / f"step-{done}/manifest.json").is_file() else None


def nothing_is_left(folder: Path, done: str, options: str) -> str:
    """Return the message for a run that has ended, and what makes it longer.

    Args:
        folder: of the run.
        done: what it has done, such as "40 step(s)".
        options: those that decide about it.
    """
    return f"the run in {folder} has done its {done}: nothing is left to do\n\nhint: a larger {options} continues it"


def check_can_continue(section: CheckpointSection, folder: Path) -> None:
    """Raise ConfigError if the run in `folder` has ended and left no checkpoint: it would start from the beginning and
    replace its model, metrics and rollouts."""
    if section.continues and _has_results(folder) and not has_checkpoint(section, folder):
        message = f"the run in {folder} has ended and has no checkpoint, so nothing of it can be continued"
        hint = f"start a new run with its options: --config {folder / CONFIG_FILE} and another --save_path"
        raise ConfigError(message, hint=hint)


def _has_results(folder: Path) -> bool:
    """Return whether the run in `folder` has saved a model and done a step, or an update on fixed examples."""
    metrics = folder / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines() if metrics.is_file() else []
    has_steps = any(re.match(rb'{"step": [1-9]', line) for line in lines)
    return has_steps and (folder / "model").is_dir()


@contextmanager
def saying_how_to_resume(
    command: str, section: CheckpointSection, folder: Path, notice: Callable[[str], None]
) -> Iterator[None]:
    """If the run in `folder` ends early and has a checkpoint, say how it continues; not where that was just refused."""
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        was_refused = section.continues and isinstance(error, ConfigError) and not isinstance(error, OwnCodeError)
        if has_checkpoint(section, folder) and not was_refused:
            text = f"`rlhf {command} --resume {folder}` continues this run from its newest checkpoint"
            if isinstance(error, OwnCodeError):  # whose run refuses another content of the file
                text += f" with the same file; to go on with a mended one, start a new run with --pretrain {folder}"
            notice(text)
        raise


def to_store(config: Any) -> Any:
    """Return the configuration as the folder of a run keeps it. `--resume FOLDER` reads it there, so it must not send
    the run to another folder."""
    checkpoint = config.checkpoint.model_copy(update={"resume": None})
    return with_full_paths(config.model_copy(update={"checkpoint": checkpoint}))


def keep_clock(tokenizer: Any, section: CheckpointSection, folder: Path) -> datetime | None:
    """Make the tokenizer's chat template write the time that it wrote at the start of the run that continues in
    `folder`, or in a new run the present. Return that time; None for a template that writes none."""
    from rlhf_data.chat.template import template_clock
    from rlhf_train.run.checkpoint import recorded_clock

    return template_clock(tokenizer, recorded_clock(_home(section, folder)) if section.continues else None)


def changed_options(config: Any, folder: Path) -> list[str]:
    """Compare a configuration with that of the run in `folder`; return a notice for each option that differs.

    Args:
        config: the configuration, as `to_store` returns it. It may have options that the version of this package
            which began the run did not have.
        folder: of the run that continues; it may be new.

    Raises:
        ConfigError: an option differs that decides what the saved state belongs to.
    """
    path = folder / CONFIG_FILE
    if not path.is_file():
        return []
    before = _options(path.read_text(encoding="utf-8"))
    after = _options(to_toml(config))
    defaults = _options(to_toml(type(config)()))
    lengths = _ONLINE_LENGTH if "training.num_episodes" in after else _OFFLINE_LENGTH
    trains_draft = before.get("training.draft_learning_rate") is not None
    notices = []
    for name in sorted(before.keys() | after.keys()):
        old = before.get(name)
        new = after.get(name)
        if old == new or (name not in before and new == defaults.get(name)):
            continue
        option = name.partition(".")[2]
        change = f"--{option} was {_shown(old)} and is {_shown(new)}"
        begins_or_ends = option == "draft_learning_rate" and None in (old, new)
        if option in _FIXED or begins_or_ends or (option == "vllm_draft_model" and trains_draft):
            message = f"{change}, and the checkpoints of {folder} belong to the value it had"
            raise ConfigError(message, hint=f"drop --{option}, or start a new run with another --save_path")
        if option not in lengths:
            notices.append(f"{change}: from here on, the run differs from one without an interruption")
        elif _has_schedule(after):
            notices.append(f"{change}: from here on, learning rates follow the schedule of a run of the new length")
    return notices


def _has_schedule(options: Mapping[str, object]) -> bool:
    """Return whether learning rates depend on the length of the run."""
    return options["training.lr_scheduler"] != "constant" or options["training.lr_warmup_ratio"] != 0


def _options(text: str) -> dict[str, object]:
    """Return the options of a configuration that decide what a run learns, as section.option to value."""
    return {
        f"{section}.{name}": value
        for section, table in tomllib.loads(text).items()
        for name, value in table.items()
        if not {section, name} & _NO_TRACE
    }


def _shown(value: object) -> str:
    return "not set" if value is None else str(value)
