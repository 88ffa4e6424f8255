"""The training side: distributes a batch over the rank sets and calls them in the order of the algorithm."""

import asyncio
import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from threading import Lock
from typing import Any

from rlhf_data.errors import EngineError
from rlhf_data.records import Rollout
from rlhf_train.algorithms.entropy import adapted_entropy_coef, bonus_weight
from rlhf_train.algorithms.kl import adapted_kl_coef
from rlhf_train.batching import RankPlan, pass_fill, plan_rollouts
from rlhf_train.cluster.ray_session import wait
from rlhf_train.costs import PassCosts
from rlhf_train.generation.baseline import subtract_baseline
from rlhf_train.generation.scoring import RewardShaper
from rlhf_train.generation.summaries import metric_part
from rlhf_train.learning.columns import RolloutColumns
from rlhf_train.learning.experience import columns_of
from rlhf_train.learning.forwards import BlockForwards
from rlhf_train.learning.learning_spec import LearningSpec, is_teacher
from rlhf_train.learning.rank_actor import RankActor
from rlhf_train.learning.ranks import RankSet
from rlhf_train.learning.worker import TrainWorker
from rlhf_train.run.metrics import METRIC_PREFIXES, Metric, merge_metrics, results
from rlhf_train.tracing.token_values import TokenValues
from rlhf_train.tracing.trace import Trace, Track

# Steps whose first weights' version is kept. More than `max_staleness`, which a replay may set to another number.
_KEPT_VERSIONS = 128


class Learner:
    """Distributes a batch over the ranks, has them compute columns and advantages, and has them update the models.

    It holds no tensors. Ranks keep them; this class passes rollouts, references to Ray objects, and metrics.

    Args:
        job: the run.
        rank_sets: the training processes; each role is in exactly one set.
        costs: of each role's model, by which ranks get equal work. Without them they get equal numbers of tokens.

    Attributes:
        policy_version: number of updates applied to the actor's weights.
        kl_coef: weight of the KL to the reference in the next step.
        entropy_coef: weight of the entropy bonus, if the entropy is below its target.
        forwards: runs the models on complete groups while others generate; None if that waits for all groups.
        weights_bytes: size of the weights that were sent last; 0 before.
        flops: operations of the models' passes since the last step, by "generate", "experience" and "train", for
            `flops_utilization`; empty if costs are not known.
    """

    def __init__(
        self, job: LearningSpec, rank_sets: Sequence[RankSet], costs: Mapping[str, PassCosts] | None = None
    ) -> None:
        self._job = job
        self._costs = costs
        self._sets = list(rank_sets)
        # Neighbouring ranks that have the same rollouts, and divide their tokens or the weights.
        self._ranks_per_batch = job.models["actor"].ranks_per_batch
        self._set_of = {role: ranks for ranks in rank_sets for role in ranks.roles}
        self.forwards = BlockForwards(job, rank_sets) if job.early_forwards else None
        self._loading: list[Any] = []  # references to what blocks of `forwards` may delay
        self._shaper = RewardShaper(job.reward, max_tokens=job.sampling.max_tokens)
        self._kl: float | None = None  # nats per token, of the current batch
        self.policy_version = 0
        self.weights_bytes = 0
        self.flops: Counter[str] = Counter()
        self._parts: Mapping[str, Collection[int]] = {}  # see `plan_batches`; of the batch
        self._sizes: list[tuple[int, int]] = []  # tokens, and those of the response, of each rollout of the batch
        self._weights = Lock()  # held while the actor's weights change, and while engines get them
        self._sends: set[asyncio.Future[Mapping[int, str]]] = set()  # of weights, under way
        # Of the weights at the start of the last steps. A token older than all of them counts as old as the first.
        self._step_versions = deque([0], maxlen=max(_KEPT_VERSIONS, (job.algorithm.mask_stale or 0) + 2))
        self.kl_coef = job.algorithm.kl_coef
        self.entropy_coef = job.algorithm.objective.entropy_coef
        self._entropy = math.inf  # nats per token, of the policy before the updates of the current batch

    # -- the algorithm -------------------------------------------------------------------------------------------

    def observe(self, rollouts: Sequence[Rollout]) -> None:
        """Update the reward normalization with the raw rewards of a step, trained or not."""
        self._shaper.observe(rollouts)
        self._sizes = [(rollout.num_tokens, rollout.num_response_tokens) for rollout in rollouts]
        self._count("generate", ["actor"])

    def skip(self) -> None:
        """Let go of a step from which nothing is learned."""
        if self.forwards is not None:
            self.forwards.skip()

    def deal(
        self,
        rollouts: Sequence[Rollout],
        step: int,
        episode_ids: Sequence[str] | None = None,
        sources: Mapping[str, str] | None = None,
    ) -> dict[str, float]:
        """Shape the rewards of `rollouts`, which all have one, and send each rank of each set its rollouts.

        See `algorithms.group` for `episode_ids`. `sources` are the data sources by group id, which several teachers
        need. Returns metrics of the shaping. Raises ConfigError for a source without a teacher.
        """
        batch = self._job.batch
        self._kl = None
        self._sizes = [(rollout.num_tokens, rollout.num_response_tokens) for rollout in rollouts]
        if self.policy_version > self._step_versions[-1]:
            self._step_versions.append(self.policy_version)
        shaped, metrics = self._shaper.shape(rollouts)
        self._parts = self._job.parts_of_teachers(rollouts, sources)
        names = [metric_part(sources[rollout.group_id]) for rollout in rollouts if self._parts and sources]
        relative = subtract_baseline(rollouts, shaped, self._job.algorithm, self._job.reward, episode_ids)
        if self.forwards is not None:
            self.forwards.want(rollouts, sources)
        pending: list[Any] = []
        replays = self._job.models["actor"].routing_replay
        if replays:
            metrics["routing/replayed"] = _replayed_share(rollouts)
        for ranks in self._sets:
            # Rank sets of different sizes split the batch differently. The seed is the same, so that they agree on
            # which rollouts form a mini-batch.
            plans = plan_rollouts(
                rollouts,
                batch,
                num_ranks=len(ranks.handles) // self._ranks_per_batch,
                num_mini_batches=batch.num_mini_batches(len(rollouts)),
                max_response_tokens=self._job.sampling.max_tokens,
                seed=self._job.seed + step,
                costs=self._work(ranks.roles, rollouts),
                parts=self._parts,
                shares_prompts=self._job.models["actor"].share_prompts,
            )
            if "actor" in ranks.roles:
                metrics |= self._fill(plans, rollouts)
            if self.forwards is not None:
                # Log-probs of blocks, which knew nothing of the other rollouts, shall be comparable.
                most = batch.most_pass_tokens(self._job.sampling.max_tokens)
                plans = tuple(replace(plan, max_pass_tokens=most) for plan in plans)
            calls = []
            for plan in plans:
                columns = RolloutColumns.of(
                    [rollouts[row] for row in plan.rows],
                    [relative.rewards[row] for row in plan.rows],
                    [relative.earned[row] for row in plan.rows],
                    with_routes=replays and "actor" in ranks.roles,
                    sources=[names[row] for row in plan.rows if names],
                )
                calls += [(columns, plan, tuple(self._step_versions))] * self._ranks_per_batch
            pending += ranks.start_each(TrainWorker.load_rollouts, calls)
        if self.forwards is None:
            wait(pending)
        else:
            self._loading = pending  # behind blocks that still run, whose time is not that of loading
        return metrics

    def fill_columns(self) -> dict[str, float]:
        """Run the models that the algorithm needs: log-probs of actor, reference and teacher, and the critic's values.

        Returns metrics.
        """
        algorithm = self._job.algorithm
        wanted = ["actor"] if algorithm.runs_actor else []
        wanted += ["reference", *filter(is_teacher, self._set_of), "critic"]
        roles = [role for role in wanted if role in self._set_of]
        self._count("experience", roles)
        if self.forwards is not None:
            metrics = self.forwards.fill_columns()
            wait(self._loading)
            self._entropy = metrics.get("policy/entropy", math.inf)
            return metrics
        # Start all before waiting for any, so that models in separate processes run at the same time.
        pending = {role: self._set_of[role].start(TrainWorker.run_model, role) for role in roles}
        metrics = _merged(part for references in pending.values() for part in wait(references))
        self._entropy = metrics.get("policy/entropy", math.inf)
        for role in ("reference", "teacher", "critic"):
            self._move_columns(list(columns_of(role, algorithm)), role, "actor")
        return metrics

    def assign_advantages(self) -> dict[str, float]:
        """Compute advantages and returns on the actor's ranks; return metrics."""
        metrics = _merged(self._set_of["actor"].call(TrainWorker.assign_advantages, self.kl_coef))
        if self._job.asynchronous is None:
            metrics = {name: value for name, value in metrics.items() if not name.startswith("async/")}
        self._kl = metrics.get("kl/reference")
        self._move_columns(["returns", "trained"], "actor", "critic")
        return metrics

    def update(self, step: int) -> tuple[dict[str, float], float]:
        """Update the critic and, after the frozen steps, the draft model and the actor.

        Models in separate processes train in parallel, unless one at a time has its optimizer states on the device.

        Returns:
            Metrics, and the number of rollouts that were trained. The ranks count them during training, so that the
            number reveals rollouts that were lost on the way. It is a fraction when only some epochs missed rollouts.
        """
        job = self._job
        roles = [role for role in ("critic", "draft", "actor") if role in self._set_of]
        if step <= job.num_frozen_steps:
            # Without a new policy no weights are sent, and engines would not have those of the draft model.
            roles = ["critic"]
        target = job.algorithm.entropy.target
        bonus = self.entropy_coef if target is None else bonus_weight(self.entropy_coef, self._entropy, target=target)
        # A backward pass costs as much as two forward passes.
        self._count("train", roles, passes=3 * job.batch.max_epochs)
        with self._weights:
            pending = []
            for role in roles:
                started = self._set_of[role].start(
                    TrainWorker.update,
                    role,
                    max_epochs=job.batch.max_epochs,
                    seed=job.seed + step,
                    kl_coef=self.kl_coef,
                    entropy_coef=bonus,
                )
                pending.append(started)
                if job.trainer_sleep:
                    wait(started)
            metrics = _merged(part for references in pending for part in wait(references))
            passes = [metrics.pop(f"{METRIC_PREFIXES[role]}/rollout_passes") for role in roles]
            # A rollout counts as trained only if every model trained on it.
            num_trained = min(passes) / job.batch.max_epochs
            if job.algorithm.uses_reference:
                metrics["kl/coef"] = self.kl_coef
            if "actor" in roles:
                self.policy_version += job.batch.num_mini_batches(num_trained) * job.batch.max_epochs
                self._adapt_kl(metrics.get("kl/reference", self._kl), int(num_trained))
            if "actor" in roles and target is not None:
                metrics["entropy/coef"] = bonus
                rule = {"target": target, "step": job.algorithm.entropy.coef_step}
                self.entropy_coef = adapted_entropy_coef(self.entropy_coef, self._entropy, **rule)
        return metrics, num_trained

    def token_values(self) -> list[TokenValues]:
        """Return what the actor's ranks have computed for the tokens of the step's rollouts."""
        return wait(self._set_of["actor"].start(TrainWorker.token_values)[:: self._ranks_per_batch])

    def _fill(self, plans: Sequence[RankPlan], rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Return how full the actor's packed passes are, where `micro_batch_tokens` would fill them."""
        actor, batch = self._job.models["actor"], self._job.batch
        if not actor.packing or actor.share_prompts or batch.micro_batch_tokens:
            return {}
        fill = pass_fill(plans, [rollout.num_tokens for rollout in rollouts], self._job.pack_tokens)
        return {} if fill is None else {"throughput/pass_fill": fill}

    def _work(self, roles: Sequence[str], rollouts: Sequence[Rollout]) -> list[int] | None:
        """Return what each rollout costs on ranks with these models, in operations; None if costs are not known."""
        if self._costs is None:
            return None
        # A backward pass costs as much as two forward passes.
        work = [0] * len(rollouts)
        for role in roles:
            costs, times = self._costs[role], 3 if self._job.models[role].optimizer else 1
            for row in self._parts.get(role, range(len(rollouts))):
                work[row] += times * costs.of(rollouts[row].num_tokens, rollouts[row].num_response_tokens)
        return work

    def _count(self, name: str, roles: Sequence[str], passes: int = 1) -> None:
        """Count the operations of passes of models over all rollouts of the batch."""
        for role in roles if self._costs else ():
            sizes = [self._sizes[row] for row in self._parts.get(role, range(len(self._sizes)))]
            self.flops[name] += passes * sum(self._costs[role].of(tokens, targets) for tokens, targets in sizes)

    def _adapt_kl(self, kl: float | None, num_rollouts: int) -> None:
        """Adapt the KL coefficient of the next step to this step's KL, which was measured before its updates."""
        spec = self._job.algorithm
        if spec.kl_target is not None and kl is not None:
            rule = {"target": spec.kl_target, "horizon": spec.kl_horizon}
            self.kl_coef = adapted_kl_coef(self.kl_coef, kl, num_rollouts=num_rollouts, **rule)

    def _move_columns(self, names: Sequence[str], source: str, target: str) -> None:
        """Copy columns from the ranks of role `source` to those of role `target`.

        Nothing is copied when a role is absent, or when one rank set holds both roles and so shares the columns.
        """
        if source not in self._set_of or target not in self._set_of:
            return
        if self._set_of[source] is self._set_of[target]:
            return
        exported = self._set_of[source].start(TrainWorker.export_columns, list(names))[:: self._ranks_per_batch]
        wait(self._set_of[target].start(TrainWorker.adopt_columns, *exported))

    # -- state ---------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return this object's own part of a checkpoint; `save_state` writes the models."""
        return {
            "policy_version": self.policy_version,
            "step_versions": list(self._step_versions),
            "kl_coef": self.kl_coef,
            "entropy_coef": self.entropy_coef,
            "reward": self._shaper.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where another process was between two steps; `load_state` reads the models."""
        self.policy_version = state["policy_version"]
        self._step_versions.clear()
        self._step_versions.extend(state["step_versions"])
        self.kl_coef = state["kl_coef"]
        self.entropy_coef = state.get("entropy_coef", self.entropy_coef)  # older checkpoints have none
        self._shaper.restore(state["reward"])

    def save_state(self, folder: str) -> list[str]:
        """Have all ranks copy their models to host memory and write them to `folder` while the run goes on.

        Returns the names of the files, which are complete when each has a receipt; see `run.checkpoint`.
        """
        return [name for names in self._call_all(TrainWorker.save_state, folder) for name in names]

    def finish_state(self) -> None:
        """Wait until no rank writes files of `save_state` any more."""
        self._call_all(TrainWorker.finish_state)

    def load_state(self, folder: str) -> None:
        """Have all ranks continue with the models in `folder`."""
        self._call_all(TrainWorker.load_state, folder)

    # -- weights and memory --------------------------------------------------------------------------------------

    async def send_weights(self, engines: Mapping[int, Any]) -> Mapping[int, str]:
        """Send the actor's weights to `engines`, by their number in the plan; return why engines failed, by number.

        All actor ranks take part, because ZeRO-3 and tensor groups have to gather the weights. An update of the weights
        that is under way comes first. Use it from one event loop.
        """
        sending = asyncio.ensure_future(asyncio.to_thread(self._send_weights, engines))
        self._sends.add(sending)
        sending.add_done_callback(self._sends.discard)
        return await asyncio.shield(sending)  # to cancel it would not end the thread

    async def weights_sent(self) -> None:
        """Wait until no call of `send_weights` is under way, not even one that was cancelled."""
        while self._sends:
            await asyncio.wait(self._sends)

    def _send_weights(self, engines: Mapping[int, Any]) -> Mapping[int, str]:
        actor = self._set_of["actor"]
        targets = self._targets(engines, len(actor.handles))
        with self._weights:
            reports = wait(actor.start_each(RankActor.send_weights, [(mine, self.policy_version) for mine in targets]))
        failures = {number: reason for _, failed in reports for number, reason in failed.items()}
        if len(failures) < len(engines):  # else less than all weights were handed over
            self.weights_bytes = max(size for size, _ in reports)
        return failures

    def _targets(self, engines: Mapping[int, Any], num_ranks: int) -> list[dict[int, Any]]:
        """Return the engines that each rank sends to.

        CUDA IPC works within one GPU, so each rank serves the engines on its own, and an engine on several GPUs is
        served by the ranks of all of them. Otherwise rank 0 serves all engines.
        """
        if self._job.engine.weight_transfer != "ipc":
            return [dict(engines) if rank == 0 else {} for rank in range(num_ranks)]
        places = self._job.plan.engines.places
        targets = []
        for card in self._job.plan.trainers_of("actor").cards:
            targets.append({number: engine for number, engine in engines.items() if card in places[number].cards})
        return targets

    def save(self, role: str, path: str) -> None:
        """Write the model of `role` as a Hugging Face folder."""
        self._set_of[role].call(TrainWorker.save, role, path)

    def save_average(self, path: str) -> None:
        """Write the moving average of the actor's weights as a Hugging Face folder."""
        self._set_of["actor"].call(TrainWorker.save_average, path)

    def sleep(self) -> None:
        """Move optimizer states to host memory, so that the engines can use the device."""
        self._call_all(TrainWorker.offload)

    def release_cache(self) -> None:
        """Give the engines what PyTorch's allocator keeps of the device for later passes."""
        self._call_all(TrainWorker.release_cache)

    def wake_up(self) -> None:
        """Move optimizer states back to the device."""
        self._call_all(TrainWorker.reload)

    def live_roles(self) -> set[str]:
        """Return the roles whose ranks all answer within `control_timeout_s`, after what they are doing."""
        limit = {"timeout_s": self._job.engine.control_timeout_s, "what": "the trainers' last work"}
        live: set[str] = set()
        for ranks in self._sets:
            try:
                wait(ranks.start(TrainWorker.peak_memory_bytes), **limit)
            except EngineError:
                continue
            live.update(ranks.roles)
        return live

    def peak_memory_bytes(self) -> int:
        """Return the peak of allocated device memory in bytes, the largest over all ranks."""
        return max((peak for ranks in self._sets for peak in ranks.call(TrainWorker.peak_memory_bytes)), default=0)

    def show_in(self, trace: Trace) -> None:
        """Show in the file of the timeline what the ranks have done since the last call."""
        if not trace.is_on:
            return
        for ranks in self._sets:
            asked_s = trace.now()
            for rank, work in enumerate(ranks.call(RankActor.take_work)):
                trace.work(Track(f"{', '.join(ranks.roles)}: rank {rank}", "calls"), work, asked_s)

    def _call_all(self, method: Callable[..., Any], *args: Any) -> list[Any]:
        return wait([reference for ranks in self._sets for reference in ranks.start(method, *args)])


def _merged(parts: Iterable[Mapping[str, Metric]]) -> dict[str, float]:
    return results(merge_metrics(parts))


def _replayed_share(rollouts: Sequence[Rollout]) -> float:
    """Return the share of tokens whose experts the engine told, without last tokens, which predict nothing."""
    counts = [rollout.num_tokens - 1 for rollout in rollouts]
    replayed = sum(min(rollout.num_routed, count) for rollout, count in zip(rollouts, counts, strict=True))
    return replayed / max(sum(counts), 1)
