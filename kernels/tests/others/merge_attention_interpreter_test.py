"""The Triton kernel of `merge_attention_` in Triton's interpreter, on the CPU, against its formula in float64."""

import os
from pathlib import Path

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":

    def test_triton_merge_attention_interpreted_passes_all_cases(interpret):
        interpret(Path(__file__).resolve(), num_cases=5)

else:
    import torch

    from rlhf_kernels.ops.merge_attention import triton as fused

    @pytest.mark.parametrize("shape", [(1, 1, 8), (37, 3, 24), (130, 2, 64)])
    def test_triton_merge_attention_equals_float64_and_touches_nothing_else(shape, monkeypatch):
        monkeypatch.setattr(fused, "BLOCK_ELEMENTS", 1024)
        num_queries, num_heads, num_dims = shape
        around = torch.randn(num_queries + 2, num_heads, num_dims)
        sums = torch.randn(num_heads, num_queries + 2)
        output, lse = around[1:-1], sums[:, 1:-1]
        other, other_lse = torch.randn(shape), 3 * torch.randn(num_heads, num_queries)
        weights = lse.double().exp().T[..., None], other_lse.double().exp().T[..., None]
        expected = (weights[0] * output.double() + weights[1] * other.double()) / sum(weights)
        kept = around[[0, -1]].clone(), sums[:, [0, -1]].clone()
        fused.merge_attention_triton_(output, lse, other, other_lse)
        torch.testing.assert_close(output.double(), expected, atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(lse.double(), sum(weights)[..., 0].T.log(), atol=2e-6, rtol=1e-6)
        assert torch.equal(around[[0, -1]], kept[0]) and torch.equal(sums[:, [0, -1]], kept[1])

    def test_triton_merge_attention_does_not_overflow():
        output, other = torch.ones(1, 1, 8), torch.full((1, 1, 8), 3.0)
        lse = torch.full((1, 1), 200.0)
        fused.merge_attention_triton_(output, lse, other, torch.full((1, 1), 200.0))
        torch.testing.assert_close(output, torch.full((1, 1, 8), 2.0))
        torch.testing.assert_close(lse, torch.tensor([[200.0]]) + torch.tensor(2.0).log())

    def test_triton_merge_attention_leaves_masked_queries(monkeypatch):
        monkeypatch.setattr(fused, "BLOCK_ELEMENTS", 16)
        output, other = torch.ones(5, 1, 8), torch.full((5, 1, 8), 3.0)
        lse, other_lse = torch.zeros(1, 5), torch.zeros(1, 5)
        other[[1, 4]] = other_lse[:, [1, 4]] = torch.nan
        fused.merge_attention_triton_(output, lse, other, other_lse, torch.tensor([1, 0, 2, 9, 0], dtype=torch.int32))
        assert output[:, 0, 0].tolist() == [2, 1, 2, 2, 1]
        torch.testing.assert_close(lse, torch.tensor([[2.0, 1, 2, 2, 1]]).log())
