"""The training side: rank sets, what is dealt to them, and what goes between them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rlhf_data.records import Rollout
from rlhf_train.baselines import relative_rewards
from rlhf_train.batching import plan_batches
from rlhf_train.kl import adapted_kl_coef
from rlhf_train.online.job import OnlineJob
from rlhf_train.online.ranks import RankSet
from rlhf_train.online.ray_session import wait
from rlhf_train.online.rewards import RewardShaper
from rlhf_train.run.metrics import Metric, merge_metrics, results

METRIC_PREFIXES = {"actor": "policy", "critic": "value"}


class Learner:
    """Deals a batch to the ranks, has columns and advantages made, and updates the models.

    Every method that computes returns metrics by name.

    Args:
        job: the run.
        rank_sets: the processes; every role is in exactly one set.

    Attributes:
        policy_version: updates behind the actor's weights.
        kl_coef: weight of the KL to the reference in the next step.
    """

    def __init__(self, job: OnlineJob, rank_sets: Sequence[RankSet]) -> None:
        self._job = job
        self._sets = list(rank_sets)
        self._set_of = {role: ranks for ranks in rank_sets for role in ranks.roles}
        self._shaper = RewardShaper(job.reward, max_tokens=job.sampling.max_tokens)
        self._kl: float | None = None  # nats per token, of the batch at hand
        self.policy_version = 0
        self.kl_coef = job.algorithm.kl_coef

    # -- the algorithm -------------------------------------------------------------------------------------------

    def observe(self, rollouts: Sequence[Rollout]) -> None:
        """Take the raw rewards of a step into account, those of rollouts that are not trained, too."""
        self._shaper.observe(rollouts)

    def deal(self, rollouts: Sequence[Rollout], step: int) -> dict[str, float]:
        """Shape the rewards of rollouts that have one, and deal the rollouts to the ranks of every set."""
        batch = self._job.batch
        self._kl = None
        rewards, metrics = self._rewards(rollouts)
        pending: list[Any] = []
        for ranks in self._sets:
            plans = plan_batches(
                [rollout.num_tokens for rollout in rollouts],
                [rollout.num_response_tokens for rollout in rollouts],
                num_ranks=len(ranks.handles),
                num_mini_batches=batch.num_mini_batches(len(rollouts)),
                micro_train_batch_size=batch.micro_train_batch_size,
                micro_rollout_batch_size=batch.micro_rollout_batch_size,
                max_response_tokens=self._job.sampling.max_tokens,
                seed=self._job.seed + step,
            )
            shards = [
                (
                    "load_rollouts",
                    [rollouts[row] for row in plan.rows],
                    [rewards[row] for row in plan.rows],
                    plan,
                    self.policy_version,
                )
                for plan in plans
            ]
            pending += ranks.start_each("work", shards)
        wait(pending)
        return metrics

    def fill_columns(self) -> dict[str, float]:
        """Have the models run that the algorithm needs: old and reference log-probs, and values."""
        algorithm = self._job.algorithm
        wanted = ["actor"] if algorithm.old_logprobs == "recompute" else []
        roles = [role for role in (*wanted, "reference", "critic") if role in self._set_of]
        pending = {role: self._set_of[role].start("work", "run_model", role) for role in roles}
        metrics = _merged(part for references in pending.values() for part in wait(references))
        self._move_columns(["ref_logprobs"], "reference", "actor")
        last_values = ["last_values"] if algorithm.bootstrap_truncated else []
        self._move_columns(["values", *last_values], "critic", "actor")
        return metrics

    def assign_advantages(self) -> dict[str, float]:
        """Turn rewards into advantages and returns."""
        metrics = _merged(self._set_of["actor"].call("work", "assign_advantages", self.kl_coef))
        self._kl = metrics.get("kl/reference")
        self._move_columns(["returns", "trained"], "actor", "critic")
        return metrics

    def update(self, step: int) -> tuple[dict[str, float], float]:
        """Update the critic and, unless it is still frozen, the actor; models in processes apart train at once.

        Returns:
            Metrics, and the number of rollouts trained, as counted by the ranks while they train: a rollout lost on the
            way to them is missed. It is not a whole number when an epoch missed some.
        """
        job = self._job
        roles = [role for role in ("critic", "actor") if role in self._set_of]
        if step <= job.num_frozen_steps:
            roles.remove("actor")
        options = {"max_epochs": job.batch.max_epochs, "seed": job.seed + step, "kl_coef": self.kl_coef}
        pending = [self._set_of[role].start("work", "update", role, **options) for role in roles]
        metrics = _merged(part for references in pending for part in wait(references))
        passes = [metrics.pop(f"{METRIC_PREFIXES[role]}/rollout_passes") for role in roles]
        num_trained = min(passes) / job.batch.max_epochs
        if job.algorithm.uses_reference:
            metrics["kl/coef"] = self.kl_coef
        if "actor" in roles:
            self.policy_version += job.batch.num_mini_batches(num_trained) * job.batch.max_epochs
            self._adapt_kl(metrics.get("kl/reference", self._kl), int(num_trained))
        return metrics, num_trained

    def _rewards(self, rollouts: Sequence[Rollout]) -> tuple[list[float], dict[str, float]]:
        """Return what each rollout earned, as the algorithm compares it, and metrics of the shaping."""
        spec = self._job.algorithm
        earned, metrics = self._shaper.shape(rollouts)
        group_ids = [rollout.group_id for rollout in rollouts]
        compared = relative_rewards(earned, group_ids, spec.row.baseline, divide_by_std=spec.whiten_std)
        return compared.tolist(), metrics

    def _adapt_kl(self, kl: float | None, num_rollouts: int) -> None:
        """Set the next step's coefficient by the KL of this one, measured before its updates."""
        spec = self._job.algorithm
        if spec.kl_target is not None and kl is not None:
            rule = {"target": spec.kl_target, "horizon": spec.kl_horizon}
            self.kl_coef = adapted_kl_coef(self.kl_coef, kl, num_rollouts=num_rollouts, **rule)

    def _move_columns(self, names: Sequence[str], source: str, target: str) -> None:
        """Hand columns from the ranks of one role to those of another. Processes that hold both have them already."""
        if source not in self._set_of or target not in self._set_of:
            return
        if self._set_of[source] is self._set_of[target]:
            return
        exported = self._set_of[source].start("work", "export_columns", list(names))
        wait(self._set_of[target].start("work", "adopt_columns", *exported))

    # -- weights and memory --------------------------------------------------------------------------------------

    def send_weights(self, engines: Sequence[Any]) -> int:
        """Send the actor's weights to `engines`, in the order of the plan; return their bytes."""
        actor = self._set_of["actor"]
        targets = self._targets(engines, len(actor.handles))
        return max(wait(actor.start_each("send_weights", [(mine, self.policy_version) for mine in targets])))

    def _targets(self, engines: Sequence[Any], num_ranks: int) -> list[list[Any]]:
        """Return the engines that each rank sends to: those on its own device by CUDA IPC, else all from rank 0."""
        if self._job.engine.weight_transfer == "ipc":
            pairs = list(zip(self._job.plan.engines.bundles, engines, strict=True))
            homes = self._job.plan.group_of("actor").bundles
            return [[engine for bundle, engine in pairs if bundle == own] for own in homes]
        return [list(engines) if rank == 0 else [] for rank in range(num_ranks)]

    def save(self, role: str, path: str) -> None:
        """Write the model of `role` as a Hugging Face folder."""
        self._set_of[role].call("work", "save", role, path)

    def save_average(self, path: str) -> None:
        """Write the average of the actor's weights as a Hugging Face folder."""
        self._set_of["actor"].call("work", "save_average", path)

    def sleep(self) -> None:
        """Move optimizer states off the device."""
        self._call_all("offload")

    def wake_up(self) -> None:
        """Undo `sleep`."""
        self._call_all("reload")

    def peak_memory_bytes(self) -> int:
        """Return the most device memory that a rank has allocated."""
        return max((peak for ranks in self._sets for peak in ranks.call("work", "peak_memory_bytes")), default=0)

    def _call_all(self, method: str) -> None:
        wait([reference for ranks in self._sets for reference in ranks.start("work", method)])


def _merged(parts: Iterable[Mapping[str, Metric]]) -> dict[str, float]:
    return results(merge_metrics(parts))
