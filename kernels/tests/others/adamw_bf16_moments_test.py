"""`adamw_bf16_moments_` on the CPU: against AdamW in float64, and what its rounding promises."""

import math

import numpy as np
import pytest
import torch

from rlhf_kernels import adamw_bf16_moments_
from rlhf_kernels.ops.adamw_bf16_moments import reference

SETTINGS = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
HALF_UNIT = 2.0**-8  # of the last place of bfloat16, at most, relative


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def new(size):
    return torch.randn(size), *(torch.zeros(size, dtype=torch.bfloat16) for _ in range(2))


def round_to_nearest(monkeypatch):
    monkeypatch.setattr(reference, "_rounded", lambda value, noise: value.bfloat16())


def float64_step(w, g, m, v, t, *, lr, betas, eps, weight_decay):
    """One update by the page of the paper, in float64."""
    m = betas[0] * m + (1 - betas[0]) * g
    v = betas[1] * v + (1 - betas[1]) * g * g
    mean, root = m / (1 - betas[0] ** t), (v / (1 - betas[1] ** t)).sqrt()
    return w - lr * weight_decay * w - lr * mean / (root + eps), m, v


@pytest.mark.parametrize("num_updates", [1, 2, 7, 100_000])
@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.0, 0.999), (0.8, 0.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_update_is_that_of_float64_and_moments_are_neighbours_of_the_exact_ones(num_updates, betas, dtype):
    weight, average, square = new(5000)
    average.normal_()
    square.uniform_(1e-12, 4)
    gradient = torch.randn(50, 100).to(dtype).T
    settings = SETTINGS | {"betas": betas}
    states = (part.double() for part in (average, square))
    exact = float64_step(weight.double(), gradient.flatten().double(), *states, num_updates, **settings)
    adamw_bf16_moments_(weight, gradient, average, square, num_updates=num_updates, **settings)
    torch.testing.assert_close(weight.double(), exact[0], rtol=1e-6, atol=3e-7)
    for moment, wanted in ((average, exact[1]), (square, exact[2])):
        # Nearer than a unit in the last place, and not always the nearest one.
        assert ((moment.double() - wanted).abs() <= 2 * HALF_UNIT * wanted.abs() + 1e-6).all()
        if dtype == torch.float32:
            assert 0.05 < (moment != wanted.bfloat16()).double().mean() < 0.3


@pytest.mark.parametrize("beta2", [0.95, 0.999])
@pytest.mark.parametrize("first", [0.0, 9.0])
def test_moments_of_constant_gradients_reach_their_fixed_points(beta2, first, monkeypatch):
    """From below and from above. Rounded to nearest, the second moment stalls on its way."""
    size = 400
    gradient = torch.full((size,), 0.7)
    num_updates = math.ceil(7 / (1 - beta2))

    def last_moments():
        weight, average, square = new(size)
        square.fill_(first)
        for update in range(num_updates):
            settings = SETTINGS | {"betas": (0.9, beta2)}
            adamw_bf16_moments_(weight, gradient, average, square, num_updates=update + 1, **settings)
        return average.double().mean().item(), square.double().mean().item()

    average, square = last_moments()
    expected = 0.49 + (first - 0.49) * beta2**num_updates
    assert average == pytest.approx(0.7, rel=2e-3)
    assert square == pytest.approx(expected, rel=0.01)
    round_to_nearest(monkeypatch)
    _, stalled = last_moments()
    # It stalls where gain |g^2 - v| is half a unit in the last place: 2 to 8 % away at 0.95, multiples at 0.999.
    assert abs(stalled / expected - 1) > (0.02 if beta2 == 0.95 else 0.5)


def rounded(value, size, num_updates, start=0):
    """A number and its square as moments, after an update that forgets what was before."""
    weight, average, square = new(size)
    settings = SETTINGS | {"betas": (0.0, 0.0), "num_updates": num_updates, "start": start}
    adamw_bf16_moments_(weight, torch.full((size,), value), average, square, **settings)
    return average, square


@pytest.mark.parametrize("value", [1.003, -0.2718281828, 3e-9, 1.0])
def test_rounding_has_no_bias_over_updates_nor_over_positions(value):
    """Over many draws the mean is exact within four standard errors, and neighbouring draws are independent."""
    exact = torch.tensor(value).double().item()
    unit = 2.0 ** (math.floor(math.log2(abs(exact))) - 7)
    share = abs(exact) / unit % 1
    positions = rounded(value, 200_000, 3)[0].double()
    updates = torch.cat([rounded(value, 1, update + 1, start=17)[0] for update in range(4000)]).double()
    for draws in (positions, updates):
        error = 4 * unit * math.sqrt(share * (1 - share) / len(draws))
        assert draws.mean().item() == pytest.approx(exact, abs=error, rel=1e-9)
        assert set(draws.tolist()) <= {math.floor(exact / unit) * unit, math.ceil(exact / unit) * unit}
        if share:
            pairs = torch.stack([draws[:-1], draws[1:]]) / unit
            assert abs(torch.corrcoef(pairs)[0, 1].item()) < 4 / math.sqrt(len(draws))


def test_the_two_moments_of_an_element_are_rounded_independently():
    average, square = rounded(1.003, 100_000, 1)
    ups = torch.stack([average.double() > 1.003, square.double() > 1.003**2]).double()
    assert ups.mean(1).min() > 0.1 and ups.mean(1).max() < 0.9
    assert abs(torch.corrcoef(ups)[0, 1].item()) < 4 / math.sqrt(100_000)


@pytest.mark.parametrize("chunk_size", [1, 7, 1000])
def test_chunks_get_the_update_of_the_whole(monkeypatch, chunk_size):
    gradient = torch.randn(3001)
    whole = new(3001)
    parts = [part.clone() for part in whole]
    monkeypatch.setattr(reference, "CHUNK_SIZE", 100)
    adamw_bf16_moments_(whole[0], gradient, *whole[1:], num_updates=5, start=2**32 - 9, **SETTINGS)
    monkeypatch.setattr(reference, "CHUNK_SIZE", 1 << 20)
    for first in reversed(range(0, 3001, chunk_size)):
        weight, g, average, square = (t[first : first + chunk_size] for t in (parts[0], gradient, *parts[1:]))
        adamw_bf16_moments_(weight, g, average, square, num_updates=5, start=2**32 - 9 + first, **SETTINGS)
    for part, wanted in zip(parts, whole, strict=True):
        assert torch.equal(part, wanted)


@pytest.mark.parametrize("start", [0, 2**31 - 700])
def test_noise_is_another_one_for_every_update_and_position_and_the_same_again(start):
    again = rounded(1.003, 1000, 4, start)
    others = rounded(1.003, 1000, 5, start), rounded(1.003, 1000, 4, start + 1)
    for index, one in enumerate(rounded(1.003, 1000, 4, start)):
        assert torch.equal(one, again[index])
        for other in others:
            assert 0.2 < (one != other[index]).double().mean() < 0.6


@pytest.mark.parametrize("number", [1, 12_345, 2**31 + 5, 2**32 - 1])
def test_hash_is_lowbias32(number):
    """By numpy's 32-bit numbers. Another hash would change the results of resumed runs."""
    bits = np.array([number], dtype=np.uint32)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        bits = (bits ^ (bits >> shift)) * np.uint32(factor)
    expected = int((bits ^ (bits >> 16))[0])
    assert reference._hash(number) == reference._hash(number + 2**32) == expected
    assert reference._hash(torch.tensor([number, 3]))[0] == expected


def test_nothing_happens_to_no_elements():
    adamw_bf16_moments_(*new(0)[:1], torch.zeros(0), *new(0)[1:], num_updates=1, **SETTINGS)


def bad(index=None, change=None):
    tensors = [torch.zeros(4, 3), torch.zeros(4, 3), *(torch.zeros(4, 3, dtype=torch.bfloat16) for _ in range(2))]
    if change is not None:
        tensors[index] = change(tensors[index])
    return tensors


@pytest.mark.parametrize(
    ("tensors", "num_updates", "message"),
    [
        (bad(0, torch.Tensor.bfloat16), 1, "takes a float32 weight, .*; got torch.bfloat16, torch.float32"),
        (bad(1, torch.Tensor.int), 1, "got torch.float32, torch.int32"),
        (bad(2, torch.Tensor.float), 1, "two bfloat16 moments"),
        (bad(3, torch.Tensor.half), 1, "two bfloat16 moments"),
        (bad(3, lambda moment: moment[:2]), 1, r"four tensors of equal size .* \[2, 3\] on cpu"),
        (bad(1, lambda gradient: gradient.to("meta")), 1, r"on meta"),
        (bad(0, lambda weight: weight.T), 1, "contiguous; got a strided view"),
        (bad(2, lambda moment: moment.T), 1, "contiguous; got a strided view"),
        (bad(3, lambda moment: moment.T), 1, "contiguous; got a strided view"),
        (bad(), 0, "counts updates from 1; got 0"),
    ],
)
def test_what_cannot_be_updated_is_refused(tensors, num_updates, message):
    with pytest.raises(ValueError, match=message):
        adamw_bf16_moments_(*tensors, num_updates=num_updates, **SETTINGS)
