"""The Triton kernel of `merge_attention_` on a GPU, against its formula in float64."""

import pytest
import torch

from rlhf_kernels import merge_attention_


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 1, 8), (1000, 14, 64), (333, 5, 96), (4097, 3, 128), (65, 2, 256)])
def test_merge_equals_float64_and_touches_nothing_else(shape, dtype):
    torch.manual_seed(0)
    num_queries, num_heads, num_dims = shape
    around = torch.randn(num_queries + 2, num_heads, num_dims, device="cuda").to(dtype)
    sums = torch.randn(num_heads, num_queries + 2, device="cuda")
    output, lse = around[1:-1], sums[:, 1:-1]
    other = torch.randn(shape, device="cuda").to(dtype)
    other_lse = 3 * torch.randn(num_heads, num_queries, device="cuda")
    weights = lse.double().exp().T[..., None], other_lse.double().exp().T[..., None]
    expected = (weights[0] * output.double() + weights[1] * other.double()) / sum(weights)
    kept = around[[0, -1]].clone(), sums[:, [0, -1]].clone()
    merge_attention_(output, lse, other, other_lse)
    bound = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2e-6}[dtype]
    torch.testing.assert_close(output.double(), expected, atol=bound / 4, rtol=bound)
    torch.testing.assert_close(lse.double(), sum(weights)[..., 0].T.log(), atol=2e-6, rtol=1e-6)
    assert torch.equal(around[[0, -1]], kept[0]) and torch.equal(sums[:, [0, -1]], kept[1])
