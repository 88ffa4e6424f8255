"""The Triton kernel of `accumulate_` on a GPU: equal to torch's two steps bit for bit."""

import pytest
import torch

from rlhf_kernels import accumulate_


@pytest.mark.parametrize("shape", [(0,), (1,), (63,), (896,), (4097,), (1000, 1536)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_accumulate_equals_cast_and_add_and_touches_nothing_else(shape, dtype):
    part = torch.randn(shape, device="cuda").to(dtype)
    around = torch.full((part.numel() + 2,), float("nan"), device="cuda")
    total = around[1:-1].view(shape)
    total.copy_(torch.randn(shape, device="cuda"))
    expected = total + part.float()
    accumulate_(total, part)
    assert torch.equal(total, expected)
    assert around[[0, -1]].isnan().all()


def test_accumulate_beyond_int32_elements():
    size = 2**31 + 5
    if torch.cuda.mem_get_info()[0] < 16 << 30:
        pytest.skip("needs 16 GiB of free device memory")
    total = torch.zeros(size, device="cuda")
    accumulate_(total, torch.ones(size, dtype=torch.bfloat16, device="cuda"))
    assert total.min() == total.max() == 1.0
