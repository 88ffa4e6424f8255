"""The Triton kernel of `adamw_bf16_moments_` in Triton's interpreter, on the CPU: the twin's update, with its noise."""

import os
from pathlib import Path

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":

    def test_triton_adamw_interpreted_passes_all_cases(interpret):
        interpret(Path(__file__).resolve(), num_cases=6)

else:
    import torch

    from rlhf_kernels.ops.adamw_bf16_moments import triton as fused
    from rlhf_kernels.ops.adamw_bf16_moments.reference import Factors, adamw_bf16_moments_reference_

    @pytest.mark.parametrize("size", [0, 1, 1000])
    @pytest.mark.parametrize(("num_updates", "start"), [(1, 0), (40, 2**32 - 500)])
    def test_triton_adamw_equals_the_twin_and_touches_nothing_else(size, num_updates, start, monkeypatch):
        monkeypatch.setattr(fused, "BLOCK_SIZE", 256)
        torch.manual_seed(0)
        factors = Factors.of(num_updates, 0.01, (0.9, 0.95), 1e-8, 0.1)
        weight, gradient, average, square = torch.randn(4, size + 2)
        whole = [weight, average.bfloat16(), square.square().bfloat16()]
        kept = [part.clone() for part in whole]
        for parts, compute in ((whole, fused.adamw_bf16_moments_triton_), (kept, adamw_bf16_moments_reference_)):
            inner = [part[1:-1] for part in parts]
            compute(inner[0], gradient[1:-1].bfloat16(), *inner[1:], factors, start)
        torch.testing.assert_close(whole[0], kept[0], rtol=1e-6, atol=1e-7)
        for part, wanted in zip(whole[1:], kept[1:], strict=True):
            # In the last place of float32 they may differ, and then rarely in the noise's verdict.
            assert (part != wanted).double().mean() < 0.005
            torch.testing.assert_close(part, wanted, rtol=2**-7, atol=1e-6)
