"""The controller of an online run: starts it, moves references and numbers between its processes, and reports."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np

from rlhf_data.errors import EngineError, RewardError, with_hint
from rlhf_data.records import Prompt, RolloutGroup
from rlhf_data.sampler import EpochSampler
from rlhf_models.loading import load_tokenizer
from rlhf_rollout.generator import GenerationCounts, GroupResult, generate_groups
from rlhf_rollout.protocols import SamplingParams
from rlhf_rollout.ray_actors import RayEngine
from rlhf_rollout.rewards import FunctionReward
from rlhf_train.batching import plan_batches
from rlhf_train.group_rewards import relative_rewards
from rlhf_train.metrics import merge_metrics, results
from rlhf_train.online.cluster import WorkerGroup, placed_bundles, ray_cluster, start_processes, wait
from rlhf_train.online.job import OnlineJob, RunSummary
from rlhf_train.online.loop import train
from rlhf_train.online.observer import Observer
from rlhf_train.online.recorder import ARTIFACTS, Recorder, check_save_path
from rlhf_train.online.summaries import Ledger, scored, summarize
from rlhf_train.timeline import Timeline

NUM_SHOWN = 3  # rollouts shown to people before and after
MAX_BARREN_STEPS = 3  # in a row, without enough rewards to learn from, before the run gives up


def run_online(job: OnlineJob, observer: Observer) -> RunSummary:
    """Run `job` from start to final model.

    Raises:
        ConfigError: the job cannot work.
        EngineError, RewardError, WeightSyncError: a part failed for good.
    """
    started = time.perf_counter()
    check_save_path(job.save_path)
    with ExitStack() as stack:
        observer.starting("Ray")
        stack.enter_context(ray_cluster(job.plan, job.ray_address))
        reserved = stack.enter_context(placed_bundles(job.plan))
        observer.starting("engines and trainers")
        engines, workers = start_processes(job, reserved)
        recorder = Recorder(job.save_path, job.config)
        stack.callback(recorder.close)
        run = PlacedRun(job, engines, workers, recorder, observer, started)
        stack.callback(run.close)
        train(run)
        return run.finish()


class PlacedRun:
    """An `OnlineRun` on Ray."""

    def __init__(
        self,
        job: OnlineJob,
        engine_handles: Sequence[Any],
        workers: Sequence[WorkerGroup],
        recorder: Recorder,
        observer: Observer,
        started: float,
    ) -> None:
        self.num_steps = job.num_steps
        self._job = job
        self._engine_handles = list(engine_handles)
        self._engines = [RayEngine(handle) for handle in engine_handles]
        self._workers = list(workers)
        self._group_of = {role: group for group in workers for role in group.roles}
        self._recorder = recorder
        self._observer = observer
        self._started = started
        self._timeline = Timeline()
        self._loop = asyncio.Runner()
        self._reward = FunctionReward(
            job.reward.path,
            timeout_s=job.reward.timeout_s,
            num_workers=job.reward.num_workers,
            log_path=recorder.folder / "reward.log",
        )
        tokenizer = load_tokenizer(job.engine.tokenizer or job.engine.model)
        self._decode = lambda token_ids: tokenizer.decode(token_ids, skip_special_tokens=True)
        self._sampler = EpochSampler(len(job.prompts), job.batch.rollout_batch_size, seed=job.seed)
        self._metrics: dict[str, float] = {}
        self._ledger = Ledger(0, 0, 0, 0)
        self._policy_version = 0
        self._num_barren_steps = 0
        self._engines_asleep = job.engine_sleep and job.plan.shares_gpus
        self._trainers_asleep = False
        self._final = {"time/startup": time.perf_counter() - started}

    # -- the step ------------------------------------------------------------------------------------------------

    def generate(self, step: int) -> Sequence[RolloutGroup]:
        """See `OnlineRun`."""
        self._timeline.take()  # seconds of the first sync belong to no step
        prompts = [self._job.prompts[index] for index in self._sampler.next_batch()]
        outcome, counts = self._generate(prompts, self._job.sampling, f"step{step}")
        groups = _whole(outcome)
        num_scored = len(scored(groups))
        self._ledger = Ledger(
            num_generated=counts.num_requested,
            num_trained=0,
            num_reward_failed=counts.num_generated - num_scored,
            num_engine_failed=counts.num_failed,
        )
        self._recorder.rollouts("rollouts", step, groups)
        self._metrics |= summarize(groups, "rollout")
        self._metrics["samples/retried_groups"] = counts.num_retries
        if not self._job.eval_prompts and step in (1, self.num_steps):
            self._show(f"Samples of step {step}", groups)
        return groups

    def can_learn(self, groups: Sequence[RolloutGroup]) -> bool:
        """See `OnlineRun`. Raises RewardError when it says no for the `MAX_BARREN_STEPS`th time in a row."""
        num_scored = len(scored(groups))
        num_mini_batches = self._job.batch.num_updates // self._job.batch.max_epochs
        if num_scored >= num_mini_batches:
            self._num_barren_steps = 0
            return True
        self._num_barren_steps += 1
        verdicts = [rollout.verdict for group in groups for rollout in group.rollouts if rollout.verdict]
        failed = [verdict.detail for verdict in verdicts if verdict.kind.failed]
        message = f"{num_scored} rollouts have a reward, too few for {num_mini_batches} optimizer steps"
        message += f"; the last failure: {failed[-1]}" if failed else ""
        if self._num_barren_steps >= MAX_BARREN_STEPS:
            message = f"{MAX_BARREN_STEPS} steps in a row: {message}"
            raise RewardError(with_hint(message, "see rollouts.jsonl for the prompts and responses it was given"))
        self._observer.warning(f"nothing is learned from this step: {message}")
        self._ledger = replace(
            self._ledger, num_reward_failed=self._ledger.num_generated - self._ledger.num_engine_failed
        )
        return False

    def make_experience(self, groups: Sequence[RolloutGroup], step: int) -> None:
        """See `OnlineRun`."""
        with self._timeline.phase("experience"):
            self._wake_trainers()
            self._deal(groups, step)
            roles = [role for role in ("actor", "reference", "critic") if role in self._group_of]
            pending = {role: self._group_of[role].start("work", "run_model", role) for role in roles}
            self._add_metrics(part for references in pending.values() for part in wait(references))
            self._move_columns("ref_logprobs", "reference", "actor")
            self._move_columns("values", "critic", "actor")

    def assign_advantages(self) -> None:
        """See `OnlineRun`."""
        with self._timeline.phase("experience"):
            self._add_metrics(self._group_of["actor"].call("work", "assign_advantages"))
            self._move_columns("returns", "actor", "critic")

    def update(self, step: int) -> None:
        """See `OnlineRun`. Models in one process group take turns; models apart train side by side."""
        roles = [role for role in ("critic", "actor") if role in self._group_of]
        options = {"max_epochs": self._job.batch.max_epochs, "seed": self._job.seed + step}
        with self._timeline.phase("train"):
            pending = [self._group_of[role].start("work", "update", role, **options) for role in roles]
            self._add_metrics(part for references in pending for part in wait(references))
        # Counted by the ranks as they train, so that a rollout lost on the way to them does not go unnoticed.
        num_passes = self._metrics.pop("policy/rollout_passes")
        self._policy_version += self._job.batch.num_updates
        self._ledger = replace(self._ledger, num_trained=num_passes / self._job.batch.max_epochs)

    def sync_weights(self) -> None:
        """See `OnlineRun`."""
        actor = self._group_of["actor"]
        with self._timeline.phase("sync"):
            self._sleep_trainers()
            self._wake_engines()
            targets = self._sync_targets(len(actor.handles))
            reports = wait(actor.start_each("send_weights", [(engines, self._policy_version) for engines in targets]))
        self._metrics["sync/size_bytes"] = max(report.get("size_bytes", 0.0) for report in reports)

    def evaluate(self, step: int) -> None:
        """See `OnlineRun`: at the start, at the end, and every `eval_steps` in between."""
        job = self._job
        due = step in (0, job.num_steps) or (job.eval_steps and step % job.eval_steps == 0)
        if not job.eval_prompts or not due:
            return
        started = time.perf_counter()
        # With the same seeds each time: what differs between evaluations is the policy, not the draw.
        outcome, _ = self._generate(job.eval_prompts, job.eval_sampling, f"eval{step}", seed_key="eval")
        self._timeline.take()
        groups = _whole(outcome)
        metrics = summarize(groups, "eval") | {"time/evaluate": time.perf_counter() - started}
        self._recorder.metrics(step, metrics)
        self._recorder.rollouts("held-out rollouts", step, groups)
        self._observer.evaluation(step, metrics)
        moment = {0: "before", job.num_steps: "after"}.get(step)
        if moment:
            self._final |= {f"{name}_{moment}": value for name, value in metrics.items() if name.startswith("eval/")}
            self._show(f"Held-out samples {moment} training", groups)

    def record(self, step: int) -> None:
        """See `OnlineRun`."""
        self._ledger.check()
        seconds = self._timeline.take()
        total = sum(seconds.values())
        num_written = self._ledger.num_generated - self._ledger.num_engine_failed
        tokens = self._metrics.get("rollout/response_tokens", 0.0) * num_written
        self._metrics |= {f"time/{name}": value for name, value in seconds.items()} | self._ledger.metrics()
        self._metrics |= {"time/step": total, "throughput/response_tokens": tokens / total if total else 0.0}
        self._recorder.metrics(step, self._metrics)
        self._observer.step(step, self.num_steps, self._metrics)
        self._metrics = {}

    # -- the end -------------------------------------------------------------------------------------------------

    def finish(self) -> RunSummary:
        """Save the final model and say where everything is."""
        self._wake_trainers()
        self._group_of["actor"].call("work", "save", "actor", str(self._recorder.path("final model")))
        peaks = [peak for group in self._workers for peak in group.call("work", "peak_memory_bytes")]
        self._final |= {
            "memory/trainer_peak_bytes": float(max(peaks)),
            "time/total": time.perf_counter() - self._started,
        }
        self._recorder.metrics(self.num_steps, self._final)
        artifacts = {name: path for name, path in ARTIFACTS.items() if self._recorder.path(name).exists()}
        return RunSummary(save_path=str(self._recorder.folder), artifacts=artifacts, metrics=dict(self._final))

    def close(self) -> None:
        """Free what runs in this process; Ray's processes end with their placement group."""
        self._loop.run(self._reward.close())
        self._loop.close()

    # -- parts ---------------------------------------------------------------------------------------------------

    def _generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, prefix: str, seed_key: str | None = None
    ) -> tuple[list[GroupResult], GenerationCounts]:
        counts = GenerationCounts()

        async def collect() -> list[GroupResult]:
            stream = generate_groups(
                prompts,
                self._engines,
                sampling,
                self._reward,
                max_in_flight=self._job.max_in_flight,
                group_id_prefix=prefix,
                decode=self._decode,
                seed_key=seed_key,
                counts=counts,
            )
            return [result async for result in stream]

        with self._timeline.phase("generate"):
            self._sleep_trainers()
            self._wake_engines()
            outcome = self._loop.run(collect())
        # Rewards are given while others generate; only what they take after the last generation is theirs.
        self._timeline.move("generate", "reward", counts.reward_wait_s)
        if failures := [result.failure for result in outcome if result.group is None]:
            text = f"{prefix}: {len(failures)} of {len(outcome)} rollout groups failed in an engine"
            self._observer.warning(f"{text}; the last: {failures[-1]}")
        # Groups come back in the order they finish; a fixed order makes runs with one seed alike.
        return sorted(outcome, key=lambda result: int(result.group_id.rpartition("/")[2])), counts

    def _show(self, title: str, groups: Sequence[RolloutGroup]) -> None:
        self._observer.samples(title, [(group.prompt, group.rollouts[0]) for group in groups[:NUM_SHOWN]])

    def _deal(self, groups: Sequence[RolloutGroup], step: int) -> None:
        rollouts = scored(groups)
        spec, batch = self._job.algorithm, self._job.batch
        earned = np.array([rollout.verdict.reward for rollout in rollouts], np.float64)
        group_ids = [rollout.group_id for rollout in rollouts]
        rewards = relative_rewards(earned, group_ids, spec.row.baseline, divide_by_std=spec.whiten_std).tolist()
        pending: list[Any] = []
        for group in self._workers:
            plans = plan_batches(
                [rollout.num_tokens for rollout in rollouts],
                [rollout.num_response_tokens for rollout in rollouts],
                num_ranks=len(group.handles),
                num_mini_batches=batch.num_rollouts // batch.train_batch_size,
                micro_train_batch_size=batch.micro_train_batch_size,
                micro_rollout_batch_size=batch.micro_rollout_batch_size,
                max_response_tokens=self._job.sampling.max_tokens,
                seed=self._job.seed + step,
            )
            shards = [
                ("load_rollouts", [rollouts[row] for row in plan.rows], [rewards[row] for row in plan.rows], plan)
                for plan in plans
            ]
            pending += group.start_each("work", shards)
        wait(pending)

    def _move_columns(self, name: str, source: str, target: str) -> None:
        """Hand a column from the ranks of one role to those of another; processes that hold both have it already."""
        if source not in self._group_of or target not in self._group_of:
            return
        if self._group_of[source] is self._group_of[target]:
            return
        exported = self._group_of[source].start("work", "export_columns", [name])
        wait(self._group_of[target].start("adopt", *exported))

    def _sync_targets(self, num_ranks: int) -> list[list[Any]]:
        """Which engines each rank sends to: those on its own device by CUDA IPC, else all from rank 0."""
        if self._job.engine.weight_transfer == "ipc":
            bundles = self._job.plan.group_of("actor").bundles
            home = self._job.plan.engines.bundles
            pairs = list(zip(home, self._engine_handles, strict=True))
            return [[engine for bundle, engine in pairs if bundle == own] for own in bundles]
        return [self._engine_handles if rank == 0 else [] for rank in range(num_ranks)]

    def _add_metrics(self, parts: Any) -> None:
        self._metrics |= results(merge_metrics(parts))

    def _await(self, *coroutines: Any) -> None:
        async def gather() -> None:
            await asyncio.gather(*coroutines)

        self._loop.run(gather())

    def _wake_engines(self) -> None:
        if self._engines_asleep:
            self._await(*(engine.wake_up() for engine in self._engines))
            self._engines_asleep = False

    def _wake_trainers(self) -> None:
        """Give the trainers the device."""
        if self._job.engine_sleep and not self._engines_asleep:
            self._await(*(engine.sleep() for engine in self._engines))
            self._engines_asleep = True
        if self._trainers_asleep:
            for group in self._workers:
                group.call("work", "reload")
            self._trainers_asleep = False

    def _sleep_trainers(self) -> None:
        if self._job.trainer_sleep and not self._trainers_asleep:
            for group in self._workers:
                group.call("work", "offload")
            self._trainers_asleep = True


def _whole(outcome: Sequence[GroupResult]) -> list[RolloutGroup]:
    """Return the groups that were generated. Raises EngineError when there is none."""
    groups = [result.group for result in outcome if result.group is not None]
    if not groups:
        raise EngineError(f"every rollout group failed; the last: {outcome[-1].failure}")
    return groups
