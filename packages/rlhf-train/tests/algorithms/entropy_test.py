"""How many tokens of high entropy are kept, and the adaptive weight of the entropy bonus."""

import pytest
import torch

from rlhf_train.algorithms.entropy import adapted_entropy_coef, bonus_weight, num_kept


@pytest.mark.parametrize("share", [0.05, 0.2, 0.35, 0.5, 0.9])
@pytest.mark.parametrize("count", [1, 2, 5, 17, 100])
def test_as_many_tokens_are_kept_as_lie_at_or_above_the_quantile(count, share):
    # TRL's rule (`get_high_entropy_mask`): torch's quantile of the batch, which is interpolated.
    entropies = torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(count))
    assert num_kept(count, share) == int((entropies >= torch.quantile(entropies, 1 - share)).sum())


def test_no_tokens_are_no_error():
    assert num_kept(0, 0.2) == 1


def test_coefficient_rises_below_the_target_and_falls_above_it_to_zero():
    coef, used = 0.0, []
    for entropy in (0.1, 0.15, 0.2, 0.3, 0.25, 0.19, float("nan")):
        used.append(bonus_weight(coef, entropy, target=0.2))
        coef = adapted_entropy_coef(coef, entropy, target=0.2, step=0.01)
    assert used == pytest.approx([0.0, 0.01, 0.02, 0.0, 0.0, 0.0, 0.0])
    assert coef == pytest.approx(0.01)
