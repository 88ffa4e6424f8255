"""Names of repositories on the Hugging Face hub, also of one of their revisions, and what the hub's errors mean."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# What is downloaded of a model: configs, templates and tokenizers; then weights, pickled ones if there are no others.
PATTERNS = ("*.json", "*.jinja", "*.txt", "*.model")
WEIGHT_PATTERNS, PICKLE_PATTERNS, CODE_PATTERNS = ("*.safetensors", "value_head.bin"), ("*.bin",), ("*.py",)
_COPIES = ("*/*.safetensors", "*/*.bin")  # folders inside a repository hold the same weights in other formats


class HubName(NamedTuple):
    """A model on the hub, as `owner/name` or `owner/name@revision`.

    Attributes:
        repository: `owner/name`.
        revision: a branch, tag or commit; None without one, which stands for the branch `main`.
    """

    repository: str
    revision: str | None


class Problem(NamedTuple):
    """Why the hub, or its cache on this machine, did not give something: `said` of it, and what to do, as a `hint`."""

    said: str
    hint: str


def hub_name(text: str) -> HubName | None:
    """Return the parts of a hub name; None for a text that is none, such as a path."""
    repository, at, revision = text.partition("@")
    if text.startswith((".", "/", "~")) or repository.count("/") != 1 or (at and not revision):
        return None
    return HubName(repository, revision or None)


def snapshot(name: HubName, *, is_local: bool, with_code: bool = False, with_weights: bool = True) -> str:
    """Return the folder in the hub's cache that holds a model of the hub, which is downloaded if needed.

    Args:
        name: which model.
        is_local: whether to look in the cache only.
        with_code: whether the model's Python files are wanted, too.
        with_weights: whether its weights are.

    Raises:
        Exception: of the hub's client; see `hub_problem`.
    """
    from huggingface_hub import snapshot_download

    def download(*patterns: str) -> str:
        options = {"allow_patterns": [*patterns], "ignore_patterns": [*_COPIES], "local_files_only": is_local}
        return snapshot_download(name.repository, revision=name.revision, **options)

    patterns = (*PATTERNS, *(CODE_PATTERNS if with_code else ()), *(WEIGHT_PATTERNS if with_weights else ()))
    folder = download(*patterns)
    if with_weights and not any(Path(folder).glob("*.safetensors")):
        return download(*patterns, *PICKLE_PATTERNS)
    return folder


def hub_problem(error: BaseException, name: str, *, of_data: bool = False) -> Problem | None:
    """Return what an error of the hub's client means for a user; None for an error of something else.

    Args:
        error: it, or what was raised from it.
        name: of the model or data set on the hub, with or without its revision.
        of_data: whether it is a data set.
    """
    from huggingface_hub import constants, errors

    kind = "data set" if of_data else "model"
    repository, _, revision = name.partition("@")
    log_in = "type `hf auth login`, or set HF_TOKEN"
    chain = list(_chain(error))
    for found in chain:
        if isinstance(found, errors.GatedRepoError):
            hint = f"ask for access on its page of the hub; then {log_in} to a token that may read it"
            return Problem(f"the hub gives {repository} only to users whom its owner admits", hint)
        if isinstance(found, errors.RevisionNotFoundError):
            asked = f" {revision}" if revision and not of_data else ""
            return Problem(f"{repository} has no such revision{asked}", "name a branch, a tag or a whole commit of it")
    statuses = [status for found in chain if (status := _status(found))]
    if any(isinstance(found, errors.RepositoryNotFoundError) for found in chain) or {401, 404} & set(statuses):
        hint = f"check the name; for a private one, {log_in}"
        return Problem(f"the hub has no {kind} {repository} that this user may see", hint)
    if statuses:
        hint = f"{log_in} to a token that may read it" if statuses[0] == 403 else "try again later"
        return Problem(f"the hub {constants.ENDPOINT} answered with status {statuses[0]}", hint)
    away = [errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled]
    away += [ConnectionError] if of_data else []  # as `datasets` tells it
    if not any(isinstance(found, tuple(away)) for found in chain):
        return None
    flags = (" --repo-type dataset" if of_data else "") + (
        f" --revision {revision}" if revision and not of_data else ""
    )
    load = f"load it where there is a network: `hf download {repository}{flags}`"
    if constants.HF_HUB_OFFLINE:
        said = f"{name} is not in this machine's cache of the hub, and HF_HUB_OFFLINE forbids to ask the hub"
        return Problem(said, f"unset HF_HUB_OFFLINE, or, to stay offline, {load}")
    said = f"{name} is not in this machine's cache of the hub, and the hub {constants.ENDPOINT} does not answer"
    return Problem(said, f"check the network, HTTPS_PROXY and HF_ENDPOINT; or, to stay offline, {load}")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _status(error: BaseException) -> int | None:
    """Return the HTTP status that an error tells."""
    return getattr(getattr(error, "response", None), "status_code", None)
