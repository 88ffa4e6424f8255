"""A rank set: the training processes of some models, called together."""

from collections.abc import Callable, Sequence
from functools import partial
from threading import Lock
from typing import Any

from rlhf_train.cluster.ray_session import wait
from rlhf_train.learning.rank_actor import RankActor


class RankSet:
    """Calls methods on all ranks that hold the models of `roles`.

    Args:
        roles: the models that each rank holds.
        handles: Ray handles of the ranks, in the order of ranks.
    """

    def __init__(self, roles: Sequence[str], handles: Sequence[Any]) -> None:
        self.roles = tuple(roles)
        self.handles = list(handles)
        # A call reaches every rank before the next one reaches any: ranks that work in different orders would wait for
        # each other. Weights are sent from another thread.
        self._order = Lock()

    def start(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of `TrainWorker` or `RankActor` on every rank with the same arguments.

        Returns one object reference per rank.
        """
        with self._order:
            return [_remote(handle, method)(*args, **kwargs) for handle in self.handles]

    def start_each(self, method: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call `method` on every rank with its own arguments; return one object reference per rank."""
        with self._order:
            return [_remote(h, method)(*args) for h, args in zip(self.handles, arguments, strict=True)]

    def start_on(self, rank: int, method: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
        """Call a method of `RankActor`, which needs no other rank, on one rank.

        Returns references to the two parts of its result.
        """
        with self._order:
            first, second = getattr(self.handles[rank], method.__name__).options(num_returns=2).remote(*args)
        return first, second

    def call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call `method` on every rank and wait; return one result per rank."""
        return wait(self.start(method, *args, **kwargs))


def _remote(handle: Any, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that runs `method` on a rank. Ray knows those of the actor, which calls its worker."""
    name = method.__name__
    if method.__qualname__ == f"{RankActor.__name__}.{name}":
        return getattr(handle, name).remote
    return partial(handle.work.remote, name)
