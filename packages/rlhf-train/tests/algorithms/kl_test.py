"""Estimates of the KL by hand, and the weight of the KL, which adapts."""

import math

import pytest
import torch

from rlhf_kernels.ops.packed_policy_loss.reference import kl_loss
from rlhf_train.algorithms.kl import BOUNDS, MAX_LOG_RATIO, adapted_kl_coef, kl_estimate


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        # log p - log q of ln 2, 0 and -ln 4.
        ("k1", [math.log(2), 0.0, -math.log(4)]),
        ("k2", [math.log(2) ** 2 / 2, 0.0, math.log(4) ** 2 / 2]),
        ("k3", [0.5 - 1 + math.log(2), 0.0, 4 - 1 - math.log(4)]),
    ],
)
def test_kl_estimate_matches_hand_values(estimator, expected):
    logprobs = torch.tensor([[-1.0, -2.0, -3.0]], dtype=torch.float64)
    difference = torch.tensor([[math.log(2), 0.0, -math.log(4)]], dtype=torch.float64)
    assert kl_estimate(logprobs, logprobs - difference, estimator)[0].tolist() == pytest.approx(expected, rel=1e-12)


def test_kl_estimate_averages_to_the_divergence():
    # The expectation of k1 and k3 under the policy is the divergence itself: sum p log(p / q).
    p, q = torch.tensor([0.7, 0.2, 0.1]).double(), torch.tensor([0.3, 0.3, 0.4]).double()
    divergence = (p * (p / q).log()).sum()
    for estimator in ("k1", "k3"):
        estimate = kl_estimate(p.log()[None], q.log()[None], estimator)[0]
        assert (p * estimate).sum().item() == pytest.approx(divergence.item())


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


def test_unbiased_gradient_is_that_of_k3_times_the_policy_ratio():
    # TRL's `use_bias_correction_kl` differentiates exp(current - old) k3, whose gradient is exp(current - old) d.
    old = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64)
    reference = torch.tensor([-1.3, -1.0, -2.5], dtype=torch.float64)
    current = torch.tensor([-0.9, -2.5, -0.7], dtype=torch.float64, requires_grad=True)
    gap = reference - current
    (expected,) = torch.autograd.grad((torch.exp(current - old) * (torch.exp(gap) - gap - 1)).sum(), current)
    loss = kl_loss(current, old, reference, "k3", unbiased_gradient=True)
    torch.testing.assert_close(torch.autograd.grad(loss.sum(), current)[0], expected)
