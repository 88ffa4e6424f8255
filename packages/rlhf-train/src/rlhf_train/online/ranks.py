"""The processes that train, called together."""

from collections.abc import Sequence
from typing import Any

import ray

from rlhf_data.errors import EngineError
from rlhf_rollout.ray_actors import plain_errors


def wait(references: Sequence[Any]) -> list[Any]:
    """Return the results of Ray's `references`.

    Raises:
        RlhfError: the remote side raised it.
        EngineError: the process is gone.
        ray.exceptions.RayTaskError: any other error of the remote side, with its traceback.
    """
    if not references:
        return []  # `ray.get` would start a cluster in a process that has none
    with plain_errors(EngineError, "a process of the run"):
        return ray.get(list(references))


class RankSet:
    """The processes that hold the models of `roles`, one per data-parallel rank, called together."""

    def __init__(self, roles: Sequence[str], handles: Sequence[Any]) -> None:
        self.roles = tuple(roles)
        self.handles = list(handles)
        self.started: list[Any] = []

    def start(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call `method` on every rank with the same arguments; return one object reference per rank."""
        return [getattr(handle, method).remote(*args, **kwargs) for handle in self.handles]

    def start_each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call `method` on every rank with its own arguments; return one object reference per rank."""
        return [getattr(h, method).remote(*args) for h, args in zip(self.handles, arguments, strict=True)]

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call `method` on every rank and wait; return one result per rank."""
        return wait(self.start(method, *args, **kwargs))
