"""What the trainer computed for single tokens, in one file per step. Torch-free.

A file `step-N.safetensors` has a tensor [T] float16 per column of `COLUMNS` that the run has, for the T tokens that the
policy wrote, rollout after rollout. `num_tokens` [R] int32 has how many each rollout has, and the metadata
`rollout_ids` their ids as JSON. A value is NaN where the token was left out of what the column is about.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rlhf_data.safety import open_to_others

# gap        the trainer's log-prob minus the engine's, nats
# log_ratio  the log-prob in the token's last pass of the step minus the old one of the ratio, nats
# advantage  by which the policy loss multiplies the ratio
# entropy    of the policy's distribution in the token's last pass, nats
# kl         the trainer's log-prob minus the reference's, nats: its mean estimates the KL to the reference
COLUMNS = ("gap", "log_ratio", "advantage", "entropy", "kl")
_NAME = re.compile(r"step-(\d+)\.safetensors")
_MOST = float(np.finfo(np.float16).max)


class TokenValues(NamedTuple):
    """The values of the rollouts of one rank.

    Attributes:
        rollout_ids: R ids.
        num_tokens: [R] int32, tokens of each that the policy wrote.
        columns: by name, [sum of `num_tokens`] float16.
    """

    rollout_ids: Sequence[str]
    num_tokens: np.ndarray
    columns: Mapping[str, np.ndarray]


def halves(values: np.ndarray) -> np.ndarray:
    """Return numbers as float16; those that are too large become the largest one."""
    return np.clip(values, -_MOST, _MOST).astype(np.float16)


def write_values(folder: Path, step: int, parts: Sequence[TokenValues]) -> None:
    """Write the values of a step, from all ranks. A file of the same step is replaced as a whole."""
    from safetensors.numpy import save_file

    columns = {name: np.concatenate([part.columns[name] for part in parts]) for name in COLUMNS}
    tensors = {name: column for name, column in columns.items() if not np.isnan(column).all()}
    tensors["num_tokens"] = np.concatenate([part.num_tokens for part in parts]).astype(np.int32)
    ids = [rollout_id for part in parts for rollout_id in part.rollout_ids]
    folder.mkdir(exist_ok=True)
    path = _path(folder, step)
    unfinished = path.with_suffix(".partial")
    save_file(tensors, unfinished, {"rollout_ids": json.dumps(ids)})
    open_to_others(unfinished)
    os.replace(unfinished, path)


def read_values(folder: Path, step: int) -> dict[str, dict[str, np.ndarray]]:
    """Return the columns of each rollout of a step by its id, [n] float16 each; nothing where the run has none.

    A file that is damaged counts as none.
    """
    from safetensors import SafetensorError, safe_open

    path = _path(folder, step)
    if not path.is_file():
        return {}
    try:
        with safe_open(path, "numpy") as file:
            ids = json.loads(file.metadata()["rollout_ids"])
            names = [name for name in COLUMNS if name in file.keys()]  # noqa: SIM118
            columns = {name: file.get_tensor(name) for name in names}
            ends = file.get_tensor("num_tokens").cumsum()[:-1]
        split = {name: np.split(column, ends) for name, column in columns.items()}
        return {rollout_id: {name: split[name][at] for name in split} for at, rollout_id in enumerate(ids)}
    except (SafetensorError, OSError, ValueError, TypeError, LookupError):
        return {}


def cut_values(folder: Path, last_step: int) -> None:
    """Remove the values of all steps after `last_step`."""
    for path in folder.glob("step-*"):
        name = _NAME.fullmatch(path.name)
        if name is None or int(name[1]) > last_step:
            path.unlink()


def _path(folder: Path, step: int) -> Path:
    return folder / f"step-{step}.safetensors"
