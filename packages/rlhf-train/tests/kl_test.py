"""The weight of the KL, which adapts."""

import math

import pytest

from rlhf_train.kl import adapted_kl_coef


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
