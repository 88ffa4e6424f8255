"""What a user typed as a path, as a path that can be opened from wherever the command runs."""

import os
import tempfile
from datetime import datetime
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel

from rlhf_cli.builtin import BUILTIN, HELD_OUT_FILE, MODEL_DIR, TRAIN_FILE
from rlhf_data.errors import ConfigError
from rlhf_data.sources import SUFFIXES

LOG_FILE = "log.txt"  # in the folder of a run
Config = TypeVar("Config", bound=BaseModel)


def user_folder() -> Path:
    """Return the folder the user is in; under `bazel run` that is not the process's."""
    return Path(os.environ.get("BUILD_WORKING_DIRECTORY") or Path.cwd())


def user_path(text: str | Path) -> Path:
    """Return a path relative to the user's folder."""
    return user_folder() / Path(text).expanduser()


def parts(texts: str) -> list[str]:
    """Return the entries of a list with commas."""
    return [part.strip() for part in texts.split(",") if part.strip()]


def data_paths(texts: str | None, *, held_out: bool = False) -> list[Path]:
    """Return the data files of a list with commas."""
    return [data_path(part, held_out=held_out) for part in parts(texts or "")]


def data_path(text: str, *, held_out: bool = False) -> Path:
    """Return a data file; `builtin` is the one that ships."""
    if text == BUILTIN:
        return HELD_OUT_FILE if held_out else TRAIN_FILE
    return user_path(text)


def source_names(texts: str, *, held_out: bool = False) -> str:
    """Return a list with commas of data sources with the paths of files and folders resolved; hub names stay."""
    return ",".join(_source_name(part, held_out) for part in parts(texts))


def _source_name(text: str, held_out: bool) -> str:
    return str(data_path(text, held_out=held_out)) if text == BUILTIN or is_data_path(text) else text


def is_data_path(text: str) -> bool:
    """Return whether a data source is a file or a folder; else it is a name on the hub."""
    path = text.rpartition("@")[0] or text
    return path.startswith((".", "/", "~")) or path.endswith(SUFFIXES) or user_path(path).exists()


def model_path(text: str) -> str:
    """Return a model folder, or the text itself when it is a hub name; `builtin` is the model that ships."""
    if text == BUILTIN:
        return str(MODEL_DIR)
    path = user_path(text)
    return str(path) if text.startswith((".", "/", "~")) or path.is_dir() else text


def is_template_file(text: str) -> bool:
    """Return whether a chat template is named by its file: Jinja has braces."""
    return "{" not in text


def reward_path(text: str) -> str:
    """Return a reward with the path of its file resolved; a module and a URL stay as they are."""
    file, suffix, function = text.partition(".py")
    if "://" in text or not suffix or (function and not function.startswith(":")):
        return text
    return f"{user_path(file + suffix)}{function}"


_RESOLVE = {
    **dict.fromkeys(
        ("pretrain", "critic_pretrain", "reward_pretrain", "ref_pretrain", "teacher_model", "tokenizer"), model_path
    ),
    **dict.fromkeys(("prompt_data", "dataset", "eval_dataset"), source_names),
    **dict.fromkeys(("eval_data", "data_cache", "output_path"), user_path),
    "remote_rm_url": reward_path,
    "use_tensorboard": user_path,
    "use_mlflow": lambda text: text if urlsplit(text).scheme else user_path(text),
    "tokenizer_chat_template": lambda text: user_path(text) if is_template_file(text) else text,
}
_LISTS = ("reward_pretrain", "prompt_data", "dataset", "eval_dataset", "eval_data", "remote_rm_url")


def with_full_paths(config: Config, *, keep_builtin: bool = True) -> Config:
    """Return a configuration that reads the same files and folders from wherever it is used; `builtin` stays a word, or
    becomes the files that it stands for."""
    sections = {}
    for section in type(config).model_fields:
        options, full = getattr(config, section), {}
        for name in _RESOLVE.keys() & type(options).model_fields:
            if (text := getattr(options, name)) is not None:
                entries = parts(text) if name in _LISTS else [text]
                full[name] = ",".join(
                    entry if entry == BUILTIN and keep_builtin else str(_RESOLVE[name](entry)) for entry in entries
                )
        sections[section] = options.model_copy(update=full)
    return config.model_copy(update=sections)


def output_folder(text: str | None, command: str) -> Path:
    """Return where a run writes: the folder named, or a new one under ./rlhf-output."""
    if text is not None:
        return user_path(text)
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    return user_folder() / "rlhf-output" / f"{command}-{stamp}"


def check_output_folder(folder: Path, flag: str = "--save_path") -> None:
    """Raise ConfigError unless `folder` is new or empty, but for a log, and can be written; nothing is left behind."""
    try:
        if folder.exists() and (not folder.is_dir() or {path.name for path in folder.iterdir()} - {LOG_FILE}):
            raise ConfigError(f"{flag} {folder} is not an empty folder", hint="name a new one")
        there = next(path for path in (folder, *folder.parents) if path.exists())
        with tempfile.TemporaryDirectory(prefix=".rlhf-", dir=there):  # permissions alone do not tell: root, /proc
            pass
    except OSError as error:
        message = f"{flag} {folder} cannot be written: {error.strerror}"
        raise ConfigError(message, hint="name a folder on a disk that you may write to") from None
