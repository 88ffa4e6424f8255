"""Rank sets: the processes that train a model together, and DeepSpeed in each of them."""

import os
import socket
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import distributed_c10d

from rlhf_data.errors import EngineError
from rlhf_models.attention.sequence_parallel import SequenceGroup
from rlhf_rollout.host import stay_on_loopback
from rlhf_train.engine.deepspeed_internals import import_deepspeed

# How long ranks wait for one that loads a model, writes to a slow disk or sends weights to engines. The limits of
# DeepSpeed, and of PyTorch with NCCL, 10 minutes, would end the run. Nobody needs it to notice a rank that has died:
# with gloo the others fail at once, and Ray or the launcher tells of a process that has ended, whatever the others
# wait for.
RANK_TIMEOUT = timedelta(hours=2)


def init_process_group(*, rank: int, world_size: int, master: tuple[str, int], device: str) -> None:
    """Join this process's rank set: NCCL on "cuda", gloo on "cpu". Collective.

    This and all groups of ranks that are formed later wait `RANK_TIMEOUT`.

    Args:
        rank: of this process, from 0.
        world_size: processes of the rank set.
        master: host and port of rank 0, where the ranks meet. Rank 0 listens on that address and on no other.
        device: "cuda" or "cpu".

    Raises:
        EngineError: rank 0 has no such address, or its port is taken.
    """
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK="0",
        MASTER_ADDR=master[0],
        MASTER_PORT=str(master[1]),
    )
    deepspeed = import_deepspeed(device)
    backend = "nccl" if device == "cuda" else "gloo"
    # DeepSpeed forms groups without saying a limit.
    distributed_c10d.default_pg_timeout = RANK_TIMEOUT
    distributed_c10d.default_pg_nccl_timeout = RANK_TIMEOUT
    # Under torchrun the launcher listens, not a rank.
    if not torch.distributed.is_initialized() and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        stay_on_loopback(master[0])
        options: dict[str, Any] = {"device_id": torch.device("cuda", 0)} if device == "cuda" and world_size > 1 else {}
        torch.distributed.init_process_group(
            backend,
            store=_open_store(rank, world_size, master),
            rank=rank,
            world_size=world_size,
            timeout=RANK_TIMEOUT,
            **options,
        )
    deepspeed.init_distributed(dist_backend=backend, timeout=RANK_TIMEOUT, auto_mpi_discovery=False, verbose=False)


def join_sequence_group(size: int) -> SequenceGroup | None:
    """Return the group of `size` neighbouring ranks that this one belongs to, or None for size 1. Collective.

    They divide the tokens of each pass; see `rlhf_models.attention.sequence_parallel`. `ModelSpec.check_ranks` says
    whether `size` is possible.
    """
    if size == 1:
        return None
    firsts = range(0, torch.distributed.get_world_size(), size)
    groups = [torch.distributed.new_group(range(first, first + size)) for first in firsts]
    return SequenceGroup(groups[torch.distributed.get_rank() // size])


def leave_process_group() -> None:
    """Close the connections to the other ranks, as the last act of a process: PyTorch may abort one that exits without.

    Does nothing in a rank set of one.
    """
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        torch.distributed.destroy_process_group()


def _open_store(rank: int, world_size: int, master: tuple[str, int]) -> torch.distributed.Store:
    """Return the store where the ranks meet. By itself, torch would listen on every address of the machine."""
    if world_size == 1:
        return torch.distributed.HashStore()
    host, port = master
    options: dict[str, Any] = {}
    if rank == 0:
        try:
            family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            options["master_listen_fd"] = socket.create_server(address[:2], family=family, backlog=2048).detach()
        except OSError as error:
            hint = "rank 0 must run on the machine of this address (MASTER_ADDR), and the port (MASTER_PORT) be free"
            raise EngineError(f"rank 0 cannot listen on {host}:{port}: {error.strerror}", hint=hint) from error
    store = torch.distributed.TCPStore(host, port, world_size, rank == 0, wait_for_workers=False, **options)
    store.set_timeout(RANK_TIMEOUT)  # after the connection; a group meets here at its first collective
    return store
