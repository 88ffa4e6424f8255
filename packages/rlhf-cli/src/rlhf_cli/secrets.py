"""Keys that were typed on a command line."""

import os
import sys

from rlhf_cli.config.output import WANDB_KEY


def restart_without_key() -> None:
    """Replace this process by one whose command line has `true` in the place of the key in WANDB_API_KEY, if it has it.

    `ps`, Ray's dashboard and Weights & Biases itself all show or keep the command line of a run. The environment, which
    they do not keep, carries the key over. Call it before the process has done anything.
    """
    key = os.environ.get(WANDB_KEY)
    words = sys.orig_argv[1:]
    if key and any(_has(word, key) for word in words):
        sys.stdout.flush()
        sys.stderr.flush()
        os.execv(sys.executable, [sys.executable, *(_without(word, key) for word in words)])


def _has(word: str, key: str) -> bool:
    return word == key or word.endswith(f"={key}")


def _without(word: str, key: str) -> str:
    return word.removesuffix(key) + "true" if _has(word, key) else word
