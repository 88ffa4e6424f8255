"""The packed form of advantages in the kernels gives what the padded one here does."""

import pytest
import torch

from rlhf_kernels import packed_gae, segmented_scan
from rlhf_train.advantages import generalized_advantages

LENGTHS = torch.tensor([7, 1, 30, 12])


def padded():
    torch.manual_seed(0)
    real = torch.arange(30) < LENGTHS[:, None]
    mask = real & (torch.rand(4, 30) < 0.6)
    return torch.randn(4, 30), torch.randn(4, 30), mask, torch.randn(4), real


@pytest.mark.parametrize(("gamma", "lambd"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0)])
@pytest.mark.parametrize("cut", [False, True])
def test_packed_gae_equals_padded_advantages(gamma, lambd, cut):
    rewards, values, mask, last, real = padded()
    options = {"gamma": gamma, "lambd": lambd, "last_values": last if cut else None}
    expected = generalized_advantages(rewards, values, mask, **options)
    bounds = torch.cat([torch.zeros(1, dtype=torch.int64), LENGTHS.cumsum(0)])
    packed = packed_gae(rewards[real], values[real], mask[real], bounds, **options)
    for got, want in zip(packed, expected, strict=True):
        torch.testing.assert_close(got, want[real], atol=1e-6, rtol=1e-5)


def test_segmented_scan_of_rewards_equals_padded_returns_without_a_critic():
    rewards, _, mask, _, real = padded()
    _, expected = generalized_advantages(rewards, torch.zeros(4, 30), mask, gamma=0.9, lambd=1.0)
    bounds = torch.cat([torch.zeros(1, dtype=torch.int64), LENGTHS.cumsum(0)])
    sums = segmented_scan((rewards * mask)[real], torch.where(mask, 0.9, 1.0)[real], bounds)
    torch.testing.assert_close(sums * mask[real], expected[real], atol=1e-6, rtol=1e-5)
