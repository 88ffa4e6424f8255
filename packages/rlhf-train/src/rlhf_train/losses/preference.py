"""Losses of judged answers: one number a pair, an answer, a token or a step, not reduced.

What they compare are log-probs of whole answers, [B] float, nats: sums over the answer's tokens, or means of them
where it says so.
"""

import torch
from torch import Tensor
from torch.nn.functional import log_softmax, logsigmoid

from rlhf_train.shapes import check_same_shape

MIN_NLL = 1e-6  # nats a token; below it, log odds are held: they grow without bound towards certainty


def reward_model_loss(chosen_scores: Tensor, rejected_scores: Tensor, margins: Tensor | None = None) -> Tensor:
    """Return how badly scores order each pair, as a Bradley-Terry model sees it.

        loss = -log sigmoid(r_c - r_r - m)

    Args:
        chosen_scores, rejected_scores: [B] float; carry the gradient.
        margins: [B] float, by how much the chosen answer is better; None for 0.

    Returns:
        [B] float, nats; 0.69 for a tie without margin. Without margins it is also log(1 + exp(r_r - r_c)), known as
        LogExp, which cannot overflow here.

    Source: Ouyang et al. 2022, arXiv:2203.02155, eq. 1; the margin: Touvron et al. 2023, arXiv:2307.09288, eq. 2.
    """
    check_same_shape(chosen_scores=chosen_scores, rejected_scores=rejected_scores)
    difference = chosen_scores - rejected_scores
    if margins is not None:
        check_same_shape(chosen_scores=chosen_scores, margins=margins)
        difference = difference - margins
    return -logsigmoid(difference)


def dpo_loss(chosen_ratios: Tensor, rejected_ratios: Tensor, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """Return direct preference optimization's loss of each pair, conservative with label smoothing.

        loss = -(1 - e) log sigmoid(beta z) - e log sigmoid(-beta z),   z = ratio_c - ratio_r

    Args:
        chosen_ratios, rejected_ratios: [B] float, log pi(answer) - log pi_ref(answer); carry the gradient.
        beta: > 0; the larger, the nearer to the reference.
        label_smoothing: e, the probability in [0, 0.5) that a pair is the wrong way round.

    Returns:
        [B] float, nats.

    Source: Rafailov et al. 2023, arXiv:2305.18290, eq. 7; e: Mitchell 2023, "A note on DPO with noisy preferences".
    """
    check_same_shape(chosen_ratios=chosen_ratios, rejected_ratios=rejected_ratios)
    logits = beta * (chosen_ratios - rejected_ratios)
    return -(1 - label_smoothing) * logsigmoid(logits) - label_smoothing * logsigmoid(-logits)


def ipo_loss(chosen_ratios: Tensor, rejected_ratios: Tensor, *, beta: float) -> Tensor:
    """Return identity preference optimization's loss of each pair: a margin is aimed at, not maximized.

        loss = (z - 1 / (2 beta))^2,   z = ratio_c - ratio_r

    Args:
        chosen_ratios, rejected_ratios: [B] float, as in `dpo_loss`. The paper's are sums over tokens; of means, which
            others use, the margin is one a token.
        beta: > 0; the paper's tau.

    Returns:
        [B] float, nats squared.

    Source: Azar et al. 2023, arXiv:2310.12036, eq. 17.
    """
    check_same_shape(chosen_ratios=chosen_ratios, rejected_ratios=rejected_ratios)
    return (chosen_ratios - rejected_ratios - 1 / (2 * beta)) ** 2


def simpo_loss(chosen_means: Tensor, rejected_means: Tensor, *, beta: float, gamma: float) -> Tensor:
    """Return simple preference optimization's loss of each pair, which needs no reference.

        loss = -log sigmoid(beta (mean_c - mean_r) - gamma)

    Args:
        chosen_means, rejected_means: [B] float, mean log-prob of the answer's tokens; carry the gradient.
        beta: > 0.
        gamma: the margin aimed at, >= 0.

    Returns:
        [B] float, nats.

    Source: Meng et al. 2024, arXiv:2405.14734, eq. 6.
    """
    check_same_shape(chosen_means=chosen_means, rejected_means=rejected_means)
    return -logsigmoid(beta * (chosen_means - rejected_means) - gamma)


def orpo_loss(chosen_means: Tensor, rejected_means: Tensor) -> Tensor:
    """Return the odds ratio term of odds ratio preference optimization; the log-likelihood term is apart.

        loss = -log sigmoid(log odds_c - log odds_r),   odds = p / (1 - p),   log p = mean log-prob a token

    Args:
        chosen_means, rejected_means: [B] float, <= 0; carry the gradient. Above -`MIN_NLL`, certainty, they are held.

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
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """Return Kahneman-Tversky optimization's loss of each answer that was judged alone.

        loss = w_d (1 - sigmoid(beta (ratio - kl)))   of a desirable answer
               w_u (1 - sigmoid(beta (kl - ratio)))   of another

    Args:
        ratios: [B] float, log pi(answer) - log pi_ref(answer), summed over tokens; carries the gradient.
        is_desirable: [B] bool.
        kl: scalar, >= 0, the policy's divergence from the reference over the whole optimizer step; a constant.
        beta: > 0.
        desirable_weight, undesirable_weight: w_d and w_u.

    Returns:
        [B] float, in [0, max(w_d, w_u)].

    Source: Ethayarajh et al. 2024, arXiv:2402.01306, eq. 8.
    """
    check_same_shape(ratios=ratios, is_desirable=is_desirable)
    gain = beta * (ratios - kl.detach())
    # 1 - sigmoid(x) = sigmoid(-x), without the cancellation.
    return torch.where(is_desirable, desirable_weight * torch.sigmoid(-gain), undesirable_weight * torch.sigmoid(gain))


def distillation_loss(logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """Return the cross-entropy of each token's distribution under the teacher's.

        loss_n = - sum_v q_nv log p_nv,   p = softmax(logits), q = softmax(teacher_logits)

    Args:
        logits: [N, V] float; carries the gradient.
        teacher_logits: [N, V] float; a constant.

    Returns:
        [N] float32, nats; least, the teacher's entropy, when both agree.

    Source: Hinton, Vinyals and Dean 2015, arXiv:1503.02531, at temperature 1.
    """
    check_same_shape(logits=logits, teacher_logits=teacher_logits)
    teacher = teacher_logits.detach().float().softmax(-1)
    return -(teacher * log_softmax(logits.float(), -1)).sum(-1)


def process_reward_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy of each step's verdict among the reward tokens alone.

        loss_n = - sum_k y_nk log p_nk,   p = softmax(logits)

    Args:
        logits: [N, K] float, of the K reward tokens where the step is judged; carries the gradient.
        targets: [N, K] float, the probability of each verdict: hard labels are 0 and 1; a constant.

    Returns:
        [N] float32, nats.

    Source: Wang et al. 2023, "Math-Shepherd", arXiv:2312.08935, eq. 3 with K = 2.
    """
    check_same_shape(logits=logits, targets=targets)
    return -(targets.detach() * log_softmax(logits.float(), -1)).sum(-1)


def _log_odds(means: Tensor) -> Tensor:
    means = means.clamp(max=-MIN_NLL)
    return means - torch.log(-torch.expm1(means))
