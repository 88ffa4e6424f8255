"""The Triton form of `linear_token_logprobs` on a GPU, at the vocabularies of real models, against float64."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from rlhf_kernels import linear_token_logprobs
from rlhf_kernels.ops.linear_token_logprobs.reference import linear_token_logprobs_reference

HIDDEN_SIZE = 256
VOCAB_SIZES = [32_000, 50_257, 128_256, 151_936, 262_144]


@pytest.fixture(autouse=True)
def seeded_gpu():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    torch.manual_seed(0)


def make(num_rows, vocab_size, dtype=torch.bfloat16):
    """Return a head whose logits have a spread of about 2, and token ids of which some are ignored."""
    hidden = torch.randn(num_rows, HIDDEN_SIZE, device="cuda") / HIDDEN_SIZE**0.5
    weight, bias = 2 * torch.randn(vocab_size, HIDDEN_SIZE, device="cuda"), torch.randn(vocab_size, device="cuda")
    token_ids = torch.randint(0, vocab_size, (num_rows,), device="cuda")
    token_ids[5::11] = -100
    return [tensor.to(dtype).requires_grad_() for tensor in (hidden, weight, bias)], token_ids


def total(results, seed=1):
    """Return a sum of all the results with random weights."""
    generator = torch.Generator("cuda").manual_seed(seed)
    weights = torch.randn(3, len(results[0]), device="cuda", generator=generator)
    return sum((w.to(values.dtype) * values).sum() for w, values in zip(weights, results, strict=True))


@pytest.mark.parametrize("max_kept", [0, 384 << 20])
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize(
    ("num_rows", "dtype"),
    [
        (1, torch.bfloat16),
        (63, torch.float32),
        (100, torch.float16),
        (2000, torch.bfloat16),
    ],
)
def test_linear_token_logprobs_full_vocabulary_is_as_near_to_float64_as_its_twin(
    num_rows, vocab_size, dtype, max_kept, require_as_near, monkeypatch
):
    monkeypatch.setattr("rlhf_kernels.ops.linear_token_logprobs.triton.MAX_KEPT_BYTES", max_kept)
    if torch.cuda.mem_get_info()[0] < 60 * num_rows * vocab_size + (4 << 30):
        pytest.skip("needs more free device memory for the float64 logits")
    head, token_ids = make(num_rows, vocab_size, dtype)
    # The twin rounds its logits to the inputs' dtype as the products do: with bfloat16 by 0.03 at a logit of 10.
    exact, plain = ([tensor.detach().to(kind).requires_grad_() for tensor in head] for kind in (torch.float64, dtype))
    results = linear_token_logprobs(*head[:2], token_ids, temperature=0.7, bias=head[2])
    truth, twin = (linear_token_logprobs_reference(part, token_ids, 0.7) for part in (exact, plain))
    require_as_near(results, twin, truth)
    for part in (results, twin, truth):
        total(part).backward()
    require_as_near(*([tensor.grad for tensor in part] for part in (head, plain, exact)))


def test_linear_token_logprobs_more_rows_than_a_block_equal_those_of_each_part():
    head, token_ids = make(20_000, 32_000, torch.float32)  # products of other heights may round halves otherwise
    whole = linear_token_logprobs(*head[:2], token_ids, bias=head[2])
    parts = [slice(0, 12_000), slice(12_000, 20_000)]
    halves = [linear_token_logprobs(head[0][rows], head[1], token_ids[rows], bias=head[2]) for rows in parts]
    joined = [torch.cat(values) for values in zip(*halves, strict=True)]
    for values, want in zip(whole, joined, strict=True):
        torch.testing.assert_close(values, want, atol=5e-5, rtol=0)
    gradients = [torch.autograd.grad(total(results), head) for results in (whole, joined)]
    for gradient, want in zip(*gradients, strict=True):
        assert (gradient - want).norm() <= 1e-5 * want.norm()


def test_linear_token_logprobs_same_input_twice_agrees_bit_for_bit():
    head, token_ids = make(2000, 151_936)
    runs = []
    for _ in range(2):
        results = linear_token_logprobs(*head[:2], token_ids, bias=head[2])
        runs.append([*results, *torch.autograd.grad(total(results), head)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("around", ["compile", "checkpoint"])
def test_linear_token_logprobs_inside_another_mechanism_gives_the_same(around):
    def loss(hidden, weight, bias):
        return total(linear_token_logprobs(hidden.tanh(), weight, token_ids, bias=bias))

    head, token_ids = make(100, 50_257)
    plain = torch.autograd.grad(loss(*head), head)
    value = torch.compile(loss)(*head) if around == "compile" else checkpoint(loss, *head, use_reentrant=False)
    for gradient, want in zip(torch.autograd.grad(value, head), plain, strict=True):
        assert (gradient - want).float().norm() <= 1e-2 * want.float().norm()


@pytest.mark.parametrize("num_rows", [1024, 8192])
def test_linear_token_logprobs_holds_no_more_than_half_a_gibibyte_besides_the_gradients(num_rows):
    head, token_ids = make(num_rows, 151_936)  # logits of 0.3 GiB, which are kept, and of 2.3
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = linear_token_logprobs(*head[:2], token_ids, bias=head[2])
    assert torch.cuda.max_memory_allocated() - before < 1 << 29
    total(results).backward()
    gradients = sum(tensor.grad.nbytes for tensor in head)
    assert torch.cuda.max_memory_allocated() - before - gradients < 1 << 29
