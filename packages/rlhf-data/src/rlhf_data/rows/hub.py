"""Data sets read by the `datasets` library: Parquet, Arrow, saved folders, builder scripts, the Hugging Face hub."""

import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rlhf_data.errors import ConfigError, DataError, RlhfError, installs, unknown
from rlhf_data.hub_names import hub_problem
from rlhf_data.pretrained import hub_answers

_KINDS = {".json", ".jsonl", ".csv", ".parquet", ".arrow"}


def open_dataset(
    name: str, subset: str | None, *, split: str, streaming: bool
) -> tuple[Iterable[dict[str, Any]], str | None]:
    """Return the rows of a data set as dictionaries, and its fingerprint (None if streaming).

    Raises:
        ConfigError: the library is not installed, a saved folder has no such split, or a script does not define exactly
            one builder class.
        DataError: the library cannot open the data set, or would leave out files of a folder.
    """
    try:
        import datasets
    except ImportError as error:
        message = f"{name} needs the `datasets` library, which is not installed ({error})"
        raise ConfigError(message, hint=f"{installs('rlhf-data[datasets]')}, or convert it to .jsonl") from error
    path = Path(name)
    try:
        if path.suffix.lower() == ".py":
            table = _run_script(path, subset, split, streaming)
        elif not subset and any((path / file).is_file() for file in ("state.json", "dataset_dict.json")):
            table = _saved(name, split, streaming)
        elif path.is_file():
            kind = path.suffix.lower()[1:]  # parquet or arrow
            table = datasets.load_dataset(kind, data_files=name, split="train", streaming=streaming)
        else:
            _check_folder(path)
            # Set the library's own switch if the hub does not answer: it would retry for half a minute otherwise.
            datasets.config.HF_HUB_OFFLINE |= not path.exists() and not hub_answers()
            table = datasets.load_dataset(name, subset, split=split, streaming=streaming)
    except RlhfError:
        raise
    except Exception as error:  # the library passes on errors of many kinds from its readers
        problem = None if path.exists() else hub_problem(error, name, of_data=True)
        if problem is not None:
            raise DataError(f"data set {name} cannot be opened: {problem.said}", hint=problem.hint) from error
        hint = "names that are not files are looked up on the hub, which needs a network"
        if path.exists():
            hint = "name .jsonl, .json, .csv, .parquet or .arrow files, or a folder that `save_to_disk` wrote"
        raise DataError(f"data set {name} cannot be opened: {error}", hint=hint) from error
    return table, None if streaming else table._fingerprint


def _check_folder(path: Path) -> None:
    """Raise DataError for files of several kinds in a folder: the library reads those of the most frequent kind."""
    if (path / "README.md").is_file():  # it may say which files are read
        return
    files = [file for file in path.rglob("*") if not any(part[0] in "._" for part in file.relative_to(path).parts)]
    suffixes = {Path(file.name.lower().removesuffix(".gz")).suffix for file in files if file.is_file()}
    kinds = sorted({suffix.removesuffix("l") for suffix in suffixes & _KINDS})
    if len(kinds) > 1:
        hint = "name the files, separated by commas, or a folder with one kind"
        raise DataError(f"data set {path} holds files of several kinds, {', '.join(kinds)}", hint=hint)


def _saved(name: str, split: str, streaming: bool) -> Any:
    import datasets

    table = datasets.load_from_disk(name)
    if isinstance(table, datasets.DatasetDict):
        if split not in table:
            raise ConfigError(f"data set {name}: {unknown('split', split, table)}")
        table = table[split]
    return table.to_iterable_dataset() if streaming else table


def _run_script(path: Path, subset: str | None, split: str, streaming: bool) -> Any:
    import datasets

    spec = importlib.util.spec_from_file_location(f"rlhf_data_script_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # the library looks up the builder's source code there
    spec.loader.exec_module(module)
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, datasets.DatasetBuilder) and value.__module__ == spec.name
    ]
    if len(found) != 1:
        raise ConfigError(f"data script {path} must define one builder class of `datasets`, found {len(found)}")
    builder = found[0](config_name=subset)
    if streaming:
        return builder.as_streaming_dataset(split=split)
    builder.download_and_prepare()
    return builder.as_dataset(split=split)
