"""Rollouts as aligned tensors, ready for estimators and losses.

Shape letters: B rollouts in the shard of one rank, T tokens in the longest of them. Position t of every [B, T] tensor
belongs to token t: its log-prob is conditioned on the tokens before it, and its value is that of the state before it is
written.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from rlhf_models.batch import to_device
from rlhf_train.algorithms.own_code import INPUTS
from rlhf_train.algorithms.table import AlgorithmSpec
from rlhf_train.learning.columns import RolloutColumns
from rlhf_train.learning.learning_spec import is_teacher

# Role to the column that its model fills in.
MODEL_COLUMNS = {
    "actor": "old_logprobs",
    "reference": "ref_logprobs",
    "teacher": "teacher_logprobs",
    "critic": "values",
}
COLUMNS = (
    *MODEL_COLUMNS.values(),
    "trainer_logprobs",
    "entropy",
    "last_values",
    "advantages",
    "returns",
    "trained",
    "weights",
    "penalties",
)


def column_of(role: str) -> str:
    """Return the column that the model of `role` fills in. All teachers have one, each in the rows that are its own.

    A draft model fills in none, and has a name for what it computes in its updates.
    """
    return MODEL_COLUMNS.get("teacher" if is_teacher(role) else role, "logprobs")


def columns_of(role: str, spec: AlgorithmSpec) -> dict[str, tuple[int, ...]]:
    """Return the columns that the model of `role` fills in, with what their shape has beside [B, T]."""
    columns: dict[str, tuple[int, ...]] = {column_of(role): ()}
    if role == "critic" and spec.bootstrap_truncated:
        columns["last_values"] = ()
    if role == "actor" and spec.entropy.top_quantile is not None:
        columns["entropy"] = ()
    if is_teacher(role) and spec.distribution is not None:
        columns["teacher_logprobs"] = (spec.distribution.num_columns,)
    return columns


class Experience:
    """One rank's rollouts of one step, padded from their flat columns.

    Attributes:
        rollout_ids, group_ids: B ids each.
        token_ids: B arrays of the rollouts' tokens, [L_i] int32 each.
        loss_mask: [B, T] bool, True where the token is trained.
        policy_mask: [B, T] bool, the trained tokens that the policy loss includes. The off-policy correction can mask
            further tokens for the policy, while the critic still learns from them.
        policy_versions: [B, T] int32, the version of the policy that wrote each token; -1 for all other tokens.
        rollout_logprobs: [B, T] float32, nats, from the engine; 0.0 where the mask is False.
        rewards: [B] float32, the total reward of each rollout, after shaping and after the group's baseline.
        token_rewards: [B, T] float32, the part of `rewards` that single tokens earned; 0.0 elsewhere: each turn's
            reward at the turn's last token, from the verdict or relative to the same turn of the group, and each
            step's, after the group's baseline, at the step's last token.
        truncated: [B] bool, whether the length limit ended the rollout.
        prompt_lengths: tokens of each rollout before its first trained one, at least 1; all if none is trained.
        routes: B arrays [R_i, layers, top_k], the experts of the first R_i tokens; None if no rollout has any.
        images: per rollout, the paths of its images.
        sources: see `RolloutColumns`.
        columns: name to [B, T] float32, filled in as models run; 0.0 where the mask is False. Where a teacher's
            distributions are compared, `teacher_logprobs` is [B, T, 2 K + 1] instead, of
            `losses.teacher.most_likely`. `last_values` holds the
            value of the state after a truncated rollout, at its last trained token. `trained` is 1.0 where the loss
            mask is True. `weights` multiply the policy loss, and `penalties` hold tokens to the old policy; see
            `PolicyStream`. `trainer_logprobs` are the old log-probs as the trainer computed them, even where
            `old_logprobs` are the engine's. `entropy` is that of the policy before the updates, nats.
    """

    def __init__(self, columns: RolloutColumns) -> None:
        lengths = columns.lengths
        holds_token = np.arange(lengths.max(initial=1)) < lengths[:, None]

        def padded(flat: np.ndarray, fill: int = 0) -> Tensor:
            rows = np.full(holds_token.shape, fill, flat.dtype)
            rows[holds_token] = flat
            return torch.from_numpy(rows)

        self.rollout_ids = list(columns.rollout_ids)
        self.group_ids = list(columns.group_ids)
        self.token_ids = np.split(columns.token_ids, lengths.cumsum())[:-1]
        self.loss_mask = padded(columns.loss_mask)
        self.policy_mask = self.loss_mask.clone()
        self.policy_versions = padded(columns.policy_versions, -1)
        self.rollout_logprobs = padded(columns.rollout_logprobs)
        # Copies: what comes from another process cannot be written to.
        self.rewards = torch.from_numpy(columns.rewards.copy())
        self.token_rewards = padded(columns.token_rewards)
        self.truncated = torch.from_numpy(columns.truncated.copy())
        self.routes = None if columns.routes is None else np.split(columns.routes, columns.num_routed.cumsum())[:-1]
        self.images = columns.images
        self.sources = columns.sources
        first = self.loss_mask.int().argmax(dim=1).clamp(min=1)
        is_trained = self.loss_mask.any(dim=1)
        self.prompt_lengths = torch.where(is_trained, first, torch.from_numpy(lengths)).tolist()
        self.columns: dict[str, Tensor] = {}

    def set_column(self, name: str, values: Tensor) -> None:
        """Store a [B, T] or [B, T, C] tensor under `name`, with 0.0 at tokens that are not trained."""
        assert name in COLUMNS, name
        self.columns[name] = self._cleared(values.detach().float().cpu())

    def columns_to_fill(
        self, role: str, spec: AlgorithmSpec, device: torch.device, *, keeps: bool
    ) -> dict[str, Tensor]:
        """Return the columns of `role` on the device: 0.0 everywhere, or if it `keeps` them what others filled in."""
        found = {}
        for name, more in columns_of(role, spec).items():
            column = self.columns.get(name) if keeps else None
            blank = torch.zeros(*self.loss_mask.shape, *more, device=device)
            found[name] = blank if column is None else to_device(column, device)
        return found

    def restrict(self, kept: Tensor) -> None:
        """Stop training the tokens where `kept` [B, T] bool is False: clear them in the masks, set columns to 0.0."""
        self.loss_mask &= kept
        self.policy_mask &= kept
        for name, column in self.columns.items():
            self.columns[name] = self._cleared(column)
        self.rollout_logprobs = self.rollout_logprobs.masked_fill(~self.loss_mask, 0.0)

    def _cleared(self, column: Tensor) -> Tensor:
        left_out = ~self.loss_mask
        return column.masked_fill(left_out if column.ndim == 2 else left_out[..., None], 0.0)

    def own_inputs(self) -> dict[str, object]:
        """Return what a user's advantages are computed from, by the names of `algorithms.own_code.INPUTS`."""
        return {name: getattr(self, name) for name in INPUTS["advantages"]}

    def export(self, names: Sequence[str]) -> dict[str, dict[str, np.ndarray]]:
        """Return the named columns for ranks of another rank set, as name to rollout id to [L_i] or [L_i, C] array.

        The keys are rollout ids, because the other rank set has dealt the rollouts to its ranks in its own way.
        """
        lengths = [len(tokens) for tokens in self.token_ids]
        exported = {}
        for name in names:
            rows = [row[:length].numpy() for row, length in zip(self.columns[name], lengths, strict=True)]
            exported[name] = dict(zip(self.rollout_ids, rows, strict=True))
        return exported

    def adopt(self, *parts: Mapping[str, Mapping[str, np.ndarray]]) -> None:
        """Store the columns of this shard's rollouts. `parts` are the exports of all ranks of the other rank set."""
        for name in {name for part in parts for name in part}:
            exported = {rollout_id: values for part in parts for rollout_id, values in part.get(name, {}).items()}
            more = next(iter(exported.values()), np.zeros(0)).shape[1:]
            column = torch.zeros(*self.loss_mask.shape, *more)
            for row, rollout_id in enumerate(self.rollout_ids):
                column[row, : len(exported[rollout_id])] = torch.tensor(exported[rollout_id])
            self.set_column(name, column)
