"""Look-up of models by folder or hub name, their tokenizers, and errors that say what to do."""

import functools
import json
import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from rlhf_data.errors import ConfigError, RlhfError, installs, missing_file
from rlhf_data.hub_names import hub_name, hub_problem, snapshot
from rlhf_data.own_code import admit_code, is_trusted, trusted
from rlhf_data.stored_weights import read_json

_HUB_TIMEOUT_S = 5.0
_INSTALLS = re.compile(r"`(pip install [\w.-]+)`")  # in errors of transformers
_CUSTOM_CODE = "trust_remote_code=True"  # in transformers' error about a class that it may not load
_SET_BY_RENDERING = ("messages", "tools", "add_generation_prompt", "bos_token", "eos_token")

logger = logging.getLogger(__name__)
_pinned = functools.cache(snapshot)  # a branch that moves while a process runs changes nothing for it


def load_tokenizer(path: str | Path) -> Any:
    """Return the Hugging Face tokenizer of a folder or hub name. Without a padding token, it pads with its end token.

    Raises:
        ConfigError: transformers is not installed, or the tokenizer is missing, gives no tokens or has no end token.
    """
    name, is_local = located(path, with_weights=False)
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ConfigError(f"tokenizers need transformers: {error}", hint=installs("rlhf-data[hf]")) from None
    hint = "put its files there: tokenizer.json, or what `tokenizer.save_pretrained` writes"
    useless = ConfigError(f"{path} has no tokenizer that makes tokens of text", hint=hint)
    # For an empty folder, the message of transformers says only that it could not load something.
    if Path(name).is_dir() and not any(Path(name).iterdir()):
        raise useless
    with clear_errors("tokenizer", path):
        may_run = admit_code(name, is_local=is_local)
        tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=is_local, trust_remote_code=may_run)
    if not may_run:
        tokenizer.init_kwargs.pop("auto_map", None)  # the tokenizer is one of transformers' own, as which it is saved
    if not tokenizer.encode("text", add_special_tokens=False):  # transformers loads this for a folder without tokenizer
        raise useless
    check_eos(tokenizer, path)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def check_same_tokenizer(path: str | Path, tokenizer: Any, hint: str | None = None) -> None:
    """Check that another model gives the policy's token ids the same meaning as the policy does.

    The model may have further tokens of its own. `hint` says what to do about one of another family; None is about
    reward models, critics and teachers.

    Raises:
        ConfigError: a token of the policy's `tokenizer` has another id or none in the model's vocabulary, or the model
            has no tokenizer.
    """
    own = load_tokenizer(path).get_vocab()
    vocabulary = tokenizer.get_vocab()
    differing = [(token, index) for token, index in vocabulary.items() if own.get(token) != index]
    if differing:
        token, index = min(differing, key=lambda pair: pair[1])
        message = f"the vocabulary of {path} differs from the policy's in {len(differing)} of {len(vocabulary)} tokens:"
        message += f" {token!r} has id {index} in the policy's and {own.get(token)} in this one"
        served = "``RemoteReward.urls=http://...``, which gets text and not token ids"
        raise ConfigError(
            message, hint=hint or f"use a model of the same family; a reward model may also be served behind {served}"
        )


def ids_without_token(tokenizer: Any, num_ids: int) -> tuple[range, ...]:
    """Return the ids below `num_ids` that have no token, as ranges in ascending order.

    A model's vocabulary has such ids where its embedding has more rows than the tokenizer has tokens: at the end, to
    make the number of rows a multiple of a power of two, or in gaps between added tokens. They decode to nothing.

    Args:
        tokenizer: a Hugging Face tokenizer.
        num_ids: the size of the model's vocabulary, which is the number of rows of its embedding.
    """
    with_token = set(tokenizer.get_vocab().values())
    found: list[range] = []
    for index in range(num_ids):
        # The vocabulary has one id per token, and a few tokenizers have a token twice.
        if index in with_token or _has_token(tokenizer, index):
            continue
        if found and found[-1].stop == index:
            found[-1] = range(found[-1].start, index + 1)
        else:
            found.append(range(index, index + 1))
    return tuple(found)


def masked_ids_notice(ids: Sequence[range], num_ids: int) -> str | None:
    """Return what a user should know about masked ids of a vocabulary of `num_ids`; None if there are none."""
    if not ids:
        return None
    count = f"{sum(map(len, ids))} of the {num_ids} ids"
    return f"the tokenizer has no token for {count} of the model's vocabulary: they are masked (probability 0)"


def _has_token(tokenizer: Any, index: int) -> bool:
    try:
        return tokenizer.convert_ids_to_tokens(index) is not None
    except IndexError:  # raised by SentencePiece
        return False


def is_template_file(text: str) -> bool:
    """Return whether a chat template is given as a file and not as Jinja text, which always has braces."""
    return "{" not in text


def set_chat_template(
    tokenizer: Any,
    text: str | None = None,
    resolve: Callable[[str], Path] = Path,
    variables: str | None = None,
) -> None:
    """Give a tokenizer another chat template, and its variables their values.

    Args:
        tokenizer: is changed. With `variables` its template is no longer the one to save with a model.
        text: Jinja text, or the path of its file; None leaves the tokenizer's own.
        resolve: turns a path that a user typed into one that can be opened.
        variables: their values, as a JSON object; None leaves the template's defaults.

    Raises:
        ConfigError: there is no such file, or the template does not read a variable.
    """
    if text is not None:
        if is_template_file(text):
            path = resolve(text)
            if not path.is_file():
                raise ConfigError(f"``set_chat_template.text``: {missing_file('file', path)}")
            text = path.read_text(encoding="utf-8")
        tokenizer.chat_template = text
    if variables is not None:
        tokenizer.chat_template = _with_variables(tokenizer.chat_template, json.loads(variables))


def _with_variables(template: Any, variables: Mapping[str, Any]) -> Any:
    """Return a template, or several by name, that begins with assignments to variables."""
    named = template if isinstance(template, Mapping) else {"": template or ""}
    for name in variables:
        if name in _SET_BY_RENDERING:
            message = f"``chat_template_kwargs``: `{name}` is set by what is rendered"
            raise ConfigError(message, hint=f"leave out {name}")
        if not any(re.search(rf"\b{re.escape(name)}\b", text) for text in named.values()):
            hint = "write the name as the template does; templates without a variable need no value"
            raise ConfigError(f"``chat_template_kwargs``: the chat template does not read `{name}`", hint=hint)
    # A literal of Python is one of Jinja. The line break belongs to the block and is not rendered.
    head = "".join(f"{{% set {name} = {value!r} %}}\n" for name, value in variables.items())
    texts = {name: head + text for name, text in named.items()}
    return texts if isinstance(template, Mapping) else texts[""]


def check_eos(tokenizer: Any, name: str | Path) -> None:
    """Raise ConfigError unless a tokenizer has a token that ends a sequence."""
    if tokenizer.eos_token_id is None:
        hint = 'set "eos_token" in its tokenizer_config.json: generation ends at that token'
        raise ConfigError(f"the tokenizer {name} has no end-of-sequence token", hint=hint)


def located(path: str | Path, *, with_weights: bool = True) -> tuple[str, bool]:
    """Return the name by which transformers finds a model, and whether to look only on this machine.

    The name is as trusted as `path`. It is looked for only on this machine if it is a folder, or a hub name and the hub
    does not answer. A hub name with a revision, `owner/name@revision`, is downloaded, `with_weights` or without, and
    stands for that folder.

    Raises:
        ConfigError: the text is neither an existing folder nor of the form `owner/name`, for which the hub is not
            asked; or the hub does not give that revision.
    """
    folder = Path(path).expanduser()
    text = trusted(str(path), is_trusted(path))
    if folder.is_dir():
        return trusted(str(folder), is_trusted(path)), True
    name = hub_name(text) if isinstance(path, str) else None
    if name is None:
        hint = "give an existing folder, or a hub name as `owner/name` or `owner/name@revision`"
        raise ConfigError(f"there is no model folder {text}", hint=hint)
    if name.revision is None:
        return text, not hub_answers()
    with clear_errors("model", text):
        found = _pinned(name, is_local=not hub_answers(), with_code=is_trusted(path), with_weights=with_weights)
    return trusted(found, is_trusted(path)), True


def located_model(path: str | Path, *, with_weights: bool = True) -> tuple[str, bool]:
    """Return what `located` returns. Raises ConfigError also for a folder without config.json."""
    name, is_local = located(path, with_weights=with_weights)
    if Path(name).is_dir() and not (Path(name) / "config.json").is_file():
        hint = "a model folder holds config.json, *.safetensors and the tokenizer, as `save_pretrained` writes them"
        if (Path(name) / "adapter_config.json").is_file():
            hint = "it holds an adapter: `rlhf lora_combiner` merges it into its model"
        raise ConfigError(f"the model folder {name} has no config.json", hint=hint)
    return name, is_local


def check_code(names: str) -> None:
    """Check that no model or tokenizer among comma-separated folders needs code that may not run. Runs none of it.

    Raises ConfigError for one that does. Folders that do not exist, and hub names, are not looked at.
    """
    for name in filter(None, map(str.strip, names.split(","))):
        folder = Path(name).expanduser()
        for kind, file in (("model", "config.json"), ("tokenizer", "tokenizer_config.json")):
            if is_trusted(names) or not read_json(folder / file).get("auto_map"):
                continue
            with clear_errors(kind, folder):
                import transformers

                auto_class = transformers.AutoConfig if kind == "model" else transformers.AutoTokenizer
                auto_class.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


@functools.cache
def hub_answers() -> bool:
    """Return whether the hub can be reached. Asked once: its own client would retry each file for half a minute."""
    from huggingface_hub import constants

    try:
        hub_date()
    except Exception as error:
        logger.info("the hub %s does not answer, only its local cache is used: %s", constants.ENDPOINT, error)
        return False
    return True


def hub_date() -> str | None:
    """Ask the hub; return the date and time that it answers with, as HTTP writes it, or None if it tells none.

    Raises:
        TimeoutError: there is no answer in time.
        Exception: of the HTTP library, which differs between versions of the hub's client.
    """
    from huggingface_hub import constants, get_session

    answers: list[Any] = []

    def ask() -> None:
        try:
            answers.append(get_session().head(constants.ENDPOINT, timeout=_HUB_TIMEOUT_S).headers.get("date"))
        except Exception as error:
            answers.append(error)

    # Ask in a thread, because looking up the hub's address has no timeout.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_HUB_TIMEOUT_S)
    if not answers:
        raise TimeoutError("no answer in time")
    if isinstance(answers[0], Exception):
        raise answers[0]
    return answers[0]


@contextmanager
def clear_errors(kind: str, path: str | Path) -> Iterator[None]:
    """Turn any error of the libraries that read a model or tokenizer (`kind`) into a ConfigError with a hint."""
    try:
        yield
    except RlhfError:
        raise
    except Exception as error:  # the libraries pass on errors of many kinds
        first, *others = str(error).strip().split("\n")
        said = f"{first} {others[0].strip()}" if first.endswith(":") and others else first
        if _CUSTOM_CODE in str(error):
            message = f"the {kind} {path} needs Python code of its own, which comes with its files and was not run"
            hint = "use a model of a family that transformers knows; or read the code and, if you trust it, use"
            hint += " ``TrustedModel``"
            raise ConfigError(message, hint=hint) from error
        problem = None if Path(path).is_dir() else hub_problem(error, str(path))
        if problem is not None:
            raise ConfigError(f"cannot load the {kind} {path}: {problem.said}", hint=problem.hint) from error
        raise ConfigError(f"cannot load the {kind} {path}: {said}", hint=_load_hint(error)) from error


def _load_hint(error: Exception) -> str:
    if isinstance(error, OSError):  # so do the errors of the hub's client
        return "check the path, or the hub name and the network; a hub model must be in the local cache when offline"
    if isinstance(error, ImportError):
        named = _INSTALLS.search(str(error))
        return f"{named[1] if named else 'install the package that it needs'}, or use a model that needs none"
    return f"its files may be damaged, or need another version of transformers than {metadata.version('transformers')}"
