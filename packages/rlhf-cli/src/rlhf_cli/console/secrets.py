"""Keeps API keys out of the command line of a run."""

import os
import sys

from rlhf_cli.config.output import WANDB_KEY
from rlhf_data.safety import without_secrets


def restart_without_key() -> None:
    """If the key in WANDB_API_KEY is on the command line, restart this process with `true` in its place.

    `ps`, Ray's dashboard and Weights & Biases show or store the command line of a run. The key survives the restart in
    the environment, which they do not store. Call this before the process has done anything else.

    Secrets of URLs stay on the command line that `ps` and Ray show, but not in what Python and trackers see of it.
    """
    key = os.environ.get(WANDB_KEY)
    words = sys.orig_argv[1:]
    if key and any(_has(word, key) for word in words):
        sys.stdout.flush()
        sys.stderr.flush()
        os.execv(sys.executable, [sys.executable, *(_without(word, key) for word in words)])
    sys.argv[1:] = map(without_secrets, sys.argv[1:])


def _has(word: str, key: str) -> bool:
    return word == key or word.endswith(f"={key}")


def _without(word: str, key: str) -> str:
    return word.removesuffix(key) + "true" if _has(word, key) else word
