"""Rollouts as a few flat arrays, in which form they travel to the trainers. Torch-free."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlhf_data.errors import DataError
from rlhf_data.records import FinishReason, Rollout, SpanSource


@dataclass(frozen=True, slots=True)
class RolloutColumns:
    """B rollouts with N tokens in total, one rollout after the other.

    Thousands of small arrays, as rollouts have, take longer to send and to read than to train on.

    Attributes:
        rollout_ids, group_ids: B ids each, of rollouts and of their groups.
        lengths: [B] int64, tokens per rollout.
        token_ids: [N] int32.
        loss_mask: [N] bool, True for the tokens that the policy wrote.
        rollout_logprobs: [N] float32, nats, from the engine; 0.0 where the mask is False.
        policy_versions: [N] int32, the version that wrote a token; -1 where the mask is False.
        rewards: [B] float32, relative to the algorithm's baseline.
        token_rewards: [N] float32, the part of `rewards` that single tokens earned.
        truncated: [B] bool, whether the length limit ended the rollout.
        num_routed: [B] int64, R_i tokens at the beginning of each rollout whose experts are given.
        routes: [sum of R_i, layers, top_k] unsigned, the experts of those tokens; None if none are given.
        images: per rollout, the paths of its images.
        sources: per rollout, the name of its data source in metrics; empty if metrics are not told by source.
    """

    rollout_ids: tuple[str, ...]
    group_ids: tuple[str, ...]
    lengths: np.ndarray
    token_ids: np.ndarray
    loss_mask: np.ndarray
    rollout_logprobs: np.ndarray
    policy_versions: np.ndarray
    rewards: np.ndarray
    token_rewards: np.ndarray
    truncated: np.ndarray
    num_routed: np.ndarray
    routes: np.ndarray | None = None
    images: tuple[tuple[str, ...], ...] = ()
    sources: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        rollouts: Sequence[Rollout],
        rewards: Sequence[float],
        earned: Sequence[Sequence[tuple[int, float]]] | None = None,
        *,
        with_routes: bool = False,
        sources: Sequence[str] = (),
    ) -> "RolloutColumns":
        """Return the columns of `rollouts`.

        Args:
            rollouts: B rollouts.
            rewards: one per rollout.
            earned: per rollout, what single tokens earned, as pairs of a position and a reward; None for what the
                verdict says of turns and steps.
            with_routes: whether the experts of tokens are among the columns.
            sources: of the columns.

        Raises:
            ValueError: the numbers of rewards and rollouts differ.
            DataError: the routes are those of different models.
        """
        if len(rewards) != len(rollouts):
            raise ValueError(f"{len(rewards)} rewards for {len(rollouts)} rollouts")
        spans = [span for rollout in rollouts for span in rollout.spans]
        sizes = np.array([len(span.token_ids) for span in spans], np.int64)
        versions = np.array([-1 if span.policy_version is None else span.policy_version for span in spans], np.int32)
        loss_mask = np.repeat(np.array([span.source is SpanSource.POLICY for span in spans], bool), sizes)
        rollout_logprobs = np.zeros(len(loss_mask), np.float32)
        rollout_logprobs[loss_mask] = _joined([s.logprobs for s in spans if s.logprobs is not None], np.float32)
        lengths = np.array([rollout.num_tokens for rollout in rollouts], np.int64)
        token_rewards = np.zeros(len(loss_mask), np.float32)
        for row, start in enumerate(lengths.cumsum() - lengths):
            for position, reward in rollouts[row].earned if earned is None else earned[row]:
                token_rewards[start + position] += reward
        routes = [rollout.routes for rollout in rollouts if with_routes and rollout.num_routed]
        if len(shapes := {part.shape[1:] for part in routes}) > 1:
            raise DataError(f"rollouts of one step have routes of different models, [layers, top_k] = {sorted(shapes)}")
        return cls(
            rollout_ids=tuple(rollout.rollout_id for rollout in rollouts),
            group_ids=tuple(rollout.group_id for rollout in rollouts),
            lengths=lengths,
            token_ids=_joined([span.token_ids for span in spans], np.int32),
            loss_mask=loss_mask,
            rollout_logprobs=rollout_logprobs,
            policy_versions=np.repeat(versions, sizes),
            rewards=np.array(rewards, np.float32),
            token_rewards=token_rewards,
            truncated=np.array([rollout.finish_reason is FinishReason.LENGTH for rollout in rollouts], bool),
            num_routed=np.array([with_routes * rollout.num_routed for rollout in rollouts], np.int64),
            routes=np.concatenate(routes) if routes else None,
            images=tuple(rollout.images for rollout in rollouts),
            sources=tuple(sources),
        )


def _joined(parts: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *parts], dtype=dtype)
