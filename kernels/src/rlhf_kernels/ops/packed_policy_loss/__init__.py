"""Policy loss of a packed token stream with KL and entropy terms, reduced to a scalar, and its metrics."""

from torch import Tensor

from rlhf_kernels.dispatch import FLOATS, takes_triton
from rlhf_kernels.objective import PolicyObjective
from rlhf_kernels.ops.packed_policy_loss.reference import packed_policy_loss_reference
from rlhf_kernels.ops.packed_policy_loss.terms import POLICY_METRICS, PolicyStream, check_column

__all__ = ["POLICY_METRICS", "PolicyStream", "packed_policy_loss"]


def packed_policy_loss(
    logprobs: Tensor, stream: PolicyStream, objective: PolicyObjective, *, entropy: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return a packed micro-batch's share of the policy loss, and the sums from which its metrics are computed.

        loss = R(w_t l_t) + kl_coef R(k_t) - entropy_coef R(H_t)
        r_t  = exp(logprobs_t - old_logprobs_t)                          s_i = exp(mean over sequence i of log r_t)
        l_t  = -min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t)          ppo; gspo with s_i in place of r_t
        l_t  = -constant(clip(r_t, 1 - clip_low, 1 + clip_high)) A_t logprobs_t   cispo
        l_t  = -A_t logprobs_t                                                    reinforce
        l_t  = -A_t (4 / tau) sigmoid(tau (r_t - 1))                              sapo, tau by the sign of A_t
        l_t  = -r_t A_t, or 0 outside of the trust region                         dppo_tv, dppo_kl
        l_t  = -clip(r_t, 1 - clip_low, 1 + clip_high) A_t + log_ratio_coef (log r_t)^2         kimi
        l_t  = -s_i A_t, s_i with log r_t clipped as A_t favours                  gmpo
        l_t  = -A_t logprobs_t, times constant(min(s_i, 1)) where A_t < 0         topr
        l_t  = -constant(W_i^c1 exp(c2 (1 - W_i))) A_t logprobs_t,  W_i = prod over sequence i of r_t     vespo
        l_t  = 0 where A_t < 0 and mean over sequence i of -log r_t > mask_off_policy              all, if it is given
        l_t  + penalties_t |log r_t|                                              all, if the stream has penalties
        k_t  = d, d^2 / 2 or min(e^-d - 1 + d, 10);  d = logprobs_t - ref_logprobs_t
        w_t  = the stream's weights, or 1
        R(x) = sum_t x_t / num_tokens                                             token_mean
             = sum_i (sum_t x_t / n_i) / num_sequences                            seq_mean_token_mean
             = sum_t x_t / num_sequences                                          seq_mean_token_sum
             = sum_t x_t / (num_sequences max_tokens)                             seq_mean_token_sum_norm

    Sums run over trained tokens, n_i of them in sequence i. Log ratios and d are clamped to +-20 nats. At its bound of
    10 nats the formula of k3 has no gradient; the unbiased gradient ignores this bound. Gradients flow to
    `logprobs` and `entropy`. On CUDA nothing waits for the device. Sources: PPO arXiv:1707.06347, dual clip
    arXiv:1912.09729, GSPO arXiv:2507.18071, CISPO arXiv:2506.13585, SAPO arXiv:2511.20347, DPPO arXiv:2602.04879,
    Kimi K2.5 arXiv:2602.02276, GMPO arXiv:2507.20673, TOPR arXiv:2503.14286, VESPO arXiv:2602.10693, the off-policy
    mask arXiv:2512.02556, penalties arXiv:2505.22617, KL estimators joschu.net/blog/kl-approx.html, their gradients
    arXiv:2506.09477, Dr. GRPO's reduction arXiv:2503.20783.

    Args:
        logprobs: [N] bfloat16, float16 or float32, nats.
        stream: constants per token.
        objective: the terms and their coefficients.
        entropy: [N], nats. Required if entropy_coef > 0.

    Returns:
        loss: float32 scalar. The shares of all micro-batches add up to the loss of the update.
        metrics: [8] float32, named by `POLICY_METRICS`, without gradient.

    Raises:
        ValueError: a wrong shape, dtype, device or (on the CPU) bound, or a missing tensor that the objective needs.
    """
    if logprobs.ndim != 1 or logprobs.dtype not in FLOATS:
        given = f"{list(logprobs.shape)} {logprobs.dtype}"
        raise ValueError(f"packed_policy_loss takes logprobs [N] in bfloat16, float16 or float32; got {given}")
    stream.check(logprobs, objective)
    check_column("entropy", entropy, logprobs)
    if entropy is None and objective.entropy_coef > 0:
        raise ValueError(f"entropy_coef is {objective.entropy_coef:g}; without entropy it must be 0")
    if stream.own_loss is None and takes_triton("packed_policy_loss", logprobs):
        from rlhf_kernels.ops.packed_policy_loss.triton import packed_policy_loss_triton

        return packed_policy_loss_triton(logprobs, entropy, stream, objective)
    return packed_policy_loss_reference(logprobs, entropy, stream, objective)
