"""How ranks on several nodes learn, before they form a rank set, that one of them has failed.

torchrun ends the processes of a node when one of them fails. Those of other nodes would wait for it to join, silently,
for as long as `engine.process_group.RANK_TIMEOUT`. So they meet in the store of torchrun first, which is there before
them.
"""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from rlhf_data.errors import EngineError

if TYPE_CHECKING:
    from torch.distributed import Store

_FAILED, _NUM_READY, _ALL_READY = "failed", "num_ready", "all_ready"
_CONNECT = timedelta(seconds=10)
_POLL_S = 0.2


def needs_meeting() -> bool:
    """Return whether torchrun started this process and others on other nodes."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return False  # other launchers may set other variables, or set them wrongly
    return int(os.environ["LOCAL_WORLD_SIZE"]) < int(os.environ["WORLD_SIZE"])


@contextmanager
def failing_together() -> Iterator[None]:
    """If this rank fails in the block, tell the ranks of other nodes that are in `meet` or come to it."""
    try:
        yield
    except Exception as error:
        if needs_meeting():
            with suppress(Exception):  # the node with the store may have ended; the error of this rank must be seen
                where = f"rank {os.environ['RANK']} on {socket.gethostname()}"
                _store().set(_FAILED, f"{where} failed: {type(error).__name__}: {error}")
        raise


def meet() -> None:
    """Wait until all ranks are here, if they are on several nodes. Raises EngineError when one of them has failed."""
    if not needs_meeting():
        return

    from torch.distributed import DistError

    try:
        store = _store()
        if store.add(_NUM_READY, 1) == int(os.environ["WORLD_SIZE"]):
            store.set(_ALL_READY, "")
        while not store.check([_ALL_READY]):
            if store.check([_FAILED]):
                raise EngineError(store.get(_FAILED).decode())
            time.sleep(_POLL_S)
    except DistError as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        message = f"torchrun on {where} does not answer: {str(error).splitlines()[0]}"
        raise EngineError(message, hint="the output of that node says whether and why it has ended") from error


def _store() -> "Store":
    """Return the store that torchrun keeps for this attempt to run the processes."""
    from torch.distributed import PrefixStore, TCPStore

    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=_CONNECT)
    return PrefixStore(f"rlhf/attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
