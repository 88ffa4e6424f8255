"""The Triton kernels of `token_logprobs` on a GPU, at the vocabularies of real models, against float64."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from rlhf_kernels import token_logprobs
from rlhf_kernels.dispatch import triton_unavailable_reason
from rlhf_kernels.ops.token_logprobs.reference import token_logprobs_reference

VOCAB_SIZES = [32_000, 50_257, 128_256, 151_936, 262_144, 262_145]


def test_triton_unavailable_reason_on_this_gpu_is_none():
    assert triton_unavailable_reason() is None


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_token_logprobs_full_vocabulary_equals_float64(vocab_size, dtype):
    logits = (3 * torch.randn(64, vocab_size, device="cuda")).to(dtype).requires_grad_()
    token_ids = torch.randint(0, vocab_size, (64,), device="cuda")
    token_ids[5] = -100
    expected_logits = logits.detach().double().requires_grad_()
    outputs = token_logprobs(logits, token_ids, temperature=0.7)
    expected = token_logprobs_reference(expected_logits, token_ids, 0.7)
    for out, want in zip(outputs, expected, strict=True):
        torch.testing.assert_close(out.double(), want, atol=2e-5, rtol=1e-6)

    weights = torch.randn(3, 64, device="cuda")
    sum((w * out).sum() for w, out in zip(weights, outputs, strict=True)).backward()
    sum((w * out).sum() for w, out in zip(weights.double(), expected, strict=True)).backward()
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(logits.grad.double(), expected_logits.grad, atol=1e-6, rtol=8 * rounding)


def test_token_logprobs_row_offsets_beyond_int32_equal_float64():
    # 20,000 rows of 151,936 are 3.0e9 elements; 2**31 is 2.1e9.
    rows, vocab_size = 20_000, 151_936
    if torch.cuda.mem_get_info()[0] < 16 << 30:
        pytest.skip("needs 16 GiB of free device memory")
    logits = torch.zeros(rows, vocab_size, dtype=torch.bfloat16, device="cuda")
    logits[-1].normal_()
    logits.requires_grad_()
    token_ids = torch.randint(0, vocab_size, (rows,), device="cuda")
    logprobs, entropy, _ = token_logprobs(logits, token_ids)
    (logprobs.sum() + entropy.sum()).backward()
    last = logits.detach()[-1:].double().requires_grad_()
    want = token_logprobs_reference(last, token_ids[-1:], 1.0)
    (want[0].sum() + want[1].sum()).backward()
    torch.testing.assert_close(logprobs[-1:].double(), want[0], atol=2e-5, rtol=1e-6)
    torch.testing.assert_close(entropy[-1:].double(), want[1], atol=2e-5, rtol=1e-6)
    torch.testing.assert_close(logits.grad[-1:].double(), last.grad, atol=1e-6, rtol=0.02)


def test_token_logprobs_same_input_twice_agrees_bit_for_bit():
    logits = torch.randn(256, 151_936, device="cuda", dtype=torch.bfloat16)
    token_ids = torch.randint(0, 151_936, (256,), device="cuda")
    first, second = token_logprobs(logits, token_ids), token_logprobs(logits, token_ids)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_token_logprobs_without_gradient_allocates_no_float32_copy_of_the_logits():
    logits = torch.randn(512, 151_936, device="cuda", dtype=torch.bfloat16)
    token_ids = torch.randint(0, 151_936, (512,), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        token_logprobs(logits, token_ids)
    assert torch.cuda.max_memory_allocated() - before < 1 << 20


@pytest.mark.parametrize("num_rows", [1, 63, 100, 2000])
def test_token_logprobs_inplace_backward_gives_the_same_gradient_in_the_logits_memory(num_rows):
    leaf = torch.randn(num_rows, 151_936, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    token_ids = torch.randint(0, 151_936, (num_rows,), device="cuda")
    gradients = []
    for inplace in (False, True):
        logits = leaf * 2
        logits.register_hook(gradients.append)
        sum(values.sum() for values in token_logprobs(logits, token_ids, inplace_backward=inplace)).backward()
    assert torch.equal(*gradients)
    assert gradients[0].data_ptr() != gradients[1].data_ptr() == logits.data_ptr()


@pytest.mark.parametrize("around", ["compile", "checkpoint"])
def test_token_logprobs_inside_another_mechanism_gives_the_same(around):
    def loss(leaf):
        results = token_logprobs(leaf * 2, token_ids, temperature=0.7, inplace_backward=True)
        return results.logprobs.sum() + results.entropy.sum()

    leaf = torch.randn(100, 50_257, device="cuda", requires_grad=True)
    token_ids = torch.randint(0, 50_257, (100,), device="cuda")
    (plain,) = torch.autograd.grad(loss(leaf), leaf)
    value = torch.compile(loss)(leaf) if around == "compile" else checkpoint(loss, leaf, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(value, leaf)[0], plain)
