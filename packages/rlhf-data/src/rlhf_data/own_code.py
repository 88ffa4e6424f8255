"""Python code in the folders of models, which runs only if the user trusts it.

A folder names its code in `auto_map` of config.json and tokenizer_config.json: classes of transformers' Auto classes.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlhf_data.stored_weights import read_json

_LOCK = ".rlhf.lock"  # in transformers' cache of modules
_CONFIGS = ("config.json", "tokenizer_config.json")


class TrustedModel(str):
    """The folder or hub name of a model whose own code may run.

    It goes wherever a name goes, also to other processes, as a text with its own type (like `markupsafe.Markup`). What
    a method of `str` makes of it is a plain name again, whose code does not run; `trusted` makes it from a plain one.
    """

    __slots__ = ()


def is_trusted(name: Any) -> bool:
    """Return whether the code of the model of this name may run."""
    return isinstance(name, TrustedModel)


def trusted(name: str, is_trusted: bool = True) -> str:
    """Return a name as a `TrustedModel` if `is_trusted`, else as it is."""
    return TrustedModel(name) if is_trusted else name


def code_files(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of the files that `auto_map` in the content of a config names, except those of other models."""
    auto_map = config.get("auto_map") or {}
    # Tokenizers have a pair of classes, a slow and a fast one, of which one may be None; an old form is the pair alone.
    for entry in auto_map.values() if isinstance(auto_map, Mapping) else [auto_map]:
        for reference in entry if isinstance(entry, list | tuple) else [entry]:
            if reference and "--" not in reference:
                yield reference.partition(".")[0] + ".py"


def entrust(config: Any, name: str) -> None:
    """Have a transformers config say by its `name_or_path` whether the code that it names may run; see `is_trusted`."""
    config._name_or_path = name  # the setter of `name_or_path` would make a plain name of it


def admit_code(name: str, *, is_local: bool) -> bool:
    """Return whether the code of a model may run, and copy it to where processes import it from if so.

    Each process that loads the model would copy it, and could read a file that another one is writing: the copies are
    made here, one process at a time, and then only compared.

    Args:
        name, is_local: what `pretrained.located` returned.
    """
    if not is_trusted(name):
        return False
    from huggingface_hub.utils import WeakFileLock
    from transformers.dynamic_module_utils import HF_MODULES_CACHE, get_cached_module_file
    from transformers.utils import cached_file

    cache = Path(HF_MODULES_CACHE)
    cache.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(cache / _LOCK):
        for config in _CONFIGS:
            options = {"local_files_only": is_local, "_raise_exceptions_for_missing_entries": False}
            path = cached_file(name, config, **options)
            for file in dict.fromkeys(code_files(read_json(Path(path)) if path else {})):
                get_cached_module_file(name, file, local_files_only=is_local)
    return True


def copy_code(config: Any, folder: Path) -> None:
    """Write the code that a transformers config names, and what it imports from beside it, to a folder.

    Files that are in the folder stay. The code is read from where the config was loaded.
    """
    from transformers.dynamic_module_utils import get_relative_import_files
    from transformers.utils import cached_file

    for file in dict.fromkeys(code_files({"auto_map": getattr(config, "auto_map", None)})):
        if (folder / file).exists():
            continue
        source = Path(cached_file(config.name_or_path, file))
        for path in (source, *map(Path, get_relative_import_files(source))):
            (folder / path.name).write_bytes(path.read_bytes())
