"""The average of weights, by hand."""

import pytest
import torch

from rlhf_data.errors import ConfigError
from rlhf_train.run.ema import WeightAverage


def parts(*numbers: float, dtype: torch.dtype = torch.float32) -> list[tuple[str, torch.Tensor]]:
    return [(f"weight{index}", torch.tensor([number], dtype=dtype)) for index, number in enumerate(numbers)]


def average_of(average: WeightAverage, weights: list[tuple[str, torch.Tensor]]) -> list[float]:
    with average.in_place_of(weights):
        return [tensor.item() for _, tensor in weights]


def test_weight_average_matches_hand_values_and_begins_with_the_first_weights():
    average = WeightAverage(0.75, parts(8.0, 0.0))
    weights = parts(5.0, 5.0)
    assert average_of(average, weights) == [8.0, 0.0]
    average.update(parts(4.0, 4.0))
    assert average_of(average, weights) == [7.0, 1.0]  # 3/4 of the old, 1/4 of the new
    average.update(parts(3.0, 5.0))
    assert average_of(average, weights) == [6.0, 2.0]


def test_weight_average_with_decay_0_is_the_last_weights():
    average = WeightAverage(0.0, parts(8.0))
    average.update(parts(3.0))
    assert average_of(average, parts(5.0)) == [3.0]


def test_weight_average_puts_the_weights_back_even_after_an_error():
    weights = parts(5.0)
    average = WeightAverage(0.5, parts(1.0))
    with pytest.raises(RuntimeError, match="disk"), average.in_place_of(weights):
        raise RuntimeError("disk full")
    assert weights[0][1].item() == 5.0


def test_weight_average_holds_no_view_of_the_weights():
    weights = parts(1.0)
    average = WeightAverage(0.5, weights)
    weights[0][1].fill_(9.0)
    assert average_of(average, weights) == [1.0]


def test_weight_average_of_bfloat16_is_kept_in_float32():
    # 1 + 2^-8 lies between two bfloat16 numbers: an average in bfloat16 would never leave 1.
    average = WeightAverage(0.9, parts(1.0, dtype=torch.bfloat16))
    for _ in range(200):
        average.update(parts(1.0078125, dtype=torch.bfloat16))
    assert average_of(average, parts(0.0)) == pytest.approx([1.0078125], abs=1e-5)


def test_weight_average_of_no_weights_is_the_part_of_a_rank_that_has_none():
    average = WeightAverage(0.9, [])
    average.update([])
    assert average_of(average, []) == []


@pytest.mark.parametrize("beta", [-0.1, 1.0, float("nan")])
def test_weight_average_beta_out_of_range_is_refused(beta):
    with pytest.raises(ConfigError, match="ema_beta is"):
        WeightAverage(beta, [])
