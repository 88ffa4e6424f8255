"""Estimates of the KL by hand, and the weight of the KL, which adapts."""

import math

import pytest
import torch

from rlhf_train.algorithms.kl import BOUNDS, MAX_LOG_RATIO, adapted_kl_coef, kl_estimate


def test_kl_estimate_far_from_the_reference_is_bounded():
    far = torch.tensor([[1000.0, -1000.0]], dtype=torch.float64)
    for estimator, bounds in {
        "k1": [MAX_LOG_RATIO, -MAX_LOG_RATIO],
        "k2": [MAX_LOG_RATIO**2 / 2] * 2,
        "k3": [10.0, 10.0],
    }.items():
        assert kl_estimate(far, 0 * far, estimator)[0].tolist() == pytest.approx(bounds, rel=1e-12)
        assert max(bounds) == BOUNDS[estimator]


def test_kl_estimate_by_k3_is_exact_below_ten_nats_and_without_a_gradient_above():
    # e^2.5 - 1 - 2.5 = 8.68 and e^3 - 1 - 3 = 16.09
    logprobs = torch.tensor([[-2.5, -3.0]], dtype=torch.float64, requires_grad=True)
    estimate = kl_estimate(logprobs, torch.zeros(1, 2, dtype=torch.float64), "k3")
    estimate.sum().backward()
    assert estimate[0].tolist() == pytest.approx([math.exp(2.5) - 3.5, 10.0], rel=1e-12)
    assert logprobs.grad[0].tolist() == pytest.approx([1 - math.exp(2.5), 0.0], rel=1e-12)


def test_kl_estimate_of_an_unknown_name_or_other_shapes_is_refused():
    with pytest.raises(ValueError, match=r"k4.*k1, k2, k3"):
        kl_estimate(torch.zeros(1, 2), torch.zeros(1, 2), "k4")
    with pytest.raises(ValueError, match="shapes differ"):
        kl_estimate(torch.zeros(1, 2), torch.zeros(1, 3), "k1")


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (2.2, 0.1 * math.exp(0.01)),  # a tenth too much: 0.1 x 100 / 1000
        (1.8, 0.1 * math.exp(-0.01)),
        (2.0, 0.1),
        (99.0, 0.1 * math.exp(0.02)),  # never more than a fifth
        (-5.0, 0.1 * math.exp(-0.02)),  # k1 may be negative
        (math.nan, 0.1),
        (math.inf, 0.1),
    ],
)
def test_adapted_kl_coef_matches_hand_values(kl, expected):
    adapted = adapted_kl_coef(0.1, kl, target=2.0, horizon=1000, num_rollouts=100)
    assert adapted == pytest.approx(expected, rel=1e-12)


def test_adapted_kl_coef_of_batches_beyond_the_horizon_stays_above_zero_and_can_grow_again():
    coef = 0.1
    for _ in range(3):
        coef = adapted_kl_coef(coef, 0.0, target=2.0, horizon=10_000, num_rollouts=65_536)
    assert 0.0 < coef < 0.1
    assert adapted_kl_coef(coef, 100.0, target=2.0, horizon=10_000, num_rollouts=65_536) > 3 * coef
    # One batch counts as much as its parts, one after the other.
    whole = adapted_kl_coef(0.1, 3.0, target=2.0, horizon=1000, num_rollouts=400)
    parts = 0.1
    for _ in range(4):
        parts = adapted_kl_coef(parts, 3.0, target=2.0, horizon=1000, num_rollouts=100)
    assert parts == pytest.approx(whole, rel=1e-12)
