"""A training rank as a Ray actor."""

import gc
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from itertools import chain
from typing import TYPE_CHECKING, Any

from rlhf_rollout.host import collection_paused, free_port
from rlhf_rollout.ray_actors import RayEngine, node_address, prepare_process
from rlhf_rollout.weights.bucket import DRAFT
from rlhf_train.cluster.ray_session import DeviceMemoryError
from rlhf_train.run.watch import stacks_written
from rlhf_train.specs import ModelSpec
from rlhf_train.tracing.trace import WORK, Span, Track, Work

if TYPE_CHECKING:
    from rlhf_train.batching import RankPlan
    from rlhf_train.learning.columns import RolloutColumns


_SMALLER_PASSES = (
    "lower ``micro_train_batch_size`` and ``micro_rollout_batch_size``, or ``micro_batch_tokens``; or add"
    " ``gradient_checkpointing``; or lower ``gpu_memory_utilization`` where engines share the GPU"
)
_LATER_ENGINES = "lower ``gpu_memory_utilization``, or add ``enable_sleep``, with which engines start later"


# Methods of `TrainWorker` that allocate memory of the device.
_PASSES = ("run_model", "assign_advantages", "update", "reload")


@contextmanager
def _out_of_memory_told(hint: str, what: str = "") -> Iterator[None]:
    """Say of a GPU whose memory does not suffice, for `what` if that is known, what can be done."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        raise DeviceMemoryError(f"the GPU has too little memory{what}: {error}", hint=hint) from error


class RankActor:
    """Hosts a `TrainWorker` in a process of its own, and sends its weights to engines."""

    _sends_adapters: bool  # in place of all weights

    def __init__(self, gpus: Sequence[str] = ()) -> None:
        prepare_process(gpus)

    def take_work(self) -> Work:
        """Return what this rank has done since the last call."""
        return WORK.take()

    def master_address(self) -> tuple[str, int]:
        """Return the host and port where the ranks of this rank set meet."""
        return node_address(), free_port()

    @collection_paused()
    def prepare(self) -> None:
        """Import the libraries that `load` needs, which takes seconds."""
        import rlhf_train.learning.kernels_ahead  # noqa: F401

    @stacks_written()
    @collection_paused()
    def load(
        self, rank: int, num_ranks: int, models: Mapping[str, ModelSpec], job: Any, master: tuple[str, int] | None
    ) -> dict[str, float]:
        """Join the rank set, load the models, and compile what they run. Collective.

        `master` is None for a rank set of one rank. Returns the seconds that each of the two last took.
        """
        from rlhf_rollout.weights import ipc
        from rlhf_rollout.weights.source import WeightSource
        from rlhf_train.learning.kernels_ahead import compiled_ahead
        from rlhf_train.learning.rehearsal import limited_memory, rehearse, share_beside_engines
        from rlhf_train.learning.worker import TrainWorker

        with WORK.doing("load"), compiled_ahead(models, job, rank):
            started = time.perf_counter()
            # On CPUs the ranks of a set compute at the same time and split the cores, with the engines if these
            # generate meanwhile. Other sets mostly compute while this set waits, so they are not counted.
            num_busy = num_ranks + job.num_busy_engines
            num_threads = max(len(os.sched_getaffinity(0)) // num_busy, 1) if job.plan.device == "cpu" else None
            limits = nullcontext()
            if job.plan.device == "cuda":
                # DeepSpeed needs twice the memory of a model for a moment, which PyTorch would keep from the engines.
                limits = limited_memory(share_beside_engines(job.plan, job.engine, next(iter(models)), rank))
            with limits, _out_of_memory_told(_LATER_ENGINES, f" beside the engines to load {', '.join(models)}"):
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
                    pack_tokens=job.pack_tokens,
                    takes_turns=job.takes_turns,
                    trains_in_turn=job.trainer_sleep,
                )
            gc.freeze()  # for as long as the process lives; see `quick_collection`
            self._sends_adapters = job.engine.adapter_rank > 0
            self._sender = WeightSource(
                job.engine.weight_transfer,
                checksum=job.sync_checksum,
                workers_per_engine=job.engine.tensor_parallel_size,
                host=node_address(),
                # Whoever sleeps makes room for the other's memory. And CUDA frees memory that is exported only when
                # every engine has released it, which one that is killed never does.
                keep_buffer=not job.takes_turns and job.engine.weight_transfer != "ipc",
                # The senders to one engine need buckets of the same size, and their GPUs may have different room.
                room=ipc.room if job.engine.weight_transfer == "ipc" and job.engine.tensor_parallel_size == 1 else None,
            )
            loaded_s = time.perf_counter() - started
            return {"startup/load": loaded_s, "startup/rehearsal": rehearse(self._worker, list(models), job, rank)}

    def work(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the `TrainWorker` and return its result."""
        name = f"{method} {args[0]}" if method in ("run_model", "update") else method
        told = _out_of_memory_told(_SMALLER_PASSES) if method in _PASSES else nullcontext()
        with WORK.doing(name), stacks_written(), told:
            return getattr(self._worker, method)(*args, **kwargs)

    @stacks_written()
    @_out_of_memory_told(_SMALLER_PASSES)
    def run_block(
        self, roles: Sequence[str], names: Sequence[str], columns: "RolloutColumns", plan: "RankPlan"
    ) -> tuple[Any, tuple[list[Any], float]]:
        """Run models on rollouts that need not be those of the rank's shard, which stays.

        Args:
            roles: the models.
            names: of the columns that they fill in.
            columns, plan: see `TrainWorker.load_rollouts`. The plan needs no mini-batches.

        Returns:
            The columns, see `Experience.export`; and the metrics of each model, with the seconds that all took.
        """
        started = time.perf_counter()
        worker = copy(self._worker)  # the same models, with a shard of its own
        worker.load_rollouts(columns, plan)
        with WORK.doing(f"run_block {' '.join(roles)}"):
            metrics = [worker.run_model(role) for role in roles]
        return worker.export_columns(names), (metrics, time.perf_counter() - started)

    @stacks_written()
    def send_weights(self, engines: Mapping[int, RayEngine], policy_version: int) -> tuple[int, dict[int, str]]:
        """Send the actor's weights, or its adapters alone, to `engines`, which have numbers. Collective.

        Weights of a draft model that is trained along follow.

        Returns the weights' size in bytes, 0 without engines, and why engines failed, by number. A rank without engines
        only takes part in gathering the weights.
        """
        with WORK.doing(f"send_weights of version {policy_version}"):
            actor = self._worker.engines["actor"]
            weights = actor.named_adapters() if self._sends_adapters else actor.named_weights()
            if (draft := self._worker.engines.get("draft")) is not None:
                weights = chain(weights, ((DRAFT + name, weight) for name, weight in draft.named_weights()))
            if not engines:
                for _ in weights:
                    pass
                return 0, {}
            names = [engine.process for engine in engines.values()]
            began_s = time.perf_counter()
            report = self._sender.send(weights, list(engines.values()), policy_version, names)
        numbers = list(engines)
        for index, ended_s in report.ended_s.items():
            size = {
                "bytes": report.size_bytes,
                **({"failed": report.failures[index]} if index in report.failures else {}),
            }
            track = Track(f"engine {numbers[index]}", f"weights from rank {self._worker.rank}")
            WORK.add(Span(f"weights of version {policy_version}", began_s, ended_s, args=size, track=track))
        return report.size_bytes, {numbers[index]: reason for index, reason in report.failures.items()}
