"""The gap between dtypes is that of rounding: products round once, and both dtypes compute the same model."""

import pytest
import torch
from torch.nn import functional

from models import SHAPES
from workloads.learning import rounding

SMALL = SHAPES["small"] | {"vocab_size": 256, "initializer_range": 0.02}


def test_products_round_once():
    draw = torch.Generator().manual_seed(0)
    states, weight = (torch.randn(3, 512, generator=draw).bfloat16() for _ in range(2))
    exact = states.double() @ weight.double().T
    with rounding.Float32Sums():
        assert torch.equal(functional.linear(states, weight), exact.float().bfloat16())
        assert functional.linear(states.float(), weight.float()).dtype == torch.float32


def test_gap_is_that_of_rounding():
    torch.manual_seed(0)
    with torch.no_grad(), rounding.Float32Sums():
        measured = rounding.gap(SMALL, 64)
    assert 0 < measured["gap_mean"] < measured["gap_max"] < 0.05
    # The weights are so small that the model is nearly uniform: log(256) nats.
    assert measured["entropy"] == pytest.approx(5.545, abs=0.2)
