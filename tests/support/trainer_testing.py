"""Helpers for tests of the trainer: random rollouts, ranks in processes of their own, and a job on a tiny model."""

import dataclasses
import os
import pickle
import queue
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from process_testing import forked_context
from rlhf_data.records import FinishReason, Prompt, Rollout, Span, SpanSource, Verdict, VerdictKind
from rlhf_rollout.engines import EngineSpec
from rlhf_rollout.host import free_port, local_gpus
from rlhf_rollout.protocols import SamplingParams
from rlhf_rollout.rewards.sources import CallOptions, RewardSource
from rlhf_train.algorithms.table import make_algorithm
from rlhf_train.batching import BatchSizes
from rlhf_train.cluster.placement import PlacementRequest, plan_placement
from rlhf_train.cluster.places import Place, ProcessPlan
from rlhf_train.generation.run_spec import RewardSpec
from rlhf_train.online_job import OnlineJob
from rlhf_train.run.observer import Observer
from rlhf_train.specs import ModelSpec, OptimizerSpec

# With this epsilon, a step of Adam is a tenth of the gradient.
DESCENT = OptimizerSpec(
    learning_rate=1e5, betas=(0.0, 0.0), eps=1e6, scheduler="constant", max_norm=0.0, weight_decay=0.0
)
RANK_TIMEOUT_S = 300.0
# What a trainer of another device or number of ranks leaves in the environment of the process that starts ranks.
DEEPSPEED_VARIABLES = ("DS_ACCELERATOR", "LOCAL_SIZE")
NUM_CLUSTER_CPUS = 16  # as Ray counts them: more than the processes of any run of a test


class Watch(Observer):
    """Keeps what an offline run reports."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.evaluations: dict[int, dict[str, float]] = {}

    def update(self, update: int, num_updates: int, metrics: dict[str, float]) -> None:
        self.steps.append(metrics)

    def evaluation(self, step: int, metrics: dict[str, float]) -> None:
        self.evaluations[step] = metrics


def random_rollouts(
    count: int, *, vocab_size: int, seed: int = 0, max_prompt: int = 9, max_response: int = 12
) -> list[Rollout]:
    """Return rollouts of random tokens and lengths with random rewards, four per group.

    Every fifth rollout has two turns with environment tokens in between. One has a response of a single token.
    """
    rng = np.random.default_rng(seed)

    def tokens(low: int, high: int) -> np.ndarray:
        return rng.integers(0, vocab_size, rng.integers(low, high + 1))

    def policy(low: int = 1) -> Span:
        ids = tokens(low, max_response)
        return Span(SpanSource.POLICY, ids, rng.uniform(-4, -1, len(ids)), policy_version=0)

    rollouts = []
    for index in range(count):
        spans = [Span(SpanSource.PROMPT, tokens(1, max_prompt)), policy()]
        if index % 5 == 4:
            spans += [Span(SpanSource.ENVIRONMENT, tokens(1, 3)), policy()]
        if index == 1:
            spans[1] = Span(SpanSource.POLICY, tokens(1, 1), [-2.0], policy_version=0)
        reward = float(rng.normal())
        rollouts.append(
            Rollout(
                rollout_id=f"rollout{index}",
                group_id=f"group{index // 4}",
                spans=tuple(spans),
                finish_reason=FinishReason.STOP,
                verdict=Verdict(VerdictKind.OK if reward > 0 else VerdictKind.WRONG, reward),
            )
        )
    return rollouts


def with_routes(rollouts: Sequence[Rollout], *, layers: int = 2, num_experts: int = 4, top_k: int = 2) -> list[Rollout]:
    """Return the rollouts with random experts of all tokens but the last. Each third has those of its prompt alone, but
    the first has none."""
    rng = np.random.default_rng(8)
    routed = []
    for index, rollout in enumerate(rollouts):
        count = rollout.num_tokens - 1 if index % 3 else len(rollout.spans[0].token_ids)
        routes = rng.random((count, layers, num_experts)).argsort(-1)[..., :top_k]
        routed.append(dataclasses.replace(rollout, routes=routes if index else None))
    return routed


def lone_worker(models, algorithm, *, device="cpu", seed=0, temperature=1.0, **options):
    """Return a `TrainWorker` that is the only rank of its models."""
    from rlhf_train.learning.worker import TrainWorker

    place = {"rank": 0, "num_ranks": 1, "master": ("127.0.0.1", free_port()), "device": device}
    return TrainWorker(models, algorithm, temperature=temperature, seed=seed, **place, **options)


def shard_of(
    rollouts, size, *, rank=0, num_ranks=1, forward_size=None, num_mini_batches=1, longest=24, tokens=None,
    rewards=None, seed=0, with_routes=False,
):  # fmt: skip
    """Return a rank's rollouts in the order of its plan, and what its worker loads of them: columns and the plan.

    A pass has `size` rollouts, one without gradient `forward_size`, or both as many as `tokens` allow. Rewards are
    those of the verdicts, or the given ones.
    """
    from rlhf_train.batching import plan_batches
    from rlhf_train.learning.columns import RolloutColumns

    lengths = [[rollout.num_tokens for rollout in rollouts], [rollout.num_response_tokens for rollout in rollouts]]
    plan = plan_batches(
        *lengths, num_ranks=num_ranks, num_mini_batches=num_mini_batches, micro_train_batch_size=size,
        micro_rollout_batch_size=forward_size or size, max_response_tokens=longest, seed=seed,
        micro_batch_tokens=tokens,
    )[rank]  # fmt: skip
    rewards = [rollout.verdict.reward for rollout in rollouts] if rewards is None else rewards
    shard = [rollouts[row] for row in plan.rows]
    return shard, RolloutColumns.of(shard, [rewards[row] for row in plan.rows], with_routes=with_routes), plan


def exact_logprobs(model, rollout, temperature=1.0):
    """Return what transformers says of a rollout: log-probs [n, V] before each token of the policy, and these tokens.

    `model` is one of transformers, in float64 where numbers are compared.
    """
    import torch

    tokens = torch.from_numpy(rollout.token_ids.astype(np.int64))
    places = np.flatnonzero(rollout.loss_mask)
    return (model(tokens[None]).logits[0, places - 1] / temperature).log_softmax(-1), tokens[places]


def actor_alone(job: OnlineJob, **changes: Any) -> OnlineJob:
    """Return a job without the other models, on one rank."""
    plan = dataclasses.replace(job.plan, trainers=(ProcessPlan("train", ("actor",), (Place(),)),))
    return dataclasses.replace(job, **{"models": {"actor": job.models["actor"]}, "plan": plan} | changes)


def run_ranks(
    function: Callable[..., Any], num_ranks: int, *arguments: Any, environs: Sequence[Mapping[str, str]] = ()
) -> list[Any]:
    """Call `function(rank, num_ranks, (host, port), *arguments)` in `num_ranks` new processes and return the results.

    They are forks of one that has imported `ranks_preload`. `environs` has additional environment variables of each
    rank, which it has before it imports `function`.

    Raises:
        RuntimeError: a rank raised (the message is its traceback), died, or took longer than RANK_TIMEOUT_S.
    """
    master = ("127.0.0.1", free_port())
    context = forked_context("ranks_preload")
    outbox = context.Queue()
    work = pickle.dumps((function, arguments))  # which the rank imports when it has its environment
    processes = [
        context.Process(
            target=_run_rank,
            args=(outbox, os.environ | (environs[rank] if environs else {}), work, rank, num_ranks, master),
        )
        for rank in range(num_ranks)
    ]
    for process in processes:
        process.start()
    results: dict[int, Any] = {}
    try:
        deadline = time.monotonic() + RANK_TIMEOUT_S
        while len(results) < num_ranks:
            dead = [rank for rank, process in enumerate(processes) if process.exitcode and rank not in results]
            try:
                rank, result, failure = outbox.get(timeout=1.0)
            except queue.Empty:
                if dead:
                    raise RuntimeError(f"ranks {dead} died before they answered; stderr has the reason") from None
                if time.monotonic() > deadline:
                    answered = f"only ranks {sorted(results)} of {num_ranks} answered"
                    raise RuntimeError(f"{answered} within {RANK_TIMEOUT_S:g} s") from None
                continue
            if failure:
                raise RuntimeError(f"rank {rank} failed:\n{failure}")
            results[rank] = result
    finally:
        for process in processes:
            process.join(timeout=5)
            process.kill()
    return [results[rank] for rank in range(num_ranks)]


def _run_rank(
    outbox: Any, environment: Mapping[str, str], work: bytes, rank: int, num_ranks: int, master: tuple[str, int]
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for name in DEEPSPEED_VARIABLES:
        os.environ.pop(name, None)
    try:
        function, arguments = pickle.loads(work)
        outbox.put((rank, function(rank, num_ranks, master, *arguments), None))
    except BaseException:
        outbox.put((rank, None, traceback.format_exc()))


REWARD_FILE = '''"""Rewards vowels: something that a random model does now and then, and can learn to do more."""


def reward_func(queries, prompts, labels):
    responses = [query[len(prompt):] for query, prompt in zip(queries, prompts)]
    shares = [sum(letter in "aeiou" for letter in text) / max(len(text), 1) for text in responses]
    return {"rewards": shares, "scores": shares, "extra_logs": {"length": [len(text) for text in responses]}}
'''


def tiny_job(model_path: str, folder: Path, **changes: Any) -> OnlineJob:
    """Return a PPO job on a tiny model that ends within seconds after its processes have started.

    With a GPU, engine and trainer share it (bfloat16, CUDA IPC, sleeping in turn). Otherwise the job uses float32 and
    shared memory. Everything it writes, including its reward file, is under `folder`.

    Args:
        model_path: from `rlhf_models.testing.tiny_model_dir`.
        folder: exists.
        changes: fields of the job to replace.
    """
    on_gpu = local_gpus() > 0
    dtype = "bfloat16" if on_gpu else "float32"
    reward = folder / "vowels.py"
    reward.write_text(REWARD_FILE, encoding="utf-8")
    optimizer = OptimizerSpec(learning_rate=1e-3, scheduler="constant")
    model = ModelSpec(path=model_path, dtype=dtype, zero_stage=2 if on_gpu else 0)
    trained = dataclasses.replace(model, optimizer=optimizer)
    rng = np.random.default_rng(0)
    prompts = tuple(
        Prompt(f"prompt{index}", rng.integers(100, 200, rng.integers(3, 9)), f"prompt {index}") for index in range(24)
    )
    request = PlacementRequest(ranks={"actor": 1, "critic": 1, "reference": 1}, colocate_all_models=True)
    job = OnlineJob(
        models={"actor": trained, "critic": trained, "reference": model},
        algorithm=make_algorithm(kl_coef=0.01),
        engine=EngineSpec(
            model=model_path,
            dtype=dtype,
            max_model_len=64,
            max_num_seqs=64,
            max_num_batched_tokens=2048,
            gpu_memory_utilization=0.2,
            enforce_eager=True,
            enable_sleep=on_gpu,
            weight_transfer="ipc" if on_gpu else "shared_memory",
        ),
        sampling=SamplingParams(num_samples=4, max_tokens=12, seed=None if on_gpu else 7),
        eval_sampling=SamplingParams(max_tokens=12, temperature=0.0),
        prompts=prompts[:16],
        eval_prompts=prompts[16:],
        reward=RewardSpec(
            sources=(RewardSource(kind="function", targets=(str(reward),)),), calls=CallOptions(timeout_s=60.0)
        ),
        plan=plan_placement(request, [local_gpus()]),
        batch=BatchSizes(
            rollout_batch_size=8,
            n_samples_per_prompt=4,
            train_batch_size=16,
            micro_train_batch_size=8,
            micro_rollout_batch_size=16,
        ),
        num_steps=3,
        save_path=str(folder / "run"),
        trainer_sleep=on_gpu,
        sync_checksum=True,
    )
    return dataclasses.replace(job, **changes)


@contextmanager
def running_engine(job: OnlineJob, num_engines: int = 1) -> Iterator[list[Any]]:
    """Start a cluster and engines of `job` on CPUs, and yield the engines.

    Runs inside the context use as many of these engines as their plan has and start none, because an engine takes
    longer to start than a short run takes. A run's first weight sync gives the engines the weights of that run.
    """
    from rlhf_rollout.ray_actors import RayEngine, RemoteEngine
    from rlhf_train import processes
    from rlhf_train.cluster.ray_session import started_cluster

    with started_cluster(NUM_CLUSTER_CPUS, 0):
        handles = [RemoteEngine.options(num_cpus=1).remote("vllm", job.engine) for _ in range(num_engines)]
        engines = [RayEngine(handle, job.engine) for handle in handles]
        with mock.patch.object(processes, "start_engines", lambda job, reserved, wave, *_: [engines[n] for n in wave]):
            yield engines
