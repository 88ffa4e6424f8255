"""`accumulate_` on the CPU."""

import pytest
import torch

from rlhf_kernels import accumulate_


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_accumulate_adds_in_float32_whatever_the_shapes(dtype):
    total = torch.tensor([1.0, -2.0, 0.5, 8.0])
    part = torch.tensor([[2.0**-10, 1.0], [0.25, -8.0]], dtype=dtype)
    accumulate_(total, part)
    assert total.tolist() == [1.0 + 2.0**-10, -1.0, 0.75, 0.0]


def test_accumulate_keeps_the_order_of_a_transposed_part():
    total = torch.zeros(2, 3)
    accumulate_(total, torch.arange(6.0, dtype=torch.bfloat16).view(3, 2).T)
    assert total.tolist() == [[0.0, 2.0, 4.0], [1.0, 3.0, 5.0]]


@pytest.mark.parametrize(
    ("total", "part", "message"),
    [
        (torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2), "to float32; got torch.float32 and torch.bfloat16"),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int64), "got torch.int64"),
        (torch.zeros(2), torch.zeros(3), r"got \[3\] on cpu and \[2\] on cpu"),
        (torch.zeros(2), torch.zeros(2, device="meta"), "on meta and"),
        (torch.zeros(3, 2).T, torch.zeros(6), "contiguous"),
    ],
)
def test_accumulate_refuses_what_it_cannot_add(total, part, message):
    with pytest.raises(ValueError, match=message):
        accumulate_(total, part)
