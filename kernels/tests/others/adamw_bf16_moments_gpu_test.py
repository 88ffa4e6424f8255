"""The Triton kernel of `adamw_bf16_moments_` on a GPU: the twin's update, with its noise."""

import pytest
import torch

from rlhf_kernels import adamw_bf16_moments_
from rlhf_kernels.ops.adamw_bf16_moments.reference import Factors, adamw_bf16_moments_reference_

SETTINGS = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_updates", "start"), [(1, 0), (1000, 16), (999, 2**32 - 5000)])
@pytest.mark.parametrize("size", [0, 1, 4096, 100_001])
def test_update_equals_the_twins_and_touches_nothing_else(size, num_updates, start, dtype):
    torch.manual_seed(0)
    weight, gradient, average, square = torch.randn(4, size + 2, device="cuda")
    gradient = gradient[1:-1].to(dtype)
    ours = [weight, average.bfloat16(), square.square().bfloat16()]
    twins = [part.clone() for part in ours]
    inner = [part[1:-1] for part in ours]
    adamw_bf16_moments_(inner[0], gradient, *inner[1:], num_updates=num_updates, start=start, **SETTINGS)
    factors = Factors.of(num_updates, *SETTINGS.values())
    inner = [part[1:-1] for part in twins]
    adamw_bf16_moments_reference_(inner[0], gradient, *inner[1:], factors, start)
    torch.testing.assert_close(ours[0], twins[0], rtol=1e-5, atol=1e-7)
    for part, wanted in zip(ours[1:], twins[1:], strict=True):
        # In the last place of float32 they may differ, and then rarely in the noise's verdict.
        assert (part != wanted).double().mean() < 0.005
        torch.testing.assert_close(part, wanted, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("chunk_size", [64, 1 << 14])
def test_chunks_get_the_update_of_the_whole_bit_for_bit(chunk_size):
    torch.manual_seed(0)
    weight, gradient = torch.randn(2, 1 << 18, device="cuda")
    whole = [weight, *torch.zeros(2, 1 << 18, dtype=torch.bfloat16, device="cuda")]
    parts = [part.clone() for part in whole]
    for update in range(3):
        adamw_bf16_moments_(whole[0], gradient, *whole[1:], num_updates=update + 1, **SETTINGS)
        for first in range(0, 1 << 18, chunk_size):
            cut = slice(first, first + chunk_size)
            moments = (part[cut] for part in parts[1:])
            settings = SETTINGS | {"num_updates": update + 1, "start": first}
            adamw_bf16_moments_(parts[0][cut], gradient[cut], *moments, **settings)
    for part, wanted in zip(parts, whole, strict=True):
        assert torch.equal(part, wanted)


def test_second_moment_of_constant_gradients_reaches_their_square():
    """Rounded to nearest, it would stall far below."""
    weight, gradient = torch.zeros(1000, device="cuda"), torch.full((1000,), 0.7, device="cuda")
    moments = [*torch.zeros(2, 1000, dtype=torch.bfloat16, device="cuda")]
    for update in range(8000):
        adamw_bf16_moments_(weight, gradient, *moments, num_updates=update + 1, **SETTINGS)
    assert moments[0].double().mean().item() == pytest.approx(0.7, rel=2e-3)
    assert moments[1].double().mean().item() == pytest.approx(0.49, rel=0.01)


def test_update_beyond_int32_elements():
    size = 2**31 + 5
    if torch.cuda.mem_get_info()[0] < 40 << 30:
        pytest.skip("needs 40 GiB of free device memory")
    weight, gradient = torch.zeros(size, device="cuda"), torch.ones(size, dtype=torch.bfloat16, device="cuda")
    moments = [torch.zeros(size, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    adamw_bf16_moments_(weight, gradient, *moments, num_updates=1, **SETTINGS)
    assert weight.min() == weight.max()
    assert weight[0].item() == pytest.approx(-0.01)
