"""The Triton kernels of `segmented_scan` in Triton's interpreter, on the CPU, against float64."""

import os
from itertools import accumulate
from pathlib import Path

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":

    def test_triton_segmented_scan_interpreted_passes_all_cases(interpret):
        interpret(Path(__file__).resolve(), num_cases=24)

else:
    from rlhf_kernels.ops.segmented_scan import triton as fused
    from rlhf_kernels.ops.segmented_scan.reference import packed_gae_reference, segmented_scan_reference

    LENGTHS = [(1,), (63, 100), (5, 0, 31, 32, 33, 1, 0), (1023, 1024, 1025), (2000, 1, 3100)]

    pytestmark = pytest.mark.usefixtures("poisoned_buffers")

    def bounds(lengths, dtype=torch.int32):
        return torch.tensor([0, *accumulate(lengths)], dtype=dtype)

    def check_scan(values, decays, cu_seqlens, last):
        wide = [None if part is None else part.double() for part in (values, decays, last)]
        expected = segmented_scan_reference(wide[0], wide[1], cu_seqlens, wide[2])
        solved = fused.segmented_scan_triton(values, decays, cu_seqlens, last)
        assert solved.dtype == torch.float32
        torch.testing.assert_close(solved.double(), expected, atol=3e-6, rtol=1e-6)

    @pytest.mark.parametrize("lengths", LENGTHS)
    @pytest.mark.parametrize("max_rows", [32, 4])
    def test_triton_segmented_scan_equals_float64(lengths, max_rows, monkeypatch):
        monkeypatch.setattr(fused, "MAX_ROWS", max_rows)
        size = sum(lengths)
        check_scan(torch.randn(size), torch.rand(size), bounds(lengths), None)
        check_scan(torch.randn(size), torch.rand(size), bounds(lengths, torch.int64), torch.randn(len(lengths)))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_triton_segmented_scan_half_numbers_equal_float64_of_the_same(dtype):
        check_scan(*(torch.rand(100).to(dtype) for _ in range(2)), bounds((63, 37)), torch.randn(2).to(dtype))

    def test_triton_segmented_scan_strided_numbers_equal_float64():
        wide = torch.rand(4, 100)
        check_scan(wide.T[:, 0], wide.T[:, 1], bounds((40, 60)), wide.T[:2, 2])

    def test_triton_segmented_scan_long_products_keep_their_digits():
        # Decays of 1 add up 5,000 numbers; then every hundredth cuts, and others between grow what came before.
        values, decays = torch.rand(5000), torch.ones(5000)
        for _ in range(2):
            solved = fused.segmented_scan_triton(values, decays, bounds((5000,)), None)
            expected = segmented_scan_reference(values.double(), decays.double(), bounds((5000,)), None)
            torch.testing.assert_close(solved.double(), expected, atol=0, rtol=2e-6)
            decays[::100], decays[50::100] = 0.0, 1e4

    @pytest.mark.parametrize("lengths", LENGTHS)
    @pytest.mark.parametrize("turns", [False, True])
    def test_triton_packed_gae_equals_float64(lengths, turns):
        size = sum(lengths)
        rewards, values, mask = torch.randn(size), torch.randn(size), torch.rand(size) < 0.6
        rewards[~mask], values[~mask] = float("nan"), float("inf")
        starts = mask & (torch.rand(size) < 0.1) if turns else None
        last = torch.randn(len(lengths)) if turns else None
        discounts = (0.99, 0.95, 0.5)
        results = fused.packed_gae_triton(rewards, values, mask, bounds(lengths), last, starts, discounts=discounts)
        wide = (rewards.double(), values.double(), mask, bounds(lengths), last, starts)
        for got, want in zip(results, packed_gae_reference(*wide, discounts=discounts), strict=True):
            assert got.dtype == torch.float32
            torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-6)
