"""The value loss, KL estimates and the mean over tokens: values one can check by hand."""

import math

import pytest
import torch

from rlhf_train.algorithms.kl import kl_estimate
from rlhf_train.batching import Denominators
from rlhf_train.losses.aggregate import token_mean
from rlhf_train.losses.value import clipped_value_loss


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


def test_kl_estimate_of_other_shapes_is_refused():
    with pytest.raises(ValueError, match="shapes differ"):
        kl_estimate(torch.zeros(1, 2), torch.zeros(1, 3), "k1")


LOSS = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]])
MASK = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])
COUNTS = Denominators(num_tokens=3, num_sequences=2, max_tokens=5)


def test_token_mean_matches_hand_values():
    assert token_mean(LOSS, MASK, COUNTS).item() == pytest.approx((1 + 2 + 4) / 3)


def test_token_mean_shares_of_micro_batches_add_up_to_the_whole():
    shares = [token_mean(LOSS[i : i + 1], MASK[i : i + 1], COUNTS) for i in range(3)]
    assert sum(shares).item() == pytest.approx(token_mean(LOSS, MASK, COUNTS).item(), abs=1e-6)


def test_token_mean_ignores_what_is_not_trained_even_nan():
    poisoned = LOSS.masked_fill(~MASK, float("nan")).requires_grad_()
    loss = token_mean(poisoned, MASK, COUNTS)
    loss.backward()
    assert loss.item() == pytest.approx(token_mean(LOSS, MASK, COUNTS).item())
    assert torch.equal(poisoned.grad != 0, MASK)


def test_token_mean_gradient_is_even_over_trained_tokens_and_zero_elsewhere():
    losses = torch.tensor([[1.0, 2.0, 3.0]], requires_grad=True)
    token_mean(losses, torch.tensor([[False, True, True]]), Denominators(2, 1, 2)).backward()
    assert losses.grad.tolist() == [[0.0, 0.5, 0.5]]


def test_token_mean_of_nothing_is_zero_with_a_gradient_of_zero_even_of_nan():
    losses = torch.tensor([[float("nan"), 1.0]], requires_grad=True)
    token_mean(losses, torch.tensor([[False, False]]), Denominators(0, 0, 0)).backward()
    assert losses.grad.tolist() == [[0.0, 0.0]]


def test_token_mean_of_nothing_is_zero():
    assert token_mean(LOSS, torch.zeros_like(MASK), Denominators(0, 0, 5)).item() == 0.0


def test_token_mean_of_other_shapes_is_refused():
    with pytest.raises(ValueError, match="shapes differ"):
        token_mean(LOSS, MASK[:2], COUNTS)
