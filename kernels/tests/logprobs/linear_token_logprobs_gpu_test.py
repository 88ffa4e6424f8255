"""The Triton form of `linear_token_logprobs` on a GPU, at the vocabularies of real models, against float64."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from rlhf_kernels import PolicyObjective, PolicyStream, linear_policy_loss, linear_token_logprobs
from rlhf_kernels.ops.linear_token_logprobs import product
from rlhf_kernels.ops.linear_token_logprobs.reference import linear_token_logprobs_reference

HIDDEN_SIZE = 256
VOCAB_SIZES = [32_000, 50_257, 128_256, 151_936, 262_144]


@pytest.fixture
def count_blocks(monkeypatch):
    """Return a function that makes blocks small and has none kept, and returns the list of those made by `product`."""

    def count(num_rows, itemsize):
        monkeypatch.setattr("rlhf_kernels.ops.linear_token_logprobs.triton.MAX_KEPT_BYTES", 0)
        block_bytes = 8192 * num_rows * itemsize
        monkeypatch.setattr("rlhf_kernels.ops.linear_token_logprobs.triton.MAX_BLOCK_BYTES", block_bytes)
        blocks, gradient = [], product.head_gradient

        def counted(head, *rest):
            blocks.append(len(head[1]))
            return gradient(head, *rest)

        monkeypatch.setattr(product, "head_gradient", counted)
        return blocks

    return count


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


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize(
    ("num_rows", "dtype"),
    [
        (1, torch.bfloat16),
        (63, torch.float32),
        (100, torch.float16),
        (2000, torch.float16),
        (2000, torch.bfloat16),
    ],
)
def test_linear_token_logprobs_full_vocabulary_is_as_near_to_float64_as_its_twin(
    num_rows, vocab_size, dtype, is_kept, require_as_near, count_blocks
):
    blocks = None if is_kept else count_blocks(num_rows, dtype.itemsize)
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
    if not is_kept and product.fits(*head[:2]):
        assert len(blocks) > 1 and sum(blocks) == vocab_size


# Products of other heights may round otherwise: a half of bfloat16's gradients, float32's all in the last digits.
@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-3)])
def test_linear_token_logprobs_more_rows_than_a_block_equal_those_of_each_part(dtype, rounding):
    head, token_ids = make(20_000, 32_000, dtype)
    whole = linear_token_logprobs(*head[:2], token_ids, bias=head[2])
    parts = [slice(0, 12_000), slice(12_000, 20_000)]
    halves = [linear_token_logprobs(head[0][rows], head[1], token_ids[rows], bias=head[2]) for rows in parts]
    joined = [torch.cat(values) for values in zip(*halves, strict=True)]
    for values, want in zip(whole, joined, strict=True):
        torch.testing.assert_close(values, want, atol=5e-5, rtol=0)
    gradients = [torch.autograd.grad(total(results), head) for results in (whole, joined)]
    for gradient, want in zip(*gradients, strict=True):
        assert (gradient.float() - want.float()).norm() <= rounding * want.float().norm()


@pytest.mark.parametrize("hidden_size", [96, 100])
def test_linear_token_logprobs_of_rows_at_any_address_is_as_near_to_float64_as_its_twin(
    hidden_size, require_as_near, count_blocks
):
    head, token_ids = make(300, 50_257)
    blocks = count_blocks(300, itemsize=2)
    head[:2] = (tensor.detach()[:, :hidden_size].contiguous().requires_grad_() for tensor in head[:2])
    is_hopper = torch.cuda.get_device_capability()[0] == 9
    assert product.fits(*head[:2]) == (is_hopper and hidden_size % 8 == 0)
    assert not product.fits(head[0], head[1].T.contiguous().T) and not product.fits(*(x.float() for x in head[:2]))
    exact, plain = (
        [tensor.detach().to(x).requires_grad_() for tensor in head] for x in (torch.float64, torch.bfloat16)
    )
    results = linear_token_logprobs(*head[:2], token_ids, bias=head[2])
    truth, twin = (linear_token_logprobs_reference(part, token_ids, 1.0) for part in (exact, plain))
    require_as_near(results, twin, truth)
    for part in (results, twin, truth):
        total(part).backward()
    require_as_near(*([tensor.grad for tensor in part] for part in (head, plain, exact)))
    assert sum(blocks) == (50_257 if product.fits(*head[:2]) else 0)


@pytest.mark.parametrize("entropy_coef", [0.0, 0.01])
def test_linear_token_logprobs_without_a_gradient_and_of_the_policy_loss_are_the_same(entropy_coef):
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("elsewhere logits are rounded in products of other shapes")
    (hidden, weight, _), token_ids = make(5000, 151_936)
    counts = {"num_tokens": 5000, "num_sequences": 1, "cu_seqlens": torch.tensor([0, 5000], device="cuda")}
    mask = token_ids >= 0
    stream = PolicyStream(advantages=torch.ones(5000, device="cuda"), loss_mask=mask, **counts)
    objective = PolicyObjective(policy_loss="reinforce", entropy_coef=entropy_coef)
    trained = linear_policy_loss(hidden, weight, token_ids, stream, objective)
    with torch.no_grad():
        given = linear_token_logprobs(hidden, weight, token_ids)
    for got, want in zip(trained[2:], given, strict=False):
        torch.testing.assert_close(got, want, atol=3e-6, rtol=0)


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
