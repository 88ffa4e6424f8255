"""Reads the environment variables by which launchers such as deepspeed and torchrun give a process its rank."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from rlhf_data.errors import ConfigError

# Commands that train together in the processes that a launcher starts. The others start their own processes.
LAUNCHED = frozenset({"sft", "rm", "dpo", "kto", "prm", "kd"})

_NEEDED = ("RANK", "MASTER_ADDR", "MASTER_PORT")
_MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


@dataclass(frozen=True, slots=True)
class Launch:
    """The place of this process among those that a launcher started.

    Attributes:
        rank: of this process, from 0. Rank 0 alone writes and prints.
        num_ranks: processes that train together.
        local_rank: number of this process on its machine; None if the launcher does not say.
        master: host and port where the processes meet; None for a single process.
    """

    rank: int = 0
    num_ranks: int = 1
    local_rank: int | None = None
    master: tuple[str, int] | None = None


def launch(environ: Mapping[str, str] = os.environ) -> Launch:
    """Return the place that `environ` gives this process; rank 0 of 1 without a launcher.

    Raises:
        ConfigError: variables that are missing, not numbers, or contradict each other. Training on regardless would be
            several independent trainings that write to the same folder.
    """
    num_ranks = _number(environ, "WORLD_SIZE", 1)
    hint = "start it by a launcher (`torchrun --nproc_per_node 2 -m rlhf_cli.train_sft ...`), or unset WORLD_SIZE"
    for name in _MPI_SIZES:
        if "WORLD_SIZE" not in environ and _number(environ, name, 1) > 1:
            raise ConfigError(f"MPI started {environ[name]} processes ({name}), and WORLD_SIZE is not set", hint=hint)
    if num_ranks <= 1:
        return Launch()
    if missing := [name for name in _NEEDED if not environ.get(name)]:
        raise ConfigError(f"WORLD_SIZE is {num_ranks}, and {', '.join(missing)} not set", hint=hint)
    rank = _number(environ, "RANK", 0)
    if not 0 <= rank < num_ranks:
        raise ConfigError(f"RANK is {rank}; it must lie in [0, {num_ranks}), as WORLD_SIZE is {num_ranks}", hint=hint)
    local_rank = _number(environ, "LOCAL_RANK", -1)
    master = (environ["MASTER_ADDR"], _number(environ, "MASTER_PORT", 0))
    return Launch(rank, num_ranks, local_rank if local_rank >= 0 else None, master)


def check_launched_once(command: str, typed: str, environ: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError when a launcher started several processes of a command that starts its own.

    Args:
        command: name of the command, as in `rlhf ppo`.
        typed: how a person starts one process of it.
        environ: environment variables of this process.
    """
    if command in LAUNCHED:
        return
    for name in ("WORLD_SIZE", *_MPI_SIZES):
        count = _number(environ, name, 1)
        if count > 1:
            flags = f" --actor_num_gpus_per_node {count}" if command == "ppo" else ""
            message = f"{count} processes of `{typed}` were launched ({name}); it starts its own processes"
            raise ConfigError(message, hint=f"use `{typed}{flags}`, without a launcher")


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name) or str(default)
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name} is `{text}`; it must be a whole number", hint=f"unset {name}") from None
