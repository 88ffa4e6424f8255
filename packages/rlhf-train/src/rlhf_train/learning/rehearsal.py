"""A step on made-up rollouts before the first one: what a step compiles is compiled while the engines still start."""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhf_data.records import FinishReason, Rollout, Span, SpanSource
from rlhf_models.fast.compiled import is_compiled
from rlhf_rollout.engines import EngineSpec
from rlhf_train.batching import RankPlan, plan_rollouts
from rlhf_train.cluster.places import PlacementPlan
from rlhf_train.engine.protocol import StepStats
from rlhf_train.learning.columns import RolloutColumns
from rlhf_train.learning.experience import columns_of
from rlhf_train.learning.learning_spec import LearningSpec
from rlhf_train.learning.worker import TrainWorker

logger = logging.getLogger(__name__)

MAX_PASS_TOKENS = 32_768  # code that is compiled for so many tokens suits more, too
_MARGIN = 0.05  # of a GPU's memory: what CUDA and libraries take beside PyTorch


def rehearse(worker: TrainWorker, roles: Sequence[str], job: LearningSpec, rank: int) -> float:
    """Run every pass of a step and drop all results, if layers are compiled. Collective.

    Not at ZeRO stage 3, where the first step compiles them.

    Weights, gradients, optimizers, random numbers and CUDA graphs stay as they are. Passes that do not fit into the
    memory beside the engines are left to the first step.

    Args:
        worker: of this rank, with its models loaded.
        roles: the models of the worker's rank set.
        job: the run.
        rank: number of this process in its rank set.

    Returns:
        The seconds that it took; 0.0 if nothing is compiled here.
    """
    if job.plan.device == "cpu":
        return 0.0
    # Layers of frozen models are compiled like those of trained ones.
    engines = worker.engines.values()
    spec = job.models[roles[0]]
    if not (any(is_compiled(engine.module) for engine in engines) if engines else spec.may_compile_ahead):
        return 0.0
    started = time.perf_counter()
    with limited_memory(memory_share(job.plan, job.engine, roles[0], rank)), without_trace(worker):
        run_passes(worker, roles, job)
    return time.perf_counter() - started


def memory_share(plan: PlacementPlan, engine: EngineSpec, role: str, rank: int) -> float:
    """Return the share of its GPU's memory that a rank of `role` can take without disturbing engines that start.

    Ranks on the same GPU have equal shares.
    """
    [card] = plan.trainers_of(role).places[rank].cards
    return share_beside_engines(plan, engine, role, rank) / sum(placed.cards.count(card) for placed in plan.trainers)


def share_beside_engines(plan: PlacementPlan, engine: EngineSpec, role: str, rank: int) -> float:
    """Return the share of the GPU of a rank of `role` that engines leave to all of its ranks."""
    [card] = plan.trainers_of(role).places[rank].cards
    num_engines = 0 if engine.enable_sleep else plan.engines.cards.count(card)
    return max(1 - _MARGIN - num_engines * engine.gpu_memory_utilization, 0.0)


@contextmanager
def limited_memory(share: float) -> Iterator[None]:
    """Limit PyTorch to a share of the GPU's memory, free what it has cached, and forget the peak.

    Within the limit, memory that PyTorch has cached goes to allocations that would exceed it.
    """
    torch.cuda.set_per_process_memory_fraction(share)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


class Rehearsed:
    """The part of a trained model's engine that passes use. It goes past DeepSpeed and drops gradients."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self._trained = [weight for weight in self.module.parameters() if weight.requires_grad]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        torch.autograd.grad(loss, self._trained, allow_unused=True)

    def step(self) -> StepStats:
        return StepStats(0.0, 0.0)

    def local_weights(self) -> Iterator[tuple[str, Tensor]]:
        return iter(())  # nothing for a moving average to take in


@contextmanager
def without_trace(worker: TrainWorker) -> Iterator[None]:
    """Have updates of `worker` within a `with` block change nothing."""
    engines = worker.engines
    backbones = [engine.module.model.base_model for engine in engines.values()]
    # Real packs alone decide for which shapes there are graphs.
    graphs = [vars(backbone).pop("pack_graph", None) for backbone in backbones]
    worker.engines = {role: Rehearsed(engine.module) for role, engine in engines.items()}
    try:
        with torch.random.fork_rng():
            yield
    finally:
        worker.engines = engines
        for backbone, graph in zip(backbones, graphs, strict=True):
            if graph is not None:
                backbone.pack_graph = graph
        worker.load_rollouts(RolloutColumns.of([], []), RankPlan((), (), ()))


def run_passes(
    worker: TrainWorker, roles: Sequence[str], job: LearningSpec, *, most_tokens: int = MAX_PASS_TOKENS
) -> None:
    """Run what a step runs on the models of `roles`, with at most `most_tokens` per training pass. Collective."""
    algorithm = job.algorithm
    columns, plan = made_up_step(job, most_tokens=most_tokens)
    worker.load_rollouts(columns, plan)
    run = job.column_roles
    filled = {name: more for role in run for name, more in columns_of(role, algorithm).items()}
    if "actor" not in roles:
        filled["returns"] = ()
    lengths = dict(zip(columns.rollout_ids, columns.lengths, strict=True))
    zeros = {name: {row: np.zeros((n, *more)) for row, n in lengths.items()} for name, more in filled.items()}
    worker.adopt_columns(zeros)
    calls = [partial(worker.assign_advantages, algorithm.kl_coef)] if "actor" in roles else []
    # A bonus that adapts may begin at 0, and passes with it run other kernels.
    weights = {"kl_coef": algorithm.kl_coef, "entropy_coef": algorithm.entropy.coef_step}
    for role in worker.engines:
        calls.append(partial(worker.update, role, max_epochs=1, seed=0, **weights))
    calls += [partial(worker.run_model, role) for role in run if role in roles]
    for call in calls:
        # One by one: ranks wait for each other at the beginning of a call, which another rank may not have left early.
        try:
            call()
        except torch.OutOfMemoryError as error:
            logger.info("something is compiled at the first step, because there is no memory for it yet: %s", error)


def made_up_step(job: LearningSpec, *, most_tokens: int = MAX_PASS_TOKENS) -> tuple[RolloutColumns, RankPlan]:
    """Return the longest rollouts that there may be, enough for two training passes of one rank, and their plan.

    A pass has at most `most_tokens`, but at least one rollout.
    One response is a token shorter: Triton compiles some kernels for multiples of 16 tokens, and again for others.
    """
    batch = job.batch
    budget = batch.micro_batch_tokens
    length = min(job.engine.max_model_len, budget or job.engine.max_model_len)
    response = min(job.sampling.max_tokens, length - 1)
    at_once = budget // length if budget else batch.micro_train_batch_size
    at_once = min(at_once, max(most_tokens // length, 1))
    count = min(2 * at_once, batch.num_rollouts)
    rollouts = []
    for number in range(count):
        written = max(response - (number == count - 1), 1)
        spans = (
            Span(SpanSource.PROMPT, np.zeros(length - response, np.int32)),
            Span(SpanSource.POLICY, np.zeros(written, np.int32), np.zeros(written), policy_version=0),
        )
        rollouts.append(Rollout(str(number), "rehearsal", spans, FinishReason.STOP))
    sizes = replace(batch, micro_train_batch_size=at_once, micro_rollout_batch_size=count, micro_batch_tokens=None)
    max_tokens = job.sampling.max_tokens
    [plan] = plan_rollouts(rollouts, sizes, num_ranks=1, num_mini_batches=1, max_response_tokens=max_tokens, seed=0)
    plan = replace(plan, max_pass_tokens=batch.most_pass_tokens(response))
    return RolloutColumns.of([rollouts[row] for row in plan.rows], [0.0] * count), plan
