"""The Triton form of `linear_token_logprobs` in Triton's interpreter, on the CPU, against float64."""

import os
from pathlib import Path

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":

    def test_triton_linear_token_logprobs_interpreted_passes_all_cases(interpret):
        interpret(Path(__file__).resolve(), num_cases=50)

else:
    import torch

    from rlhf_kernels.ops.linear_token_logprobs import product
    from rlhf_kernels.ops.linear_token_logprobs import triton as fused
    from rlhf_kernels.ops.linear_token_logprobs.reference import linear_token_logprobs_reference

    pytestmark = pytest.mark.usefixtures("form")

    @pytest.fixture
    def small_blocks(monkeypatch):
        """Cut the logits of these sizes into many blocks, both ways: at most 16 rows, 64 columns.

        The interpreter runs one program per row after another, so rows are what a case costs.
        """
        monkeypatch.setattr(fused, "MAX_KEPT_BYTES", 0)
        monkeypatch.setattr(fused, "MAX_FORWARD_ROWS", 8)
        monkeypatch.setattr(fused, "MAX_BACKWARD_ROWS", 16)
        monkeypatch.setattr(fused, "MAX_BLOCK_BYTES", 16 * 64 * 4)
        monkeypatch.setattr(fused, "ALIGNMENT", 32)

    def head(num_rows, vocab_size, dtype=torch.float32, bias=True):
        hidden, weight = torch.randn(num_rows, 12).to(dtype), torch.randn(vocab_size, 12).to(dtype)
        return [hidden, weight, torch.randn(vocab_size).to(dtype) if bias else None]

    def ids(num_rows, vocab_size):
        token_ids = torch.randint(0, vocab_size, (num_rows,))
        token_ids[1::5] = -100
        return token_ids

    @pytest.fixture
    def check(require_equal_float64):
        """Return a function that compares values and gradients with the twin in float64."""

        def compare(tensors, token_ids, tolerance=1e-5):
            exact = [None if tensor is None else tensor.detach().double().requires_grad_() for tensor in tensors]
            tensors = [None if tensor is None else tensor.requires_grad_() for tensor in tensors]
            results = fused.linear_token_logprobs_triton(tensors, token_ids, 0.7)
            expected = linear_token_logprobs_reference(exact, token_ids, 0.7)
            require_equal_float64(results, expected, tensors, exact, tolerance)

        return compare

    # Whole blocks and tiles and parts of them: one row, one more than two blocks, and one less or more than a tile.
    @pytest.mark.parametrize(("num_rows", "vocab_size"), [(1, 70), (15, 17), (17, 1), (33, 70)])
    def test_triton_linear_token_logprobs_odd_sizes_equal_float64(num_rows, vocab_size, small_blocks, check):
        check(head(num_rows, vocab_size), ids(num_rows, vocab_size))

    @pytest.mark.parametrize("bias", [False, True])
    def test_triton_linear_token_logprobs_in_one_block_equals_float64(bias, check):
        check(head(17, 90, bias=bias), ids(17, 90))

    def test_triton_linear_token_logprobs_bias_that_leaves_tokens_out_equals_a_head_without_them(small_blocks):
        hidden, weight, _ = head(33, 70)
        kept = torch.ones(70, dtype=torch.bool)
        kept[[3, 4, *range(14, 50)]] = False  # a gap, and all columns of a tile and of a block
        chosen = torch.randint(0, int(kept.sum()), (33,))
        bias = torch.zeros(70).masked_fill(~kept, -torch.inf)
        leaves = [tensor.requires_grad_() for tensor in (hidden, weight)]
        exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight[kept])]
        results = fused.linear_token_logprobs_triton((*leaves, bias), kept.nonzero()[:, 0][chosen], 0.7)
        expected = linear_token_logprobs_reference((*exact, None), chosen, 0.7)
        for outputs in (results, expected):
            sum(torch.linspace(-1, 2, 33) @ column.float() for column in outputs).backward()
        for values, want in zip(results, expected, strict=True):
            torch.testing.assert_close(values.double(), want.detach(), atol=1e-5, rtol=1e-5)
        for gradient, want in ((hidden.grad, exact[0].grad), (weight.grad[kept], exact[1].grad)):
            assert (gradient.double() - want).norm() <= 1e-5 * want.norm()
        assert not weight.grad[~kept].any()

    def test_triton_linear_token_logprobs_under_no_grad_makes_no_logits_of_a_trained_head(monkeypatch):
        monkeypatch.setattr(product, "fits", lambda *_: True)
        monkeypatch.setattr(fused.LogitBlocks, "logits", None)
        tensors = [tensor.requires_grad_() for tensor in head(5, 40)]
        with torch.no_grad():
            assert not fused.linear_token_logprobs_triton(tensors, ids(5, 40), 0.7).logprobs.requires_grad

    @pytest.mark.parametrize("max_kept", [0, 20 * 300 * 4])
    def test_triton_linear_token_logprobs_keeps_few_logits_for_one_backward_pass(max_kept, form, monkeypatch):
        monkeypatch.setattr(fused, "MAX_KEPT_BYTES", max_kept)
        monkeypatch.setattr(fused, "MAX_BLOCK_BYTES", 20 * 256 * 4)
        made, make = [], fused.LogitBlocks.logits
        monkeypatch.setattr(fused.LogitBlocks, "logits", lambda *block: made.append(block) or make(*block))
        tensors = [tensor.requires_grad_() for tensor in head(20, 300)]
        results = fused.linear_token_logprobs_triton(tensors, ids(20, 300), 0.7)
        counts, gradients = [len(made)], []
        for _ in range(2):
            gradients.append(torch.autograd.grad(sum(x.sum() for x in results), tensors, retain_graph=True))
            counts.append(len(made))
        assert counts == ([1, 1, 2] if max_kept else [2, 4, 6] if form == "logits" else [0, 0, 0])
        assert all(map(torch.equal, *gradients))

    @pytest.mark.parametrize(("dtype", "num_rows"), [(torch.bfloat16, 17), (torch.float16, 9)])
    def test_triton_linear_token_logprobs_half_inputs_equal_float64_but_for_rounding(
        dtype, num_rows, small_blocks, check
    ):
        check(head(num_rows, 70, dtype), ids(num_rows, 70), tolerance=4 * torch.finfo(dtype).eps)

    @pytest.mark.parametrize("rows", ["strided", "16 bytes apart", "not so in a copy", "one"])
    def test_triton_linear_token_logprobs_non_contiguous_inputs_equal_float64(rows, small_blocks, check):
        hidden, weight = {
            "strided": lambda: (torch.randn(17, 24)[:, ::2], torch.randn(12, 70).T),
            "16 bytes apart": lambda: (torch.randn(17, 16)[:, :12], torch.randn(140, 12)[::2]),
            "not so in a copy": lambda: (torch.randn(17, 16)[:, :10], torch.randn(70, 12)[:, :10]),
            "one": lambda: (torch.randn(1, 12).expand(17, 12), torch.randn(70, 12)),
        }[rows]()
        check([hidden, weight, torch.randn(140)[::2]], torch.stack([ids(17, 70), ids(17, 70)], dim=1)[:, 0])

    def test_triton_linear_token_logprobs_no_rows_give_gradients_of_zero(small_blocks):
        tensors = [tensor.requires_grad_() for tensor in head(0, 40)]
        results = fused.linear_token_logprobs_triton(tensors, torch.zeros(0, dtype=torch.int64), 1.0)
        sum(values.sum() for values in results).backward()
        assert all(values.shape == (0,) for values in results)
        assert [tensor.grad.abs().sum().item() for tensor in tensors] == [0.0, 0.0, 0.0]

    @pytest.mark.parametrize("frozen", [None, 1])
    def test_triton_linear_token_logprobs_ignored_row_gives_zeros_whatever_its_hidden_state(frozen, small_blocks):
        tensors = head(3, 40)
        tensors[0][1] = float("nan")
        tensors = [tensor.requires_grad_(index != frozen) for index, tensor in enumerate(tensors)]
        results = fused.linear_token_logprobs_triton(tensors, torch.tensor([0, -1, 39]), 1.0)
        sum(values.sum() for values in results).backward()
        assert [values[1].item() for values in results] == [0.0, 0.0, 0.0]
        assert torch.equal(tensors[0].grad[1], torch.zeros(12))
        assert all(tensor.grad is None or tensor.grad.isfinite().all() for tensor in tensors)

    def test_triton_linear_token_logprobs_huge_and_forbidden_logits_equal_float64(small_blocks, check):
        tensors = head(6, 70)
        tensors[2][:20] = float("-inf")  # all of a block, the first
        tensors[2][40] = 1e4
        check(tensors, torch.tensor([20, 40, 69, 40, 41, 22]))

    @pytest.mark.parametrize("frozen", [0, 1, 2])
    def test_triton_linear_token_logprobs_makes_only_the_gradients_that_are_wanted(frozen, small_blocks):
        gradients = []
        tensors, token_ids = head(10, 40), ids(10, 40)
        for some in (False, True):
            leaves = [tensor.clone().requires_grad_(not some or i != frozen) for i, tensor in enumerate(tensors)]
            fused.linear_token_logprobs_triton(leaves, token_ids, 1.0).logprobs.sum().backward()
            gradients.append([leaf.grad for leaf in leaves])
        assert gradients[1][frozen] is None
        gradients[0][frozen] = None
        assert all(a is b or torch.equal(a, b) for a, b in zip(*gradients, strict=True))

    def test_triton_linear_token_logprobs_without_gradient_gives_the_same_bits(small_blocks):
        tensors, token_ids = head(10, 40), ids(10, 40)
        plain = fused.linear_token_logprobs_triton(tensors, token_ids, 0.7)
        tensors[0].requires_grad_()
        results = fused.linear_token_logprobs_triton(tensors, token_ids, 0.7)
        assert all(a.grad_fn is None and torch.equal(a, b) for a, b in zip(plain, results, strict=True))

    def test_triton_linear_token_logprobs_id_beyond_the_vocabulary_is_nan_alone(small_blocks):
        results = fused.linear_token_logprobs_triton(head(2, 40), torch.tensor([40, 39]), 1.0)
        assert results.logprobs.isnan().tolist() == [True, False]
        assert results.entropy.isfinite().all() and results.logsumexp.isfinite().all()
