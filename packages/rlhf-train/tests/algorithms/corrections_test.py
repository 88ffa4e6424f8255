"""Importance weights between engine and trainer: every level and mode by hand."""

import math

import pytest
import torch
from torch import Tensor

from rlhf_train.algorithms.correction import bounded_weights, importance_weights, rejection_statistic
from rlhf_train.algorithms.kl import MAX_LOG_RATIO

# Ratios of trainer to engine: 2 and 8 are trained in the first rollout, 0.5 in the second, nothing in the third.
RATIOS = torch.tensor([[2.0, 8.0, 77.0], [0.5, 77.0, 77.0], [77.0, 77.0, 77.0]])
MASK = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])


def weights(level: str, ratios: Tensor = RATIOS, mask: Tensor = MASK) -> Tensor:
    engine = torch.full_like(ratios, -1.5)
    return importance_weights(engine + ratios.log(), engine, mask, level=level)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_importance_weights_of_equal_logprobs_are_exactly_one_and_of_extremes_finite(level):
    logprobs = torch.randn(3, 5)
    assert torch.equal(importance_weights(logprobs, logprobs, logprobs < 9, level=level), torch.ones(3, 5))
    extreme = importance_weights(
        torch.tensor([[500.0, 500.0]]), torch.zeros(1, 2), torch.ones(1, 2).bool(), level=level
    )
    assert extreme.tolist()[0] == pytest.approx([math.exp(MAX_LOG_RATIO)] * 2)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_importance_weights_do_not_see_what_is_not_trained(level):
    poisoned = RATIOS.masked_fill(~MASK, float("nan"))
    assert torch.equal(weights(level, poisoned), weights(level))
    order = [2, 0, 1]
    assert torch.equal(weights(level, RATIOS[order], MASK[order]), weights(level)[order])


def test_truncate_sets_weights_to_the_bounds_and_keeps_every_token():
    bounded, kept, outside = bounded_weights(weights("token"), MASK, mode="truncate", low=0.8, high=4.0)
    assert torch.allclose(bounded, torch.tensor([[2.0, 4.0, 1.0], [0.8, 1.0, 1.0], [1.0, 1.0, 1.0]]))
    assert torch.equal(kept, MASK)
    assert outside.tolist() == [[False, True, False], [True, False, False], [False, False, False]]


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("token", [[True, False, False], [True, False, False], [False] * 3]),  # 8 > 5
        ("sequence", [[False, False, False], [True, False, False], [False] * 3]),  # 16 > 5: the whole rollout
        ("geometric", [[True, True, False], [True, False, False], [False] * 3]),  # 4 is within
    ],
)
def test_mask_leaves_out_what_is_beyond_the_bounds_and_changes_no_weight(level, expected):
    before = weights(level)
    bounded, kept, outside = bounded_weights(before, MASK, mode="mask", low=0.5, high=5.0)
    assert torch.equal(bounded, before)
    assert kept.tolist() == expected
    assert torch.equal(outside, MASK & ~kept)


def test_bounds_are_within():
    edge = torch.tensor([[0.5, 5.0]])
    _, kept, outside = bounded_weights(edge, torch.ones(1, 2).bool(), mode="mask", low=0.5, high=5.0)
    assert kept.all() and not outside.any()


@pytest.mark.parametrize(
    ("by", "first", "second"),
    [
        # log 2 = 0.6931 and log 8 = 2.0794 in the first rollout, -0.6931 in the second
        ("geometric", (4.0, 4.0), 0.5),
        ("token_k2", (0.24023, 2.16204), 0.24023),
        ("token_k3", (0.30685, 4.92056), 0.19315),
        ("mean_k2", (1.20113, 1.20113), 0.24023),
        ("mean_k3", (2.61371, 2.61371), 0.19315),
        ("max_k2", (2.16204, 2.16204), 0.24023),
        ("max_k3", (4.92056, 4.92056), 0.19315),
    ],
)
def test_rejection_measures_the_distance_of_tokens_and_rollouts(by, first, second):
    engine = torch.full_like(RATIOS, -1.5)
    poisoned = RATIOS.masked_fill(~MASK, float("nan"))
    distance = rejection_statistic(engine + poisoned.log(), engine, MASK, by=by)
    assert distance[MASK].tolist() == pytest.approx([*first, second], abs=1e-5)


def test_unknown_levels_and_modes_and_other_shapes_are_refused():
    with pytest.raises(ValueError, match="did you mean `token`"):
        weights("tokens")
    with pytest.raises(ValueError, match="did you mean `mean_k3`"):
        rejection_statistic(RATIOS, RATIOS, MASK, by="mean_k4")
    with pytest.raises(ValueError, match="known: filter, mask, truncate"):
        bounded_weights(RATIOS, MASK, mode="drop", low=0.5, high=5.0)
    with pytest.raises(ValueError, match="shapes differ"):
        importance_weights(torch.zeros(1, 2), torch.zeros(1, 3), torch.zeros(1, 2).bool(), level="token")
    with pytest.raises(ValueError, match="shapes differ"):
        importance_weights(torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(1, 3).bool(), level="token")
    with pytest.raises(ValueError, match="shapes differ"):
        importance_weights(torch.zeros(1, 3), torch.zeros(1, 2), torch.zeros(1, 2).bool(), level="token")
    with pytest.raises(ValueError, match="shapes differ"):
        bounded_weights(torch.zeros(1, 2), torch.zeros(1, 3).bool(), mode="mask", low=0.5, high=5.0)
