"""Turns paths as the user typed them into paths that can be opened from any working folder."""

import itertools
import os
import shlex
import tempfile
from datetime import datetime
from pathlib import Path
from urllib.parse import urlsplit

from rlhf_cli.builtin import BUILTIN, HELD_OUT_FILE, MODEL_DIR, TRAIN_FILE
from rlhf_data.errors import ConfigError
from rlhf_data.options.checks import check_stays
from rlhf_data.options.declare import AnyConfig, Config, Option, Section, options
from rlhf_data.own_code import is_trusted, trusted
from rlhf_data.pretrained import is_template_file
from rlhf_data.rows.sources import SUFFIXES, split_sources
from rlhf_rollout.agents.user_agent import is_program
from rlhf_rollout.engines.adapter_files import ADAPTER_FOLDER, parse_lora_modules
from rlhf_rollout.rewards.sources import JUDGE_KINDS
from rlhf_rollout.rewards.user_function import BUILTIN as BUILTIN_REWARDS
from rlhf_train.algorithms.own_code import OwnCode

CONFIG_FILE = "config.toml"  # the configuration of a run, in its folder
LOG_FILE = "log.txt"  # output of libraries, in the folder of a run
INPUTS_FOLDER = "inputs"  # what Python gave to a run as objects, in its folder
_MODEL_FILES = ("config.json", "adapter_config.json")
EMA = "ema"  # in --teacher_model, the moving average of the policy
# Option that names a file of the user's own code, to the name of its function.
OWN_CODE = {
    "policy_loss_path": "policy_loss",
    "advantage_path": "advantages",
    "group_filter_path": "keep_group",
    "metrics_path": "step_metrics",
}


def user_folder() -> Path:
    """Return the user's working folder. Under `bazel run` it is not the working folder of the process."""
    return Path(os.environ.get("BUILD_WORKING_DIRECTORY") or Path.cwd())


def user_path(text: str | Path) -> Path:
    """Return a path, resolved from the user's folder if it is relative."""
    return user_folder() / Path(text).expanduser()


def parts(texts: str) -> list[str]:
    """Return the entries of a comma-separated list."""
    return [trusted(part.strip(), is_trusted(texts)) for part in texts.split(",") if part.strip()]


def data_path(text: str, *, held_out: bool = False) -> Path:
    """Return the path of a data file; `builtin` stands for the file that ships with the package."""
    if text == BUILTIN:
        return HELD_OUT_FILE if held_out else TRAIN_FILE
    return user_path(text)


def source_names(texts: str, *, held_out: bool = False) -> str:
    """Return a comma-separated list of data sources with paths resolved. Hub names stay the same."""
    names = split_sources(texts, user_folder())
    files = {name: str(data_path(name, held_out=held_out)) for name in names if name == BUILTIN or is_data_path(name)}
    return ",".join(files.get(name, name) for name in names)


def is_data_path(text: str) -> bool:
    """Return whether a data source is a file or folder. Otherwise it is a hub name."""
    path = text.rpartition("@")[0] or text
    return path.startswith((".", "/", "~")) or path.endswith(SUFFIXES) or user_path(path).exists()


def model_path(text: str) -> str:
    """Return the path of a model folder, or a hub name unchanged, as trusted as `text`.

    `builtin` stands for the model that ships, and the folder of a run for the model that it saved.
    """
    if text == BUILTIN:
        return str(MODEL_DIR)
    path = user_path(text)
    found = str(model_of_run(path)) if text.startswith((".", "/", "~")) or path.is_dir() else text
    return trusted(found, is_trusted(text))


def model_of_run(folder: Path) -> Path:
    """Return the model or adapter that a run saved, if `folder` is that of a run; else `folder`."""
    model = folder / "model"
    if not (folder / CONFIG_FILE).is_file() or any((folder / name).is_file() for name in _MODEL_FILES):
        return folder
    if not any((model / name).is_file() for name in _MODEL_FILES):
        return folder
    return model


def adapter_paths(text: str) -> str:
    """Return a list NAME=FOLDER of adapters with full paths. The folder of a run stands for the adapter that it saved.

    Raises ConfigError for an entry that is none.
    """
    found = []
    for module in parse_lora_modules(text):
        folder = model_of_run(user_path(module.path))
        own = folder / ADAPTER_FOLDER
        found.append(f"{module.name}={own if own.is_dir() else folder}")
    return ",".join(found)


def reward_path(text: str) -> str:
    """Return the name of a reward with the path of its file resolved. Modules, URLs and built-in ones stay the same."""
    kind, _, rubric = text.partition(":")
    if kind in JUDGE_KINDS:
        return f"{kind}:{user_path(rubric)}"
    if kind in BUILTIN_REWARDS:
        return text
    file, suffix, function = text.partition(".py")
    if "://" in text or not suffix or (function and not function.startswith(":")):
        return text
    return f"{user_path(file + suffix)}{function}"


def agent_path(text: str) -> str:
    """Return the name of an agent with the path of its file resolved, in a command line those of files behind the
    program. Modules stay the same."""
    if not is_program(text):
        return reward_path(text)
    program, *words = shlex.split(text)
    return shlex.join([program, *(str(user_path(word)) if user_path(word).is_file() else word for word in words)])


def read_own_code(section: Section) -> dict[str, OwnCode]:
    """Return the user's functions that a section names, by option. Raises ConfigError if a file cannot be read.

    Sections read their files once, so that what is checked is what a run gets.
    """
    paths = {name: getattr(section, name, None) for name in OWN_CODE}
    return {name: OwnCode.read(OWN_CODE[name], user_path(path)) for name, path in paths.items() if path is not None}


def teacher_models(text: str | None) -> dict[str, str]:
    """Return the models of --teacher_model by data source, "" for all sources that are not named.

    Raises ConfigError for a source with two models, or for an entry that lacks one of both.
    """
    found: dict[str, str] = {}
    hint = "write SOURCE=MODEL for each source, separated by commas, and at most one MODEL alone"
    for entry in [text] if text is not None and os.path.exists(user_path(text)) else parts(text or ""):
        source, sign, model = entry.partition("=")
        if not sign or os.path.exists(user_path(entry)):
            source, model = "", entry
        elif not (source and model):
            raise ConfigError(f"--teacher_model {entry} lacks a data source or a model", hint=hint)
        if source in found:
            what = f"the data source {source}" if source else "all sources without one"
            raise ConfigError(f"--teacher_model has two models for {what}: {found[source]} and {model}", hint=hint)
        found[source] = trusted(model, is_trusted(text))
    if text is not None and not found:
        raise ConfigError(f"--teacher_model {text} names no model", hint=hint)
    return found


def words_of(option: Option) -> set[str]:
    """Return the words that an option takes beside the names of models, other than `builtin`."""
    return {EMA} if _names_teachers(option) else set()


def entries_of(option: Option, text: str) -> list[tuple[str, str]]:
    """Return the entries of an option's value, several for a list, and what stands before each: SOURCE= or nothing."""
    if _names_teachers(option):
        return [(f"{source}=" if source else "", model) for source, model in teacher_models(text).items()]
    return [("", entry) for entry in (parts(text) if option.name in _LISTS else [text])]


def _names_teachers(option: Option) -> bool:
    """Return whether it is the option of `ppo`, and not that of `kd`, which names a single model."""
    return (option.section, option.name) == ("algorithm", "teacher_model")


# By option, how its value is resolved. Names of models (`Option.names_model`) are resolved by `model_path`.
_RESOLVE = {
    **dict.fromkeys(("prompt_data", "dataset", "eval_dataset"), source_names),
    **dict.fromkeys(("eval_data", "data_cache", "output_path", "ckpt_path", "replay", "adam_offload_path"), user_path),
    "lora_modules": adapter_paths,
    "remote_rm_url": reward_path,
    "agent_func_path": agent_path,
    **dict.fromkeys((*OWN_CODE, "use_tensorboard"), user_path),
    "use_mlflow": lambda text: text if urlsplit(text).scheme else user_path(text),
    "tokenizer_chat_template": lambda text: user_path(text) if is_template_file(text) else text,
}
# Options whose values are comma-separated lists.
_LISTS = ("reward_pretrain", "prompt_data", "dataset", "eval_dataset", "eval_data", "remote_rm_url")


def with_full_paths(config: AnyConfig, *, keep_builtin: bool = True) -> AnyConfig:
    """Return a configuration with absolute paths, which names the same files from every working folder.

    Args:
        config: the configuration of a command.
        keep_builtin: keep the word `builtin`; otherwise replace it by the files that it stands for.
    """
    full: dict[str, dict[str, str]] = {}
    for option in options(type(config)):
        name = option.name
        resolve = model_path if option.names_model else _RESOLVE.get(name)
        kept = words_of(option) | ({BUILTIN} if keep_builtin else set())
        text = getattr(getattr(config, option.section), name)
        if resolve is None or text is None:
            continue
        entries = entries_of(option, text)
        found = (before + (entry if entry in kept else str(resolve(entry))) for before, entry in entries)
        full.setdefault(option.section, {})[name] = trusted(",".join(found), is_trusted(text))
    return config.model_copy(
        update={section: getattr(config, section).model_copy(update=values) for section, values in full.items()}
    )


def run_folder_notices(config: Config) -> list[str]:
    """Return a notice for each model or adapter that the options name by the folder of a run."""
    notices: dict[str, None] = {}  # in order, each once
    for option in options(type(config)):
        text = getattr(getattr(config, option.section), option.name) if option.names_model else None
        for _, entry in entries_of(option, text) if text else ():
            folder = user_path(entry)
            if entry not in words_of(option) and (model := model_of_run(folder)) != folder:
                notices[f"--{option.name} {folder} is the folder of a run; its model is {model}"] = None
    return list(notices)


def output_folder(text: str | None, command: str) -> Path:
    """Return the folder that a run writes to: `text`, or a new one in ./rlhf-output."""
    if text is not None:
        return user_path(text)
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    names = itertools.chain([f"{command}-{stamp}"], (f"{command}-{stamp}-{number}" for number in itertools.count(2)))
    folders = (user_folder() / "rlhf-output" / name for name in names)
    return next(folder for folder in folders if not folder.exists())  # another run may have begun in the same second


def check_output_folder(
    folder: Path, flag: str = "--save_path", *, holds_run: bool = False, hint: str = "name a new one"
) -> None:
    """Raise ConfigError unless `folder` is new or empty (a log file and inputs may be in it) and can be written to.

    With `holds_run`, it may also be the folder of a run. `hint` says what to do about a used one.
    """
    try:
        unused = {LOG_FILE, INPUTS_FOLDER}
        is_used = folder.exists() and (not folder.is_dir() or {path.name for path in folder.iterdir()} - unused)
    except OSError as error:
        raise _unwritable(folder, flag, error) from None
    if is_used and not (holds_run and (folder / CONFIG_FILE).is_file()):
        raise ConfigError(f"{flag} {folder} is not an empty folder", hint=hint)
    check_writable(folder, flag)


def check_writable(folder: Path, flag: str) -> None:
    """Raise ConfigError unless files can be written to `folder`, which need not exist, and stay there."""
    check_stays(folder, flag)
    try:
        there = next(path for path in (folder, *folder.parents) if path.exists())
        # Try to write. Permission bits do not tell: root ignores them, and file systems such as /proc refuse anyway.
        with tempfile.TemporaryDirectory(prefix=".rlhf-", dir=there):
            pass
    except OSError as error:
        raise _unwritable(folder, flag, error) from None


def _unwritable(folder: Path, flag: str, error: OSError) -> ConfigError:
    message = f"{flag} {folder} cannot be written: {error.strerror}"
    return ConfigError(message, hint="name a folder that you may write to")
