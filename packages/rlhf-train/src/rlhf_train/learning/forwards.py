"""The forward passes before an update, in blocks of rollout groups: a block runs as soon as its groups are complete."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlhf_data.records import Rollout, RolloutGroup
from rlhf_train.batching import RankPlan, plan_rollouts
from rlhf_train.cluster.ray_session import wait
from rlhf_train.generation.summaries import scored
from rlhf_train.learning.columns import RolloutColumns
from rlhf_train.learning.experience import columns_of
from rlhf_train.learning.learning_spec import LearningSpec
from rlhf_train.learning.rank_actor import RankActor
from rlhf_train.learning.ranks import RankSet
from rlhf_train.learning.worker import TrainWorker
from rlhf_train.run.metrics import merge_metrics, results


@dataclass(frozen=True, slots=True)
class _Block:
    """A block that was sent to the ranks.

    Attributes:
        rollout_ids: of its rollouts, in the order in which they were given.
        columns: reference to the columns from each rank set.
        reports: reference to the metrics and seconds from each rank set.
        is_early: whether it was sent while groups still generated.
    """

    rollout_ids: tuple[str, ...]
    columns: tuple[Any, ...]
    reports: tuple[Any, ...]
    is_early: bool


class BlockForwards:
    """Has all models run on blocks of a step's groups, each on one rank, while other groups still generate.

    No model changes between the beginning of generation and the update. A pass rounds differently with other rollouts
    beside it, so that its rollouts must not depend on the order in which groups finish: a block has the groups of
    consecutive numbers of admission, and its passes are planned from its rollouts alone. Numbers are then the same
    whichever block comes first, whichever rank runs it, and whether it runs early, after generation or in a replay.
    Models run on the same blocks, so that equal models have equal log-probs.

    Columns go from the ranks that computed them to those that train, by rollout id.

    Args:
        job: the run. No pass of its models needs several ranks.
        rank_sets: the training processes.
    """

    def __init__(self, job: LearningSpec, rank_sets: Sequence[RankSet]) -> None:
        self._job = job
        self._roles = [[role for role in job.column_roles if role in ranks.roles] for ranks in rank_sets]
        self._sets = list(rank_sets)
        self._trainers = [ranks for ranks in rank_sets if {"actor", "critic"} & set(ranks.roles)]
        batch = job.batch
        rows = batch.micro_rollout_batch_size
        if batch.micro_batch_tokens is not None:
            rows = batch.micro_batch_tokens // job.engine.max_model_len
        # A block fills a pass, if the groups are small and enough blocks are left for all ranks.
        num_ranks = max(len(ranks.handles) for ranks in rank_sets)
        self._size = max(min(rows // batch.n_samples_per_prompt, batch.rollout_batch_size // num_ranks), 1)
        self._blocks: dict[tuple[str, int], _Block] = {}
        self._forget()

    def settle(self, group_id: str, group: RolloutGroup | None) -> None:
        """Note that a group is complete, or None: that it failed or is not trained. Send its block if it is the last.

        A block whose groups were settled in part by another process is left to `want`.
        """
        block = self._block_of(group_id)
        members = self._settled.setdefault(block, {})
        members[group_id] = group
        if len(members) < self._size:
            return
        complete = [members[name] for name in sorted(members, key=_number)]
        kept = [group for group in complete if group is not None]
        if rollouts := scored(kept):
            sources = {group.group_id: group.prompt.source for group in kept}
            self._blocks[block] = self._send(rollouts, sources, is_early=True)

    def want(self, rollouts: Sequence[Rollout], sources: Mapping[str, str] | None = None) -> None:
        """Keep the blocks of these rollouts, which are those of the step, and send those that were not sent early.

        See `Learner.deal` for `sources`.
        """
        members: dict[tuple[str, int], list[Rollout]] = {}
        for rollout in rollouts:
            members.setdefault(self._block_of(rollout.group_id), []).append(rollout)
        early = self._blocks
        self._blocks = {}
        for block, parts in members.items():
            sent = early.get(block)
            is_same = sent is not None and sent.rollout_ids == tuple(rollout.rollout_id for rollout in parts)
            self._blocks[block] = sent if is_same else self._send(parts, sources, is_early=False)
        self._forget()

    def skip(self) -> None:
        """Let go of the groups and blocks of a step from which nothing is learned."""
        self._blocks = {}
        self._forget()

    def fill_columns(self) -> dict[str, float]:
        """Wait for all blocks, and give their columns to the ranks that train; return metrics.

        `throughput/early_forward_share` is the share of rollouts whose passes were sent while groups still generated,
        `throughput/early_forward_seconds` the time of those passes, summed over ranks.
        """
        blocks = list(self._blocks.values())
        reports = iter(wait([report for block in blocks for report in block.reports]))
        early = [block for block in blocks if block.is_early]
        seconds = 0.0
        parts = []
        for block in blocks:
            for _ in block.reports:
                metrics, block_s = next(reports)
                parts += metrics
                seconds += block_s * block.is_early
        columns = [part for block in blocks for part in block.columns]
        wait([reference for ranks in self._trainers for reference in ranks.start(TrainWorker.adopt_columns, *columns)])
        self._blocks = {}
        num_rollouts = sum(len(block.rollout_ids) for block in blocks)
        return results(merge_metrics(parts)) | {
            "throughput/early_forward_share": sum(len(block.rollout_ids) for block in early) / num_rollouts,
            "throughput/early_forward_seconds": seconds,
        }

    def _send(self, rollouts: Sequence[Rollout], sources: Mapping[str, str] | None, *, is_early: bool) -> _Block:
        """Have one rank of each set run its models on a block: the one that got the fewest tokens in this step."""
        plan = self._plan(rollouts, sources)
        ordered = [rollouts[row] for row in plan.rows]
        columns = {
            with_routes: RolloutColumns.of(ordered, [0.0] * len(ordered), with_routes=with_routes)
            for with_routes in {self._has_routes(roles) for roles in self._roles if roles}
        }
        sent = []
        for ranks, roles, tokens in zip(self._sets, self._roles, self._num_tokens, strict=True):
            if roles:
                rank = tokens.index(min(tokens))
                tokens[rank] += sum(rollout.num_tokens for rollout in rollouts)
                own = columns[self._has_routes(roles)]
                sent.append(ranks.start_on(rank, RankActor.run_block, roles, self._columns_of(roles), own, plan))
        ids = tuple(rollout.rollout_id for rollout in rollouts)
        return _Block(ids, tuple(part for part, _ in sent), tuple(report for _, report in sent), is_early)

    def _plan(self, rollouts: Sequence[Rollout], sources: Mapping[str, str] | None) -> RankPlan:
        """Return the passes over a block on one rank, from long to short rollouts."""
        batch = self._job.batch
        [plan] = plan_rollouts(
            rollouts,
            batch,
            num_ranks=1,
            num_mini_batches=1,
            max_response_tokens=self._job.sampling.max_tokens,
            seed=self._job.seed,
            parts=self._job.parts_of_teachers(rollouts, sources),
            shares_prompts=self._job.models["actor"].share_prompts,
        )
        return replace(plan, mini_batches=(), max_pass_tokens=batch.most_pass_tokens(self._job.sampling.max_tokens))

    def _columns_of(self, roles: Sequence[str]) -> list[str]:
        return [name for role in roles for name in columns_of(role, self._job.algorithm)]

    def _has_routes(self, roles: Sequence[str]) -> bool:
        return self._job.models["actor"].routing_replay and "actor" in roles

    def _block_of(self, group_id: str) -> tuple[str, int]:
        return group_id.rpartition("/")[0], _number(group_id) // self._size

    def _forget(self) -> None:
        """Begin to note the groups of another step."""
        self._settled: dict[tuple[str, int], dict[str, RolloutGroup | None]] = {}
        self._num_tokens = [[0] * len(ranks.handles) for ranks in self._sets]


def _number(group_id: str) -> int:
    """Return the number of a group's admission; see `stream.Ticket`."""
    return int(group_id.rpartition("/")[2])
