"""A policy loss of your own: SPO, whose square holds every ratio near 1 where PPO's clip lets it go.

    l_t = -(r_t A_t - |A_t| / (2 eps) (r_t - 1)^2)        Xie et al. 2024, arXiv:2401.16025

rlhf check examples/spo_loss.py
rlhf ppo --policy_loss_path examples/spo_loss.py --advantage_estimator group_norm
"""

import torch

EPS = 0.2


def policy_loss(logprobs, old_logprobs, advantages, loss_mask):
    """Return the loss of each token, [B, T], and the mean distance of the ratio from 1 as a metric."""
    # Where the mask is False tensors may hold anything: clear them before any arithmetic.
    log_ratio = (logprobs - old_logprobs).masked_fill(~loss_mask, 0.0).clamp(-20, 20)
    ratio = torch.exp(log_ratio)
    loss = -(ratio * advantages - advantages.abs() / (2 * EPS) * (ratio - 1) ** 2)
    return loss, {"distance": (ratio.detach() - 1).abs()}
