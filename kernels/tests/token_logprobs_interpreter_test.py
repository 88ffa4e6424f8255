"""The Triton kernels of `token_logprobs` in Triton's interpreter, on the CPU, against float64.

The interpreter is chosen when Triton is imported, and would hold for everything else in the process: the cases run in a
process of their own, which is this file again.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"

if not INTERPRETING:

    def test_triton_token_logprobs_interpreted_passes_all_cases(tmp_path):
        environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-c",
            os.devnull,
            "--rootdir",
            tmp_path,
        ]
        done = subprocess.run([*command, Path(__file__).resolve()], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "16 passed" in done.stdout

else:
    from rlhf_kernels.ops.token_logprobs import triton as fused
    from rlhf_kernels.ops.token_logprobs.reference import token_logprobs_reference

    # Masked lanes hold -inf, which numpy, not the GPU, warns of.
    pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

    def check(logits, token_ids, temperature=0.7, tolerance=2e-6):
        """Compare values and gradients, by random weights on both outputs, with the twin in float64."""
        expected_logits = logits.detach().double().requires_grad_()
        logits.requires_grad_()
        outputs = fused.token_logprobs_triton(logits, token_ids, temperature)
        expected = token_logprobs_reference(expected_logits, token_ids, temperature)
        weights = torch.randn(2, len(token_ids), dtype=torch.float64)
        sum((w.float() * out).sum() for w, out in zip(weights, outputs, strict=True)).backward()
        sum((w * out).sum() for w, out in zip(weights, expected, strict=True)).backward()
        for out, want in zip(outputs, expected, strict=True):
            assert out.dtype == torch.float32
            torch.testing.assert_close(out.double(), want.detach(), atol=tolerance, rtol=1e-6)
        assert logits.grad.dtype == logits.dtype
        rounding = torch.finfo(logits.dtype).eps
        torch.testing.assert_close(logits.grad.double(), expected_logits.grad, atol=tolerance, rtol=2 * rounding)

    @pytest.fixture(autouse=True)
    def poisoned_buffers(monkeypatch):
        """Hand out output buffers full of NaN, so that an element never written shows."""
        torch.manual_seed(0)
        empty = torch.empty

        def poisoned(*args, **kwargs):
            tensor = empty(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        monkeypatch.setattr(fused.torch, "empty", poisoned)

    @pytest.mark.parametrize("vocab_size", [1, 2, 17, 256, 1000])
    @pytest.mark.parametrize("block_size", [4096, 64])
    def test_triton_token_logprobs_odd_vocabulary_equals_float64(vocab_size, block_size, monkeypatch):
        monkeypatch.setattr(fused, "MAX_BLOCK_SIZE", block_size)
        check(4 * torch.randn(3, vocab_size), torch.randint(0, vocab_size, (3,)))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_triton_token_logprobs_half_logits_equal_float64_of_the_same_logits(dtype):
        check((4 * torch.randn(3, 100)).to(dtype), torch.randint(0, 100, (3,)))

    def test_triton_token_logprobs_negative_token_id_gives_zeros_and_no_gradient():
        logits = torch.randn(3, 50)
        logits[1] = float("nan")
        logits.requires_grad_()
        logprobs, entropy = fused.token_logprobs_triton(logits, torch.tensor([0, -100, 49]), 1.0)
        (logprobs.sum() + entropy.sum()).backward()
        assert logprobs[1] == entropy[1] == 0.0
        assert torch.equal(logits.grad[1], torch.zeros(50))
        assert logits.grad[[0, 2]].isfinite().all()

    def test_triton_token_logprobs_extreme_and_forbidden_logits_equal_float64(monkeypatch):
        monkeypatch.setattr(fused, "MAX_BLOCK_SIZE", 16)
        logits = torch.randn(5, 50)
        logits[0] += 1e4
        logits[1] -= 1e4
        logits[2, :20] = float("-inf")
        logits[3, 7] = 300.0
        logits[4, 30:] = float("-inf")
        check(logits, torch.tensor([3, 4, 30, 7, 8]), temperature=1.0)

    def test_triton_token_logprobs_strided_rows_equal_float64():
        wide = torch.randn(3, 128)
        ids = torch.tensor([0, 1, 99])
        narrow = fused.token_logprobs_triton(wide[:, :100], ids, 1.0)
        for out, want in zip(narrow, token_logprobs_reference(wide[:, :100].double(), ids, 1.0), strict=True):
            torch.testing.assert_close(out.double(), want, atol=2e-6, rtol=1e-6)

    def test_triton_token_logprobs_id_beyond_the_vocabulary_is_nan_alone():
        logprobs, entropy = fused.token_logprobs_triton(torch.randn(2, 10), torch.tensor([10, 9]), 1.0)
        assert logprobs.isnan().tolist() == [True, False]
        assert entropy.isfinite().all()
