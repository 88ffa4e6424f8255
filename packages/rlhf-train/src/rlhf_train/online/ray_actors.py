"""A training rank as a Ray actor."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_rollout.host import free_port
from rlhf_rollout.ray_actors import RayEngine, node_address, prepare_process
from rlhf_train.specs import ModelSpec


class RankActor:
    """Holds a `TrainWorker` in a process of its own, and drives the weight sync from there."""

    def __init__(self) -> None:
        prepare_process()

    def master_address(self) -> tuple[str, int]:
        """Return where the ranks of the group meet."""
        return node_address(), free_port()

    def load(
        self, rank: int, num_ranks: int, models: Mapping[str, ModelSpec], job: Any, master: tuple[str, int] | None
    ) -> None:
        """Load the models; without a master the group is this rank alone. Collective."""
        from rlhf_train.online.worker import TrainWorker
        from rlhf_train.weight_sync.source import WeightSource

        # On CPUs the ranks of a group share the cores; groups and engines take turns.
        num_threads = max((os.cpu_count() or 1) // num_ranks, 1) if job.plan.device == "cpu" else None
        self._worker = TrainWorker(
            models,
            job.algorithm,
            temperature=job.sampling.temperature,
            rank=rank,
            num_ranks=num_ranks,
            master=master or ("127.0.0.1", free_port()),
            device=job.plan.device,
            seed=job.seed,
            num_threads=num_threads,
            ema_beta=job.ema_beta,
        )
        self._sender = WeightSource(job.engine.weight_transfer, checksum=job.sync_checksum)

    def work(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the worker."""
        return getattr(self._worker, method)(*args, **kwargs)

    def send_weights(self, engines: Sequence[RayEngine], policy_version: int) -> int:
        """Send the actor's weights to `engines`; return their bytes. Collective.

        A rank without engines takes part in the gathering only.
        """
        weights = self._worker.engines["actor"].named_weights()
        if not engines:
            for _ in weights:
                pass
            return 0
        return self._sender.send(weights, engines, policy_version).size_bytes
