"""Clip-Cov and KL-Cov: tokens that lower the policy's entropy the most are left out, or held to the old policy.

The entropy falls with the covariance of log-probs and advantages: likely tokens that are rewarded, and unlikely ones
that are not, make the policy surer. A token's share of it is

    c_t = (log pi_t - mean(log pi)) (A_t - mean(A))        means over the trained tokens of the rollout batch

Clip-Cov leaves out a few tokens at random among those whose c_t is in a range. KL-Cov adds coef |log r_t| to the loss
of the tokens with the largest c_t, with r_t the ratio to the old policy.

Source: Cui et al. 2025, arXiv:2505.22617, and for |log r_t| the code of its authors. Shape letters: B rollouts, T token
positions.
"""

import zlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rlhf_train.shapes import check_same_shape


def token_covariances(logprobs: Tensor, advantages: Tensor, means: Tensor) -> Tensor:
    """Return each token's share of the covariance, [B, T] float64, in reward units times nats.

    Args:
        logprobs: [B, T] float, nats, of the policy before the updates.
        advantages: [B, T] float, in reward units.
        means: [2] float64, the means of both over the trained tokens of the batch.
    """
    check_same_shape(logprobs=logprobs, advantages=advantages)
    return (logprobs.double() - means[0]) * (advantages.double() - means[1])


def clipping_keys(
    covariances: Tensor, loss_mask: Tensor, rollout_ids: Sequence[str], *, low: float, high: float
) -> Tensor:
    """Return a number in [0, 1) for each token that may be clipped, and infinity for the others, [B, T] float64.

    The tokens with the smallest numbers of the batch are clipped. A rollout's numbers follow from its id, so that the
    deal of rollouts to ranks changes nothing.

    Args:
        covariances: [B, T] float64.
        loss_mask: [B, T] bool.
        rollout_ids: B ids.
        low, high: c_t must lie between these two.
    """
    drawn = [np.random.default_rng(zlib.crc32(name.encode())).random(loss_mask.shape[1]) for name in rollout_ids]
    keys = torch.from_numpy(np.array(drawn).reshape(loss_mask.shape))
    return keys.masked_fill(~(loss_mask & (covariances > low) & (covariances < high)), torch.inf)
