"""Losses on judged answers: one number per pair, answer, token or reasoning step, before reduction.

Shape letter: B pairs or answers. The log-prob of an answer is in nats: the sum over its tokens, or their mean where the
docstring says so.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import log_softmax, logsigmoid

from rlhf_data.errors import unknown
from rlhf_train.algorithms.token_specs import DIVERGENCES
from rlhf_train.shapes import check_same_shape

MAX_BLOCK = 2**22  # logits whose distributions are held at a time: 16 MiB in float32
MIN_NLL = 1e-6  # nats per token; the lower bound of the NLL in log odds, which grow without bound as it goes to 0


def reward_model_loss(chosen_scores: Tensor, rejected_scores: Tensor, margins: Tensor | None = None) -> Tensor:
    """Return the Bradley-Terry negative log-likelihood of each pair's order.

        loss = -log sigmoid(r_c - r_r - m)

    Args:
        chosen_scores, rejected_scores: [B] float; carry the gradient.
        margins: [B] float, m: how much better the chosen answer is, in score units; None for 0.

    Returns:
        [B] float, nats; log 2 for a tie without margin. Without margins this equals log(1 + exp(r_r - r_c)), which is
        known as the LogExp loss. The form used here cannot overflow.

    Source: Ouyang et al. 2022, arXiv:2203.02155, eq. 1; the margin: Touvron et al. 2023, arXiv:2307.09288, eq. 2.
    """
    check_same_shape(chosen_scores=chosen_scores, rejected_scores=rejected_scores)
    difference = chosen_scores - rejected_scores
    if margins is not None:
        check_same_shape(chosen_scores=chosen_scores, margins=margins)
        difference = difference - margins
    return -logsigmoid(difference)


def dpo_loss(chosen_ratios: Tensor, rejected_ratios: Tensor, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """Return the loss of direct preference optimization (DPO) for each pair; with label smoothing, conservative DPO.

        loss = -(1 - e) log sigmoid(beta z) - e log sigmoid(-beta z),   z = ratio_c - ratio_r

    Args:
        chosen_ratios, rejected_ratios: [B] float, log pi(answer) - log pi_ref(answer); carry the gradient.
        beta: > 0; a larger value keeps the policy closer to the reference.
        label_smoothing: e in [0, 0.5), the probability that a pair's labels are swapped.

    Returns:
        [B] float, nats.

    Source: Rafailov et al. 2023, arXiv:2305.18290, eq. 7; e: Mitchell 2023, "A note on DPO with noisy preferences".
    """
    check_same_shape(chosen_ratios=chosen_ratios, rejected_ratios=rejected_ratios)
    logits = beta * (chosen_ratios - rejected_ratios)
    return -(1 - label_smoothing) * logsigmoid(logits) - label_smoothing * logsigmoid(-logits)


def ipo_loss(chosen_ratios: Tensor, rejected_ratios: Tensor, *, beta: float) -> Tensor:
    """Return the loss of identity preference optimization (IPO) for each pair.

    It regresses the margin between the two answers to a target, instead of making the margin as large as possible.

        loss = (z - 1 / (2 beta))^2,   z = ratio_c - ratio_r

    Args:
        chosen_ratios, rejected_ratios: [B] float, as in `dpo_loss`. The paper sums log-probs over tokens. With means
            over tokens, which other libraries use, the target margin is per token.
        beta: > 0; tau in the paper.

    Returns:
        [B] float, nats squared.

    Source: Azar et al. 2023, arXiv:2310.12036, eq. 17.
    """
    check_same_shape(chosen_ratios=chosen_ratios, rejected_ratios=rejected_ratios)
    return (chosen_ratios - rejected_ratios - 1 / (2 * beta)) ** 2


def hinge_loss(chosen_ratios: Tensor, rejected_ratios: Tensor, *, beta: float) -> Tensor:
    """Return the hinge loss of each pair: max(0, 1 - beta z), with z, arguments and result as in `dpo_loss`.

    Source: Zhao et al. 2023, arXiv:2305.10425 (SLiC-HF); with log-ratios: Liu et al. 2023, arXiv:2309.06657 (RSO).
    """
    check_same_shape(chosen_ratios=chosen_ratios, rejected_ratios=rejected_ratios)
    return torch.relu(1 - beta * (chosen_ratios - rejected_ratios))


def robust_loss(chosen_ratios: Tensor, rejected_ratios: Tensor, *, beta: float, label_smoothing: float) -> Tensor:
    """Return the loss of robust DPO for each pair. Its mean over swapped labels is DPO's loss of the right ones.

        loss = (-(1 - e) log sigmoid(beta z) + e log sigmoid(-beta z)) / (1 - 2 e)

    Arguments and result are as in `dpo_loss`; the loss can be negative.

    Source: Chowdhury et al. 2024, arXiv:2403.00409.
    """
    check_same_shape(chosen_ratios=chosen_ratios, rejected_ratios=rejected_ratios)
    logits = beta * (chosen_ratios - rejected_ratios)
    kept, swapped = (1 - label_smoothing) * logsigmoid(logits), label_smoothing * logsigmoid(-logits)
    return (swapped - kept) / (1 - 2 * label_smoothing)


def exo_pair_loss(chosen_ratios: Tensor, rejected_ratios: Tensor, *, beta: float, label_smoothing: float) -> Tensor:
    """Return the loss of efficient exact optimization (EXO) for each pair: the reverse KL between two choices.

        loss = KL([p, 1 - p] || [1 - e, e]),   p = sigmoid(beta z)

    Arguments are as in `dpo_loss`, with e in (0, 0.5).

    Returns:
        [B] float, nats; 0 where p = 1 - e.

    Source: Ji et al. 2024, arXiv:2402.00856, eq. 16.
    """
    check_same_shape(chosen_ratios=chosen_ratios, rejected_ratios=rejected_ratios)
    logits = beta * (chosen_ratios - rejected_ratios)
    right, wrong = logsigmoid(logits), logsigmoid(-logits)
    kept, swapped = math.log1p(-label_smoothing), math.log(label_smoothing)
    return right.exp() * (right - kept) + wrong.exp() * (wrong - swapped)


def nca_pair_loss(chosen_ratios: Tensor, rejected_ratios: Tensor, *, beta: float) -> Tensor:
    """Return the loss of noise contrastive alignment (NCA) for each pair. It also keeps the chosen answer likely.

        loss = -log sigmoid(u_c) - log sigmoid(-u_c) / 2 - log sigmoid(-u_r) / 2,   u = beta ratio

    Arguments and result are as in `dpo_loss`.

    Source: Chen et al. 2024, arXiv:2402.05369.
    """
    check_same_shape(chosen_ratios=chosen_ratios, rejected_ratios=rejected_ratios)
    chosen, rejected = beta * chosen_ratios, beta * rejected_ratios
    return -logsigmoid(chosen) - (logsigmoid(-chosen) + logsigmoid(-rejected)) / 2


def bco_pair_loss(chosen_ratios: Tensor, rejected_ratios: Tensor, *, beta: float) -> Tensor:
    """Return the loss of binary classifier optimization (BCO) for each pair, without the paper's shift of rewards.

        loss = -log sigmoid(beta ratio_c) - log sigmoid(-beta ratio_r)

    Arguments and result are as in `dpo_loss`. The paper subtracts a moving average of the rewards from both.

    Source: Jung et al. 2024, arXiv:2404.04656; without the shift as in TRL.
    """
    check_same_shape(chosen_ratios=chosen_ratios, rejected_ratios=rejected_ratios)
    return -logsigmoid(beta * chosen_ratios) - logsigmoid(-beta * rejected_ratios)


def sppo_hard_loss(chosen_ratios: Tensor, rejected_ratios: Tensor, *, beta: float) -> Tensor:
    """Return the loss of self-play preference optimization (SPPO) for each pair, whose winner is certain.

        loss = (ratio_c - 1 / (2 beta))^2 + (ratio_r + 1 / (2 beta))^2

    Arguments are as in `dpo_loss`, with beta = 1 / eta of the paper.

    Returns:
        [B] float, nats squared.

    Source: Wu et al. 2024, arXiv:2405.00675, eq. 4.7 with the probabilities 1 and 0.
    """
    check_same_shape(chosen_ratios=chosen_ratios, rejected_ratios=rejected_ratios)
    return (chosen_ratios - 1 / (2 * beta)) ** 2 + (rejected_ratios + 1 / (2 * beta)) ** 2


def apo_zero_loss(chosen_ratios: Tensor, rejected_ratios: Tensor, *, beta: float) -> Tensor:
    """Return the loss of APO-zero for each pair, for chosen answers that are better than the model's own.

        loss = 1 - sigmoid(beta ratio_c) + sigmoid(beta ratio_r)

    Arguments are as in `dpo_loss`.

    Returns:
        [B] float, in [0, 2].

    Source: D'Oosterlinck et al. 2024, arXiv:2408.06266, eq. 7.
    """
    check_same_shape(chosen_ratios=chosen_ratios, rejected_ratios=rejected_ratios)
    return torch.sigmoid(-beta * chosen_ratios) + torch.sigmoid(beta * rejected_ratios)


def apo_down_loss(chosen_ratios: Tensor, rejected_ratios: Tensor, *, beta: float) -> Tensor:
    """Return the loss of APO-down for each pair, for chosen answers that are worse than the model's own.

        loss = sigmoid(beta ratio_c) + 1 - sigmoid(beta z)

    Both answers become less likely, the rejected one more so. Arguments and result are as in `apo_zero_loss`.

    Source: D'Oosterlinck et al. 2024, arXiv:2408.06266, eq. 8.
    """
    check_same_shape(chosen_ratios=chosen_ratios, rejected_ratios=rejected_ratios)
    return torch.sigmoid(beta * chosen_ratios) + torch.sigmoid(beta * (rejected_ratios - chosen_ratios))


def discopop_loss(chosen_ratios: Tensor, rejected_ratios: Tensor, *, beta: float, tau: float) -> Tensor:
    """Return the loss of DiscoPOP for each pair: a blend of the logistic and the exponential loss.

        loss = -(1 - g) log sigmoid(x) + g exp(-x),   x = beta z, g = sigmoid(x / tau)

    Arguments are as in `dpo_loss`, with tau in (0, 1).

    Source: Lu et al. 2024, arXiv:2406.08414, eq. 5.
    """
    check_same_shape(chosen_ratios=chosen_ratios, rejected_ratios=rejected_ratios)
    logits = beta * (chosen_ratios - rejected_ratios)
    # One exponent for both factors: exp(-x) alone overflows where the gate is 0.
    exponential = torch.exp(logsigmoid(logits / tau) - logits)
    return exponential - torch.sigmoid(-logits / tau) * logsigmoid(logits)


def simpo_loss(chosen_means: Tensor, rejected_means: Tensor, *, beta: float, gamma: float) -> Tensor:
    """Return the loss of simple preference optimization (SimPO) for each pair. It needs no reference model.

        loss = -log sigmoid(beta (mean_c - mean_r) - gamma)

    Args:
        chosen_means, rejected_means: [B] float, mean log-prob of the answer's tokens; carry the gradient.
        beta: > 0; scales the log-probs.
        gamma: target margin, >= 0.

    Returns:
        [B] float, nats.

    Source: Meng et al. 2024, arXiv:2405.14734, eq. 6.
    """
    check_same_shape(chosen_means=chosen_means, rejected_means=rejected_means)
    return -logsigmoid(beta * (chosen_means - rejected_means) - gamma)


def orpo_loss(chosen_means: Tensor, rejected_means: Tensor) -> Tensor:
    """Return the odds ratio term of odds ratio preference optimization (ORPO) for each pair.

        loss = -log sigmoid(log odds_c - log odds_r),   odds = p / (1 - p),   log p = mean log-prob per token

    The method's other term, the negative log-likelihood of the chosen answer, is not included.

    Args:
        chosen_means, rejected_means: [B] float, <= 0; carry the gradient. Clamped to at most -`MIN_NLL`, because the
            odds are infinite at 0.

    Returns:
        [B] float, nats.

    Source: Hong et al. 2024, arXiv:2403.07691, eq. 7.
    """
    check_same_shape(chosen_means=chosen_means, rejected_means=rejected_means)
    return -logsigmoid(_log_odds(chosen_means) - _log_odds(rejected_means))


def kto_loss(
    ratios: Tensor,
    is_desirable: Tensor,
    kl: Tensor,
    *,
    beta: float,
    desirable_loss_weight: float = 1.0,
    undesirable_loss_weight: float = 1.0,
) -> Tensor:
    """Return the loss of Kahneman-Tversky optimization (KTO) for each answer, judged good or bad on its own.

        loss = w_d (1 - sigmoid(beta (ratio - kl)))   for a desirable answer
               w_u (1 - sigmoid(beta (kl - ratio)))   for an undesirable answer

    Args:
        ratios: [B] float, log pi(answer) - log pi_ref(answer), summed over tokens; carries the gradient.
        is_desirable: [B] bool.
        kl: scalar, nats, >= 0, the policy's divergence from the reference, estimated on the whole update; a constant.
        beta: > 0; a larger value keeps the policy closer to the reference.
        desirable_loss_weight, undesirable_loss_weight: w_d and w_u.

    Returns:
        [B] float, in [0, max(w_d, w_u)].

    Source: Ethayarajh et al. 2024, arXiv:2402.01306, eq. 8.
    """
    check_same_shape(ratios=ratios, is_desirable=is_desirable)
    gain = beta * (ratios - kl.detach())
    # sigmoid(-x) equals 1 - sigmoid(x), without the cancellation that loses precision for large x.
    return torch.where(
        is_desirable, desirable_loss_weight * torch.sigmoid(-gain), undesirable_loss_weight * torch.sigmoid(gain)
    )


def dft_loss(logprobs: Tensor) -> Tensor:
    """Return the loss of dynamic fine-tuning (DFT) for each token, which its own probability weighs.

        loss_n = -sg(p_n) log p_n,   sg stops the gradient

    The weight undoes the factor 1 / p_n in the gradient of the log-likelihood: unlikely tokens no longer count most.

    Args:
        logprobs: [N] float, nats; carries the gradient.

    Returns:
        [N] float, nats, in [0, 1 / e].

    Source: Wu et al. 2025, arXiv:2508.05629.
    """
    return -logprobs.detach().exp() * logprobs


def distillation_loss(
    logits: Tensor, teacher_logits: Tensor, *, divergence: str = "forward_kl", jsd_beta: float = 0.5
) -> Tensor:
    """Return the divergence between the teacher's and the model's next-token distribution, for each token.

        forward_kl    - sum_v q_nv log p_nv = KL(q_n || p_n) + the entropy of q_n
        reverse_kl    KL(p_n || q_n)
        jsd           b KL(q_n || m_n) + (1 - b) KL(p_n || m_n),   m = b q + (1 - b) p, b = jsd_beta

    with p = softmax(logits) and q = softmax(teacher_logits). The JSD divided by b tends to KL(q || p) as b goes to 0,
    and divided by 1 - b to KL(p || q) as b goes to 1.

    Args:
        logits: [N, V] float; carries the gradient.
        teacher_logits: [N, V] float; a constant.
        divergence: one of the names above.
        jsd_beta: b, in (0, 1).

    Returns:
        [N] float32, nats; smallest when both distributions are equal: the teacher's entropy, or 0. Distributions are
        held for one block of rows at a time. The forward pass already computes the gradient, in the type of the logits,
        so only one backward pass is possible.

    Source: forward_kl: Hinton, Vinyals and Dean 2015, arXiv:1503.02531, at temperature 1; the others: Agarwal et al.
    2023 (GKD), arXiv:2306.13649, eq. 1.
    """
    check_same_shape(logits=logits, teacher_logits=teacher_logits)
    if divergence not in DIVERGENCES:
        raise ValueError(unknown("divergence", divergence, DIVERGENCES))
    run = partial(_divergence, divergence=divergence, jsd_beta=jsd_beta)
    return _InBlocks.apply(logits, teacher_logits.detach(), run)


class _InBlocks(torch.autograd.Function):
    """A loss of rows, whose gradient is computed with it, block by block."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, teacher_logits: Tensor, run: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        losses = logits.new_empty(len(logits), dtype=torch.float32)
        needs_gradient = ctx.needs_input_grad[0]
        gradient = torch.empty_like(logits) if needs_gradient else None
        size = max(MAX_BLOCK // logits.shape[-1], 1)
        for first in range(0, len(logits), size):
            rows = slice(first, first + size)
            with torch.set_grad_enabled(needs_gradient):
                block = logits[rows].detach().requires_grad_(needs_gradient)
                found = run(block, teacher_logits[rows])
                if needs_gradient:
                    (gradient[rows],) = torch.autograd.grad(found.sum(), block)
            losses[rows] = found.detach()
        ctx.save_for_backward(gradient)
        return losses

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient.mul_(upstream[0][:, None]), None, None


def _divergence(logits: Tensor, teacher_logits: Tensor, *, divergence: str, jsd_beta: float) -> Tensor:
    model = log_softmax(logits.float(), -1)
    teacher = log_softmax(teacher_logits.float(), -1)
    if divergence == "forward_kl":
        return -(teacher.exp() * model).sum(-1)
    if divergence == "reverse_kl":
        return (model.exp() * (model - teacher)).sum(-1)
    mean = torch.logaddexp(teacher + math.log(jsd_beta), model + math.log1p(-jsd_beta))
    of_teacher = (teacher.exp() * (teacher - mean)).sum(-1)
    return jsd_beta * of_teacher + (1 - jsd_beta) * (model.exp() * (model - mean)).sum(-1)


def process_reward_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy of each reasoning step's verdict, with the softmax over the reward tokens only.

        loss_n = - sum_k y_nk log p_nk,   p = softmax(logits)

    Args:
        logits: [N, K] float, of the K reward tokens at the position where the step is judged; carries the gradient.
        targets: [N, K] float, the probability of each verdict, 0 and 1 for hard labels; a constant.

    Returns:
        [N] float32, nats.

    Source: Wang et al. 2023, "Math-Shepherd", arXiv:2312.08935, eq. 3 with K = 2.
    """
    check_same_shape(logits=logits, targets=targets)
    return -(targets.detach() * log_softmax(logits.float(), -1)).sum(-1)


def _log_odds(means: Tensor) -> Tensor:
    means = means.clamp(max=-MIN_NLL)
    return means - torch.log(-torch.expm1(means))
