"""Policy and value losses, KL estimates and reductions: values one can check by hand, and slow float64 twins."""

import math

import pytest
import torch

from rlhf_train.algorithms import REDUCTIONS
from rlhf_train.batching import Denominators
from rlhf_train.kl import kl_estimate
from rlhf_train.losses.aggregate import aggregate
from rlhf_train.losses.policy import MAX_LOG_RATIO, clipped_policy_loss, is_clipped, policy_ratio
from rlhf_train.losses.value import clipped_value_loss


def policy_loss(ratio: float, advantage: float) -> tuple[float, float]:
    """The loss at clip range 0.2 and its gradient with respect to the log-prob."""
    logprob = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    loss = clipped_policy_loss(
        logprob, torch.zeros_like(logprob), torch.full_like(logprob, advantage), clip_low=0.2, clip_high=0.2
    )
    loss.sum().backward()
    return loss.item(), logprob.grad.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),  # on policy: -A, and d(-r A)/d logprob = -r A
        (1.1, 2.0, -2.2, -2.2),  # inside the range
        (1.5, 2.0, -2.4, 0.0),  # above it, favoured: held at 1.2 A
        (0.5, 2.0, -1.0, -1.0),  # below it, not favoured: free, so that it can come back
        (0.5, -2.0, 1.6, 0.0),  # below it, favoured: held at 0.8 A
        (1.5, -2.0, 3.0, 3.0),  # above it, not favoured: free
        (1.0, 0.0, 0.0, 0.0),
    ],
)
def test_clipped_policy_loss_matches_hand_values(ratio, advantage, loss, gradient):
    assert policy_loss(ratio, advantage) == pytest.approx((loss, gradient), abs=1e-12)


def test_clipped_policy_loss_uneven_range_uses_each_bound():
    logprobs = torch.log(torch.tensor([[1.25, 0.75]]))
    advantages = torch.tensor([[1.0, -1.0]])
    loss = clipped_policy_loss(logprobs, torch.zeros(1, 2), advantages, clip_low=0.1, clip_high=0.28)
    assert torch.allclose(loss, torch.tensor([[-1.25, 0.9]]))


def test_clipped_policy_loss_extreme_ratio_stays_finite_without_gradient():
    logprobs = torch.tensor([[200.0]], requires_grad=True)
    loss = clipped_policy_loss(logprobs, torch.zeros(1, 1), -torch.ones(1, 1), clip_low=0.2, clip_high=0.2)
    loss.sum().backward()
    assert loss.item() == pytest.approx(math.exp(MAX_LOG_RATIO), rel=1e-5)
    assert logprobs.grad.item() == 0.0


def test_clipped_policy_loss_old_logprobs_and_advantages_get_no_gradient():
    logprobs, old, advantages = (torch.randn(2, 3, requires_grad=True) for _ in range(3))
    clipped_policy_loss(logprobs, old, advantages, clip_low=0.2, clip_high=0.2).sum().backward()
    assert old.grad is None and advantages.grad is None


def test_is_clipped_agrees_with_where_the_gradient_vanishes():
    for ratio, advantage in [(1.5, 1.0), (0.5, 1.0), (0.5, -1.0), (1.5, -1.0), (1.0, 1.0)]:
        flat = is_clipped(torch.tensor(ratio), torch.tensor(advantage), clip_low=0.2, clip_high=0.2)
        assert bool(flat) == (policy_loss(ratio, advantage)[1] == 0.0)


def test_policy_losses_of_other_shapes_are_refused():
    with pytest.raises(ValueError, match="shapes differ"):
        clipped_policy_loss(torch.zeros(1, 2), torch.zeros(1, 3), torch.zeros(1, 2), clip_low=0.2, clip_high=0.2)


def test_policy_ratio_of_equal_logprobs_is_exactly_one():
    logprobs = torch.randn(4, 7)
    assert torch.equal(policy_ratio(logprobs, logprobs), torch.ones(4, 7))


def test_clipped_value_loss_matches_hand_values():
    # V = 1.0, old = 0.0, clip 0.5 -> clipped V 0.5. R = 2: free (1-2)^2 = 1, clipped (0.5-2)^2 = 2.25; half the larger.
    # R = 0: free 1, clipped 0.25 -> 1 / 2.
    values, old = torch.tensor([[1.0, 1.0]]), torch.zeros(1, 2)
    loss = clipped_value_loss(values, old, torch.tensor([[2.0, 0.0]]), value_clip=0.5)
    assert torch.allclose(loss, torch.tensor([[1.125, 0.5]]))


def test_clipped_value_loss_without_clip_is_half_the_square_and_pulls_towards_the_return():
    values = torch.tensor([[1.0]], requires_grad=True)
    clipped_value_loss(values, torch.zeros(1, 1), torch.tensor([[3.0]]), value_clip=None).sum().backward()
    assert values.grad.item() == -2.0


def test_clipped_value_loss_beyond_the_clip_has_no_gradient_when_moving_away_helps():
    # V moved from 0 to 1 (clip 0.5) towards R = 2: the clipped branch is the larger one and is flat.
    values = torch.tensor([[1.0]], requires_grad=True)
    clipped_value_loss(values, torch.zeros(1, 1), torch.tensor([[2.0]]), value_clip=0.5).sum().backward()
    assert values.grad.item() == 0.0


@pytest.mark.parametrize(("estimator", "value"), [("k1", 0.5), ("k2", 0.125), ("k3", math.exp(-0.5) - 0.5)])
def test_kl_estimate_matches_hand_values(estimator, value):
    # d = 0.5: k1 = d, k2 = d^2 / 2, k3 = e^-d - 1 + d
    assert kl_estimate(torch.tensor([[0.5]]), torch.zeros(1, 1), estimator).item() == pytest.approx(value)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimate_of_equal_logprobs_is_exactly_zero_and_of_extremes_finite(estimator):
    logprobs = torch.randn(3, 5)
    assert torch.equal(kl_estimate(logprobs, logprobs, estimator), torch.zeros(3, 5))
    extremes = torch.tensor([[1e4, -1e4]])
    assert kl_estimate(extremes, torch.zeros(1, 2), estimator).isfinite().all()


def test_kl_estimate_averages_to_the_divergence():
    # The expectation of k1 and k3 under the policy is the divergence itself: sum p log(p / q).
    p, q = torch.tensor([0.7, 0.2, 0.1]).double(), torch.tensor([0.3, 0.3, 0.4]).double()
    divergence = (p * (p / q).log()).sum()
    for estimator in ("k1", "k3"):
        estimate = kl_estimate(p.log()[None], q.log()[None], estimator)[0]
        assert (p * estimate).sum().item() == pytest.approx(divergence.item())


def test_kl_estimate_unknown_name_lists_the_known():
    with pytest.raises(ValueError, match="k1, k2, k3"):
        kl_estimate(torch.zeros(1, 1), torch.zeros(1, 1), "k4")


LOSS = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]])
MASK = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])
COUNTS = Denominators(num_tokens=3, num_sequences=2, max_tokens=5)


@pytest.mark.parametrize(
    ("reduction", "value"),
    [
        ("token_mean", 7 / 3),  # (1 + 2 + 4) / 3 tokens
        ("seq_mean_token_mean", (1.5 + 4) / 2),  # means of the two rows that train anything
        ("seq_mean_token_sum", 7 / 2),
        ("seq_mean_token_sum_norm", 7 / 10),  # 2 sequences x 5 tokens
    ],
)
def test_aggregate_matches_hand_values(reduction, value):
    assert aggregate(LOSS, MASK, reduction, COUNTS).item() == pytest.approx(value)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_aggregate_shares_of_micro_batches_add_up_to_the_whole(reduction):
    whole = aggregate(LOSS, MASK, reduction, COUNTS)
    shares = [aggregate(LOSS[i : i + 1], MASK[i : i + 1], reduction, COUNTS) for i in range(3)]
    assert sum(shares).item() == pytest.approx(whole.item(), abs=1e-6)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_aggregate_ignores_what_is_not_trained_even_nan(reduction):
    poisoned = LOSS.masked_fill(~MASK, float("nan")).requires_grad_()
    loss = aggregate(poisoned, MASK, reduction, COUNTS)
    loss.backward()
    assert loss.item() == pytest.approx(aggregate(LOSS, MASK, reduction, COUNTS).item())
    assert torch.equal(poisoned.grad != 0, MASK)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_aggregate_of_nothing_is_zero(reduction):
    nothing = torch.zeros_like(MASK)
    assert aggregate(LOSS, nothing, reduction, Denominators(0, 0, 5)).item() == 0.0


def test_aggregate_unknown_reduction_suggests_the_nearest():
    with pytest.raises(ValueError, match="did you mean `token_mean`"):
        aggregate(LOSS, MASK, "token_meen", COUNTS)
