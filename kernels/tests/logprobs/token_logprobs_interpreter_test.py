"""The Triton kernels of `token_logprobs` in Triton's interpreter, on the CPU, against float64."""

import os
from pathlib import Path

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":

    def test_triton_token_logprobs_interpreted_passes_all_cases(interpret):
        interpret(Path(__file__).resolve(), num_cases=28)

else:
    import torch
    import torch.utils.checkpoint

    from rlhf_kernels.ops.token_logprobs import triton as fused
    from rlhf_kernels.ops.token_logprobs.reference import token_logprobs_reference

    def check(logits, token_ids, temperature=0.7, tolerance=2e-6):
        """Compare values and gradients, by random weights on both outputs, with the twin in float64."""
        expected_logits = logits.detach().double().requires_grad_()
        logits.requires_grad_()
        outputs = fused.token_logprobs_triton(logits, token_ids, temperature)
        expected = token_logprobs_reference(expected_logits, token_ids, temperature)
        weights = torch.randn(3, len(token_ids), dtype=torch.float64)
        sum((w.float() * out).sum() for w, out in zip(weights, outputs, strict=True)).backward()
        sum((w * out).sum() for w, out in zip(weights, expected, strict=True)).backward()
        for out, want in zip(outputs, expected, strict=True):
            assert out.dtype == torch.float32
            torch.testing.assert_close(out.double(), want.detach(), atol=tolerance, rtol=1e-6)
        assert logits.grad.dtype == logits.dtype
        rounding = torch.finfo(logits.dtype).eps
        torch.testing.assert_close(logits.grad.double(), expected_logits.grad, atol=tolerance, rtol=2 * rounding)

    @pytest.mark.parametrize("vocab_size", [1, 2, 17, 256, 304, 1000])
    @pytest.mark.parametrize("block_size", [4096, 64])
    def test_triton_token_logprobs_odd_vocabulary_equals_float64(vocab_size, block_size, monkeypatch):
        monkeypatch.setattr(fused, "MAX_BLOCK_SIZE", block_size)
        check(4 * torch.randn(3, vocab_size), torch.randint(0, vocab_size, (3,)))

    @pytest.mark.parametrize("num_rows", [0, 1, 63, 100])
    def test_triton_token_logprobs_odd_row_count_equals_float64(num_rows):
        check(4 * torch.randn(num_rows, 33), torch.randint(0, 33, (num_rows,), dtype=torch.int32))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_triton_token_logprobs_half_logits_equal_float64_of_the_same_logits(dtype):
        check((4 * torch.randn(3, 100)).to(dtype), torch.randint(0, 100, (3,)))

    def test_triton_token_logprobs_negative_token_id_gives_zeros_and_no_gradient():
        logits = torch.randn(3, 50)
        logits[1] = float("nan")
        logits.requires_grad_()
        logprobs, entropy, _ = fused.token_logprobs_triton(logits, torch.tensor([0, -100, 49]), 1.0)
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
        logprobs, entropy, _ = fused.token_logprobs_triton(torch.randn(2, 10), torch.tensor([10, 9]), 1.0)
        assert logprobs.isnan().tolist() == [True, False]
        assert entropy.isfinite().all()

    @pytest.mark.parametrize("place", [0, 40])
    def test_triton_token_logprobs_nan_logit_is_not_hidden(place, monkeypatch):
        monkeypatch.setattr(fused, "MAX_BLOCK_SIZE", 16)
        logits = torch.randn(2, 50)
        logits[0, place] = float("nan")
        results = fused.token_logprobs_triton(logits, torch.tensor([3, 3]), 1.0)
        assert all(values.isnan().tolist() == [True, False] for values in results)

    def test_triton_token_logprobs_inplace_backward_reuses_the_memory_and_gives_the_same_gradient():
        leaf = torch.randn(4, 50, requires_grad=True)
        token_ids = torch.tensor([0, -100, 49, 7])
        gradients = []
        for inplace in (False, True):
            logits = 2 * leaf
            logits.register_hook(gradients.append)
            sum(values.sum() for values in fused.token_logprobs_triton(logits, token_ids, 0.7, inplace)).backward()
        assert torch.equal(*gradients)
        assert gradients[1].data_ptr() == logits.data_ptr()
        assert gradients[0].data_ptr() != logits.data_ptr()

    def test_triton_token_logprobs_inplace_backward_raises_where_the_logits_are_wanted_again():
        def run(use):
            logits = 2 * torch.randn(2, 5, requires_grad=True)
            other = use(logits)
            return fused.token_logprobs_triton(logits, torch.tensor([0, 4]), 1.0, True).logprobs.sum(), other

        loss, _ = run(torch.sum)
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        loss, other = run(lambda logits: logits.square().sum())
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            other.backward()

    def test_triton_token_logprobs_inplace_backward_under_checkpointing_gives_the_same_gradient_twice():
        leaf, token_ids = torch.randn(3, 20, requires_grad=True), torch.tensor([0, 4, 19])

        def forward(x):
            return fused.token_logprobs_triton(x.sin() * 3, token_ids, 0.7, True).entropy.sum()

        loss = torch.utils.checkpoint.checkpoint(forward, leaf, use_reentrant=False)
        first, second = torch.autograd.grad(loss, leaf, retain_graph=True), torch.autograd.grad(loss, leaf)
        twin = token_logprobs_reference(leaf.sin() * 3, token_ids, 0.7).entropy.sum()
        torch.testing.assert_close(first, torch.autograd.grad(twin, leaf), atol=2e-6, rtol=1e-5)
        assert torch.equal(first[0], second[0])

    def test_triton_token_logprobs_inplace_backward_of_expanded_logits_writes_to_a_copy():
        row = torch.randn(1, 20, requires_grad=True)
        results = fused.token_logprobs_triton(row.expand(3, 20), torch.tensor([0, 4, 19]), 0.7, True)
        results.logprobs.sum().backward()
        expected = row.detach().clone().requires_grad_()
        token_logprobs_reference(expected.expand(3, 20), torch.tensor([0, 4, 19]), 0.7).logprobs.sum().backward()
        torch.testing.assert_close(row.grad, expected.grad)
