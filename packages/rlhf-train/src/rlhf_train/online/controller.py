"""The controller of an online run: starts it, moves references and numbers between its processes, and reports."""

import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from rlhf_data.errors import RewardError
from rlhf_data.records import Prompt, Rollout, RolloutGroup
from rlhf_data.sampler import EpochSampler
from rlhf_rollout.generator import PromptSupply
from rlhf_rollout.protocols import RewardFunction
from rlhf_rollout.ray_actors import RayEngine
from rlhf_train.baselines import relative_rewards
from rlhf_train.batching import plan_batches
from rlhf_train.kl import adapted_kl_coef
from rlhf_train.online.cluster import Processes, placed_bundles, ray_cluster, start_processes, wait
from rlhf_train.online.evaluation import summarize_evaluation
from rlhf_train.online.generation import Generation, make_reward
from rlhf_train.online.job import OnlineJob, RunSummary
from rlhf_train.online.loop import train
from rlhf_train.online.rewards import RewardShaper, is_worth_training
from rlhf_train.online.summaries import scored, summarize
from rlhf_train.run.best_model import BestModel
from rlhf_train.run.ledger import Ledger
from rlhf_train.run.metrics import merge_metrics, results
from rlhf_train.run.observer import Observer
from rlhf_train.run.recorder import ARTIFACTS, Recorder, check_save_path
from rlhf_train.run.timeline import Timeline

NUM_SHOWN = 3  # rollouts shown to people before and after
NAMES = {"actor": "policy", "critic": "value"}  # of roles in metrics
MAX_BARREN_STEPS = 3  # in a row, without enough rewards to learn from, before the run gives up


def run_online(job: OnlineJob, observer: Observer) -> RunSummary:
    """Run `job` from start to final model. Raises ConfigError for a job that cannot work; EngineError, RewardError or
    WeightSyncError when a part failed for good."""
    started = time.perf_counter()
    check_save_path(job.save_path)
    with ExitStack() as stack:
        observer.starting("Ray")
        stack.enter_context(ray_cluster(job.plan, job.ray_address))
        reserved = stack.enter_context(placed_bundles(job.plan))
        observer.starting("engines and trainers")
        processes = start_processes(job, reserved)
        recorder = stack.enter_context(Recorder(job.save_path, job.config, job.trackers, observer))
        reward = make_reward(job, processes.scorers, recorder.folder / "reward.log")
        shaper = RewardShaper(job.reward, max_tokens=job.sampling.max_tokens)
        run = PlacedRun(job, processes, reward, shaper, recorder, observer, started)
        stack.callback(run.close)
        try:
            train(run)
        except RewardError:
            run.save_models()  # the trainers are well: what was learned so far is not lost
            raise
        return run.finish()


class PlacedRun:
    """The steps of a run on Ray; `is_exhausted` says that the prompts have nothing left to teach."""

    def __init__(
        self,
        job: OnlineJob,
        processes: Processes,
        reward: RewardFunction,
        shaper: RewardShaper,
        recorder: Recorder,
        observer: Observer,
        started: float,
    ) -> None:
        self.num_steps = job.num_steps
        self._job = job
        self._workers = processes.workers
        self._group_of = {role: group for group in self._workers for role in group.roles}
        self._recorder = recorder
        self._observer = observer
        self._started = started
        self._timeline = Timeline(on_phase=observer.phase)
        engines = [RayEngine(handle, job.engine) for handle in processes.engines]
        self._generation = Generation(job, engines, reward, self._timeline, observer, self._wake_engines)
        self._shaper = shaper
        self._sampler = EpochSampler(len(job.prompts), job.batch.rollout_batch_size, seed=job.seed)
        self._best = BestModel(job.best_metric, recorder.path("best model")) if job.best_metric else None
        self._metrics: dict[str, float] = {}
        self._ledger = Ledger()
        self._kl_coef = job.algorithm.kl_coef
        self._policy_version = 0
        self._synced_version: int | None = None
        self._num_barren_steps = 0
        self._last_failure = ""  # of a reward, in the step at hand
        self.is_exhausted = False
        self._engines_asleep = job.engine_sleep and job.plan.shares_gpus
        self._trainers_asleep = False
        self._final = {"time/startup": time.perf_counter() - started}

    # -- the step ------------------------------------------------------------------------------------------------

    def generate(self, step: int) -> Sequence[RolloutGroup]:
        """Draw prompts, let the engines answer and the reward score; return the groups that are worth training."""
        job = self._job
        self._timeline.take()  # seconds of the first sync belong to no step
        groups, counts = self._generation.run(self._prompts(), job.sampling, f"step{step}")
        kept = [group for group in groups if self._is_kept(group)]
        dropped = [group for group in groups if not self._is_kept(group)]
        self._metrics["rollout/kept_groups"] = len(kept) / len(groups)
        self._ledger = Ledger(
            num_generated=counts.num_requested,
            num_filtered=len(scored(dropped)),
            num_reward_failed=counts.num_generated - len(scored(groups)),
            num_engine_failed=counts.num_failed,
        )
        verdicts = [rollout.verdict for group in groups for rollout in group.rollouts if rollout.verdict]
        self._last_failure = next((verdict.detail for verdict in reversed(verdicts) if verdict.kind.failed), "")
        self._shaper.observe(scored(groups))
        self._recorder.rollouts("rollouts", step, kept, kept=True)
        self._recorder.rollouts("rollouts", step, dropped, kept=False)
        self._metrics |= summarize(groups, "rollout")
        self._metrics |= {"samples/retried_groups": counts.num_retries, "samples/tokens": counts.num_response_tokens}
        if not job.eval_prompts and step in (1, self.num_steps):
            self._show(f"Samples of step {step}", groups)
        return kept

    def _prompts(self) -> Iterable[Prompt]:
        """Return a step's prompts; with dynamic sampling, as many as it takes."""
        job, dynamic, size = self._job, self._job.dynamic_sampling, self._job.batch.rollout_batch_size
        if dynamic is None:
            return [job.prompts[index] for index in self._sampler.next_batch()]
        limits = {"target": size, "max_drawn": size * dynamic.max_batches}
        return PromptSupply(lambda: job.prompts[self._sampler.take(1)[0]], keep=self._is_kept, **limits)

    def _is_kept(self, group: RolloutGroup) -> bool:
        dynamic = self._job.dynamic_sampling
        return dynamic is None or is_worth_training(group, dynamic)

    def can_learn(self, groups: Sequence[RolloutGroup]) -> bool:
        """Say whether enough rollouts have a reward for an update.

        When it says no for the `MAX_BARREN_STEPS`th time in a row, the run ends: well, when dynamic sampling finds
        nothing more to learn from, else by a RewardError.
        """
        wanted, filtered = self._job.batch.rollout_batch_size, self._ledger.num_filtered
        if scored(groups):
            if len(groups) < wanted and filtered:
                self._observer.warning(f"only {len(groups)} of {wanted} rollout groups are worth training")
            self._num_barren_steps = 0
            return True
        self._num_barren_steps += 1
        message = "no rollout has a reward that could be learned from"
        if self._last_failure:
            message += f"; the last failure: {self._last_failure}"
        give_up = self._num_barren_steps >= MAX_BARREN_STEPS
        if filtered > self._ledger.num_reward_failed:
            message = f"all {filtered} scored rollouts are of groups whose samples fare alike"
            self.is_exhausted = give_up
        elif give_up:
            message = f"{MAX_BARREN_STEPS} steps in a row: {message}"
            raise RewardError(message, hint="see rollouts.jsonl for the prompts and responses it was given")
        end = "the run ends here" if self.is_exhausted else "nothing is learned from this step"
        self._observer.warning(f"{end}: {message}")
        return False

    def make_experience(self, groups: Sequence[RolloutGroup], step: int) -> None:
        """Deal rollouts to ranks; fill in old and reference log-probs and values."""
        with self._timeline.phase("experience"):
            self._wake_trainers()
            self._deal(groups, step)
            wanted = ["actor"] if self._job.algorithm.old_logprobs == "recompute" else []
            roles = [role for role in (*wanted, "reference", "critic") if role in self._group_of]
            pending = {role: self._group_of[role].start("work", "run_model", role) for role in roles}
            self._add_metrics(part for references in pending.values() for part in wait(references))
            self._move_columns(["ref_logprobs"], "reference", "actor")
            last_values = ["last_values"] if self._job.algorithm.bootstrap_truncated else []
            self._move_columns(["values", *last_values], "critic", "actor")

    def assign_advantages(self) -> None:
        """Turn rewards into advantages and returns."""
        with self._timeline.phase("experience"):
            self._add_metrics(self._group_of["actor"].call("work", "assign_advantages", self._kl_coef))
            self._move_columns(["returns", "trained"], "actor", "critic")

    def update(self, step: int) -> None:
        """Optimise the critic and, unless it is still frozen, the actor; models in processes apart train at once."""
        job = self._job
        roles = [role for role in ("critic", "actor") if role in self._group_of]
        if step <= job.num_frozen_steps:
            roles.remove("actor")
        options = {"max_epochs": job.batch.max_epochs, "seed": job.seed + step, "kl_coef": self._kl_coef}
        with self._timeline.phase("train"):
            pending = [self._group_of[role].start("work", "update", role, **options) for role in roles]
            self._add_metrics(part for references in pending for part in wait(references))
        # Counted by the ranks as they train, so that a rollout lost on the way to them does not go unnoticed.
        passes = [self._metrics.pop(f"{NAMES[role]}/rollout_passes") for role in roles]
        num_trained = min(passes) / job.batch.max_epochs
        self._ledger = replace(self._ledger, num_trained=num_trained)
        if job.algorithm.uses_reference:
            self._metrics["kl/coef"] = self._kl_coef
        if "actor" in roles:
            self._policy_version += job.batch.num_mini_batches(num_trained) * job.batch.max_epochs
            self._adapt_kl(int(num_trained))

    def _adapt_kl(self, num_rollouts: int) -> None:
        """Settle the coefficient of the next step by the KL of this one, before which the policy did learn."""
        spec, kl = self._job.algorithm, self._metrics.get("kl/reference")
        if spec.kl_target is not None and kl is not None:
            rule = {"target": spec.kl_target, "horizon": spec.kl_horizon}
            self._kl_coef = adapted_kl_coef(self._kl_coef, kl, num_rollouts=num_rollouts, **rule)

    def sync_weights(self) -> None:
        """Bring the actor's weights into the engines, unless they have them."""
        if self._synced_version == self._policy_version:
            return
        actor = self._group_of["actor"]
        with self._timeline.phase("sync"):
            self._wake_engines()
            targets = self._sync_targets(len(actor.handles))
            sizes = wait(actor.start_each("send_weights", [(engines, self._policy_version) for engines in targets]))
        self._synced_version = self._policy_version
        self._metrics["sync/size_bytes"] = max(sizes)

    def evaluate(self, step: int) -> None:
        """Answer the held-out prompts: at the start, at the end, and every `eval_steps` in between."""
        job = self._job
        is_last = step == job.num_steps or self.is_exhausted
        due = step == 0 or is_last or (job.eval_steps and step % job.eval_steps == 0)
        if not job.eval_prompts or not due:
            return
        started = time.perf_counter()
        # With the same seeds each time: what differs between evaluations is the policy, not the draw.
        groups, _ = self._generation.run(job.eval_prompts, job.eval_sampling, f"eval{step}", seed_key="eval")
        self._timeline.take()
        metrics = summarize_evaluation(groups) | {"time/evaluate": time.perf_counter() - started}
        self._recorder.metrics(step, metrics)
        self._recorder.rollouts("held-out rollouts", step, groups)
        self._observer.evaluation(step, metrics)
        if self._best is not None and self._best.metric not in metrics:
            self._observer.warning(f"this evaluation has no {self._best.metric}, by which the best model is chosen")
        elif self._best is not None and self._best.beaten_by(metrics):
            self._group_of["actor"].call("work", "save", "actor", str(self._best.staging))
            state = {"policy_version": self._policy_version, "kl_coef": self._kl_coef}
            self._best.keep(step, metrics, state)
        moment = "after" if is_last else "before" if step == 0 else None
        if moment:
            self._final |= {f"{name}_{moment}": value for name, value in metrics.items() if name.startswith("eval/")}
            self._show(f"Held-out samples {moment} training", groups)

    def record(self, step: int) -> None:
        """Check that no rollout was lost, and report the step."""
        self._ledger.check()
        seconds = self._timeline.take()
        total = seconds["step"]
        tokens = self._metrics.pop("samples/tokens", 0.0)
        self._metrics |= {f"time/{name}": value for name, value in seconds.items()} | self._ledger.metrics()
        self._metrics["throughput/response_tokens"] = tokens / total if total else 0.0
        self._recorder.step(step, self._metrics)
        self._observer.step(step, self.num_steps, self._metrics)
        self._metrics = {}

    # -- the end -------------------------------------------------------------------------------------------------

    def save_models(self) -> None:
        """Write the actor and, if the job says so, its average and the critic."""
        self._wake_trainers()
        self._group_of["actor"].call("work", "save", "actor", str(self._recorder.path("final model")))
        if self._job.ema_beta is not None:
            self._group_of["actor"].call("work", "save_average", str(self._recorder.path("averaged model")))
        if self._job.save_critic:
            self._group_of["critic"].call("work", "save", "critic", str(self._recorder.path("critic")))

    def finish(self) -> RunSummary:
        """Save the final model and say where everything is."""
        self.save_models()
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
        self._generation.close()

    # -- parts ---------------------------------------------------------------------------------------------------

    def _show(self, title: str, groups: Sequence[RolloutGroup]) -> None:
        self._observer.samples(title, [(group.prompt, group.rollouts[0]) for group in groups[:NUM_SHOWN]])

    def _deal(self, groups: Sequence[RolloutGroup], step: int) -> None:
        rollouts, batch = scored(groups), self._job.batch
        rewards = self._rewards(rollouts)
        pending: list[Any] = []
        for group in self._workers:
            plans = plan_batches(
                [rollout.num_tokens for rollout in rollouts],
                [rollout.num_response_tokens for rollout in rollouts],
                num_ranks=len(group.handles),
                num_mini_batches=batch.num_mini_batches(len(rollouts)),
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

    def _rewards(self, rollouts: Sequence[Rollout]) -> list[float]:
        """Return what each rollout earned, as the algorithm compares it."""
        spec = self._job.algorithm
        earned, metrics = self._shaper.shape(rollouts)
        self._metrics |= metrics
        group_ids = [rollout.group_id for rollout in rollouts]
        return relative_rewards(earned, group_ids, spec.row.baseline, divide_by_std=spec.whiten_std).tolist()

    def _move_columns(self, names: Sequence[str], source: str, target: str) -> None:
        """Hand columns from the ranks of one role to those of another; processes that hold both have it already."""
        if source not in self._group_of or target not in self._group_of:
            return
        if self._group_of[source] is self._group_of[target]:
            return
        exported = self._group_of[source].start("work", "export_columns", list(names))
        wait(self._group_of[target].start("work", "adopt_columns", *exported))

    def _sync_targets(self, num_ranks: int) -> list[list[RayEngine]]:
        """Which engines each rank sends to: those on its own device by CUDA IPC, else all from rank 0."""
        if self._job.engine.weight_transfer == "ipc":
            pairs = list(zip(self._job.plan.engines.bundles, self._generation.engines, strict=True))
            homes = self._job.plan.group_of("actor").bundles
            return [[engine for bundle, engine in pairs if bundle == own] for own in homes]
        return [self._generation.engines if rank == 0 else [] for rank in range(num_ranks)]

    def _add_metrics(self, parts: Any) -> None:
        self._metrics |= results(merge_metrics(parts))

    def _wake_engines(self) -> None:
        """Give the engines the device."""
        if self._job.trainer_sleep and not self._trainers_asleep:
            for group in self._workers:
                group.call("work", "offload")
            self._trainers_asleep = True
        if self._engines_asleep:
            self._generation.await_all(engine.wake_up() for engine in self._generation.engines)
            self._engines_asleep = False

    def _wake_trainers(self) -> None:
        """Give the trainers the device."""
        if self._job.engine_sleep and not self._engines_asleep:
            self._generation.await_all(engine.sleep() for engine in self._generation.engines)
            self._engines_asleep = True
        if self._trainers_asleep:
            for group in self._workers:
                group.call("work", "reload")
            self._trainers_asleep = False
