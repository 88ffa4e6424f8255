"""The Triton form of `logprob_kl` in Triton's interpreter, on the CPU, against float64."""

import os
from pathlib import Path

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":

    def test_triton_logprob_kl_interpreted_passes_all_cases(interpret):
        interpret(Path(__file__).resolve(), num_cases=14)

else:
    import torch

    from rlhf_kernels.ops.linear_token_logprobs import triton as blocks
    from rlhf_kernels.ops.logprob_kl.reference import logprob_kl_reference
    from rlhf_kernels.ops.logprob_kl.triton import logprob_kl_triton

    pytestmark = pytest.mark.usefixtures("small_blocks")

    @pytest.fixture
    def small_blocks(monkeypatch):
        """Cut the logits of these sizes into many blocks, both ways: at most 32 rows, 16 or 32 columns."""
        monkeypatch.setattr(blocks, "MAX_KEPT_BYTES", 0)
        monkeypatch.setattr(blocks, "MAX_FORWARD_ROWS", 24)
        monkeypatch.setattr(blocks, "MAX_BACKWARD_ROWS", 32)
        monkeypatch.setattr(blocks, "MAX_BLOCK_BYTES", 2 * 32 * 32 * 4)
        monkeypatch.setattr(blocks, "ALIGNMENT", 16)

    def heads(num_rows, vocab_size, dtype=torch.float32, ref_dtype=torch.float32):
        policy = [torch.randn(num_rows, 12), torch.randn(vocab_size, 12) / 2, torch.randn(vocab_size)]
        reference = [torch.randn(num_rows, 7), torch.randn(vocab_size, 7) / 2, torch.randn(vocab_size)]
        return [tensor.to(dtype) for tensor in policy], [tensor.to(ref_dtype) for tensor in reference]

    def ids(num_rows, vocab_size):
        token_ids = torch.randint(0, vocab_size, (num_rows,))
        token_ids[1::5] = -100
        return token_ids

    @pytest.fixture
    def check(require_equal_float64):
        """Return a function that compares values and gradients with the twin in float64."""

        def compare(policy, reference, token_ids, tolerance=1e-5):
            exact = [tensor.detach().double().requires_grad_() for tensor in policy]
            policy = [tensor.requires_grad_() for tensor in policy]
            results = logprob_kl_triton(policy, reference, token_ids, 0.7)
            expected = logprob_kl_reference(exact, [tensor.double() for tensor in reference], token_ids, 0.7)
            require_equal_float64(results, expected, policy, exact, tolerance)

        return compare

    @pytest.mark.parametrize("num_rows", [1, 33])
    @pytest.mark.parametrize("vocab_size", [1, 17, 101])
    def test_triton_logprob_kl_odd_sizes_equal_float64(num_rows, vocab_size, check):
        check(*heads(num_rows, vocab_size), ids(num_rows, vocab_size))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("ref_dtype", [torch.bfloat16, torch.float32])
    def test_triton_logprob_kl_half_inputs_equal_float64_but_for_rounding(dtype, ref_dtype, check):
        rounding = max(torch.finfo(dtype).eps, torch.finfo(ref_dtype).eps)
        check(*heads(33, 101, dtype, ref_dtype), ids(33, 101), tolerance=4 * rounding)

    def test_triton_logprob_kl_huge_and_forbidden_logits_equal_float64(check):
        policy, reference = heads(6, 70)
        policy[2][:20] = reference[2][:20] = float("-inf")  # all of a block, the first
        policy[2][33] = float("-inf")  # by the policy alone
        reference[2][50] = 1e4  # the reference's largest rises when the policy has weight already
        policy[2][60] = 300.0  # and the policy's by as much
        check(policy, reference, torch.tensor([20, 50, 60, 69, -100, 22]))

    def test_triton_logprob_kl_is_infinite_where_the_reference_alone_forbids():
        policy, reference = heads(3, 70)
        reference[2][30] = float("-inf")
        assert logprob_kl_triton(policy, reference, torch.tensor([1, 2, -100]), 1.0)[3].tolist() == [
            float("inf"),
            float("inf"),
            0.0,
        ]

    def test_triton_logprob_kl_of_equal_models_is_exactly_zero():
        policy, _ = heads(33, 101)
        logprobs, _, ref_logprobs, kl = logprob_kl_triton(policy, policy, ids(33, 101), 0.7)
        assert torch.equal(logprobs, ref_logprobs) and torch.equal(kl, torch.zeros(33))

    def test_triton_logprob_kl_gives_the_reference_no_gradient_and_an_ignored_row_none_at_all():
        policy, reference = heads(3, 40)
        policy[0][1] = reference[0][1] = float("nan")
        for tensor in policy + reference:
            tensor.requires_grad_()
        results = logprob_kl_triton(policy, reference, torch.tensor([0, -1, 39]), 1.0)
        sum(values.sum() for values in results).backward()
        assert [values[1].item() for values in results] == [0.0] * 4
        assert all(tensor.grad is None for tensor in reference)
        assert torch.equal(policy[0].grad[1], torch.zeros(12))
        assert all(tensor.grad.isfinite().all() for tensor in policy)
