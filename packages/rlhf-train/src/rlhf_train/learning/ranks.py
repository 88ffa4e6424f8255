"""A rank set: the training processes of some models, called together."""

from collections.abc import Sequence
from threading import Lock
from typing import Any

from rlhf_train.cluster.ray_session import wait


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

    def start(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call `method` on every rank with the same arguments; return one object reference per rank."""
        with self._order:
            return [getattr(handle, method).remote(*args, **kwargs) for handle in self.handles]

    def start_each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call `method` on every rank with its own arguments; return one object reference per rank."""
        with self._order:
            return [getattr(h, method).remote(*args) for h, args in zip(self.handles, arguments, strict=True)]

    def start_on(self, rank: int, method: str, *args: Any) -> tuple[Any, Any]:
        """Call `method`, which needs no other rank, on one rank; return references to the two parts of its result."""
        with self._order:
            first, second = getattr(self.handles[rank], method).options(num_returns=2).remote(*args)
        return first, second

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call `method` on every rank and wait; return one result per rank."""
        return wait(self.start(method, *args, **kwargs))
